"""What is installed in a process: the flags always, the CPU operators and the memory seams when asked for."""

from __future__ import annotations

from sgl_hybrid.config import MemorySettings
from sgl_hybrid.errors import SettingError

_settings: MemorySettings | None = None


def settings() -> MemorySettings:
    """The settings that this process serves.

    Raises:
        SettingError: no memory organization is installed in this process.
    """
    if _settings is None:
        raise SettingError("expected --memory-org in this process, got none")
    return _settings


def flags() -> None:
    """Put the flags into SGLang's parser and engine. They do nothing until one is used."""
    from sgl_hybrid.seams import flags, hooks

    hooks.apply(flags.SEAMS)
    flags.bind_engine()


def cpu_operators() -> None:
    """Bind the torch operators of the CPU reference platform."""
    from sgl_hybrid.seams import cpu_platform

    cpu_platform.bind_operators()


def memory(wanted: MemorySettings) -> None:
    """Install every seam of the memory organizations in this process, once.

    Raises:
        SettingError: another SGLang version, a seam that does not fit, or other settings installed before.
    """
    global _settings
    if _settings == wanted:
        return
    if _settings is not None:
        raise SettingError(f"expected one memory organization per process, got {_settings} and {wanted}")
    from sgl_hybrid.seams import admission, compat, hooks, mamba_backend, pools, status

    compat.check_version()
    hooks.apply((*pools.SEAMS, *admission.SEAMS, *mamba_backend.SEAMS, *status.SEAMS))
    _settings = wanted
