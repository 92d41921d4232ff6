"""Where a run took place: versions, commit and machine class, as plain data for the manifest.

Names the class of the machine (processor model, cores, memory), never the machine.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("sgl-hybrid", "sglang", "torch", "triton", "transformers", "vllm", "aiohttp", "numpy")


def describe_environment() -> dict[str, Any]:
    """Return versions, git state and machine class. Starts `git` and, where there is one, `nvidia-smi`."""
    return {
        "versions": {"python": platform.python_version(), **_package_versions()},
        "git": git_state(Path(__file__).resolve().parent),
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "cpu": _cpu_model(),
            "num_cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "accelerators": _accelerators(),
        },
    }


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return the commit and whether tracked files differ from it, or None outside a checkout."""
    commit = _output(["git", "-C", str(folder), "rev-parse", "HEAD"])
    if commit is None:
        return None
    changes = _output(["git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no"])
    return {"commit": commit, "dirty": bool(changes)}


def statement(environment: dict[str, Any]) -> str:
    """Return one sentence on what numbers from this environment can say.

    Where its `device` is "cpu" they are of a CPU, whatever is beside it.
    """
    machine = environment["machine"]
    where = f"{machine['cpu']}, {machine['num_cores']} cores, {machine['memory_gib']} GiB"
    if machine["accelerators"] and environment.get("device") != "cpu":
        return f"On a machine with {', '.join(machine['accelerators'])} ({where})."
    return f"CPU run ({where}): its numbers compare organizations on this machine and are no GPU numbers."


def _package_versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def _accelerators() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    return (_output(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]) or "").splitlines()


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
