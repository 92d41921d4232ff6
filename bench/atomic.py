"""Files that are written whole or not at all: whoever reads one, also after a crash, never sees a part of it."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Put a file with `content` in the place of `path`. Raises: OSError if the folder cannot be written."""
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_bytes(content)
    os.replace(temporary, path)
