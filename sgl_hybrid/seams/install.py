"""What is installed in a process: the flags always, the CPU operators and the memory seams when asked for."""

from __future__ import annotations

import os

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
    """Bind the torch operators of the CPU reference platform, and make SGLang's unified pool run there if asked for.

    Raises:
        SettingError: a seam does not fit.
    """
    from sgl_hybrid.seams import cpu_platform, hooks, unified_cpu

    cpu_platform.bind_operators()
    hooks.apply(cpu_platform.SEAMS + unified_cpu.SEAMS)
    if os.environ.get(unified_cpu.ENVIRONMENT):
        unified_cpu.install_pool()


def step_times() -> None:
    """Time decode steps, where `SGLANG_HYBRID_STEP_TIMES` asks for it."""
    from sgl_hybrid.seams import hooks, step_times

    if os.environ.get(step_times.VARIABLE):
        hooks.apply(step_times.SEAMS)


def memory(wanted: MemorySettings) -> None:
    """Install every seam of the memory organizations in this process. Called again with other settings (environment
    forms first, then the command line), the later ones count; the seams read them when the pools are sized.

    Raises:
        SettingError: another SGLang version, or a seam that does not fit.
    """
    global _settings
    from sgl_hybrid.seams import (
        admission,
        allocators,
        compat,
        exact,
        factory,
        hooks,
        isolation,
        mamba_backend,
        pools,
        protection,
        replay,
        status,
        strict,
        tracking,
    )

    compat.check_version()
    factory.register()
    modules = (
        pools,
        allocators,
        tracking,
        exact,
        replay,
        admission,
        mamba_backend,
        protection,
        isolation,
        status,
        strict,
    )
    hooks.apply([seam for module in modules for seam in module.SEAMS])
    _settings = wanted
