"""Entry points that SGLang calls: `register` in every process, `cpu_platform` when platforms are discovered.

Source: SGLang 0.5.23, `sglang/srt/plugins/__init__.py` and `sglang/srt/platforms/__init__.py`.
"""

from __future__ import annotations

import os
import sys

from sgl_hybrid.config import CPU_PLATFORM, MemorySettings
from sgl_hybrid.errors import SettingError


def register() -> None:
    """Install the flags and, when this process was asked for them, the CPU operators and the memory organization.

    SGLang logs an exception raised here and starts without the plugin. A user who asked for an organization must not be
    served without it, so a failure ends the process with one line and status 2.

    Raises:
        SystemExit: the environment form of a flag is wrong, or a seam does not fit the installed SGLang.
    """
    try:
        settings = MemorySettings.from_environment(os.environ)
        from sgl_hybrid.seams import install

        install.flags()
        if os.environ.get("SGLANG_PLATFORM") == CPU_PLATFORM:
            install.cpu_operators()
        if settings is not None:
            install.memory(settings)
        install.step_times()
    except SettingError as error:
        print(f"sgl_hybrid: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from error


def cpu_platform() -> str | None:
    """Name the CPU reference platform if `SGLANG_PLATFORM=sgl_hybrid_cpu` asks for it, otherwise nothing."""
    if os.environ.get("SGLANG_PLATFORM") != CPU_PLATFORM:
        return None
    return "sgl_hybrid.seams.cpu_platform.CpuReferencePlatform"
