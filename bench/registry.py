"""Looking up what a user named in a registry of this package."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TypeVar

from sgl_hybrid.errors import SettingError

Entry = TypeVar("Entry")


def registered(registry: Mapping[str, Entry], name: str, what: str) -> Entry:
    """Return the entry called `name`. `what` is the kind of entry with its article, for the message.

    Raises: SettingError that lists the names and the nearest one.
    """
    if name not in registry:
        nearest = difflib.get_close_matches(name, registry, n=1, cutoff=0.0)[0]
        raise SettingError(f"expected {what} out of {', '.join(registry)}, got {name!r}; nearest: {nearest}")
    return registry[name]
