"""Which SGLang this package was written against, and the check at load."""

from __future__ import annotations

from importlib.metadata import version

from sgl_hybrid.errors import SettingError

SGLANG_VERSION = "0.5.23"


def check_version() -> None:
    """Compare the installed SGLang with the pinned one.

    Raises:
        SettingError: another version is installed. The seams are private parts of SGLang, so no other version is safe.
    """
    installed = version("sglang")
    if installed != SGLANG_VERSION:
        raise SettingError(f"--memory-org: expected sglang=={SGLANG_VERSION}, got {installed}")
