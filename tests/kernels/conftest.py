"""Kernel tests run in processes of their own.

Triton decides when it is imported whether `@triton.jit` interprets or compiles, so one process cannot do both, and a
process that has loaded triton for something else can do neither cleanly. Every test file under `interpret/` and
`compile/` is therefore collected as one item that runs pytest on the file in a child process with the right
environment. In the child the file is collected as usual. To run or debug single tests, be the child:

    KERNEL_TESTS=interpret pytest tests/kernels/interpret/test_ssm_update.py -k absent
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PROCESS = "KERNEL_TESTS"
INTERPRET = {"interpret": "1", "compile": ""}
"""Value of TRITON_INTERPRET per folder; empty means compile."""


class OwnProcessItem(pytest.Item):
    """Runs one test file in a child process and fails with the child's output."""

    def runtest(self) -> None:
        kind = self.path.parent.name
        environment = {**os.environ, PROCESS: kind, "TRITON_INTERPRET": INTERPRET[kind], "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", str(self.path), "-q", "-p", "no:cacheprovider", "--no-header"]
        root = self.config.rootpath
        child = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
        output = child.stdout + child.stderr
        self.add_report_section("call", "child process", output)
        if child.returncode != 0:
            raise ChildFailedError(output)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, ChildFailedError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, 0, f"{self.path.parent.name}/{self.path.name}"


class ChildFailedError(Exception):
    """The child process of a test file failed; the message is its output."""


class OwnProcessFile(pytest.File):
    """A test file that is run as a whole in a child process."""

    def collect(self) -> Iterator[pytest.Item]:
        yield OwnProcessItem.from_parent(self, name="own_process")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Replace a kernel test file by its child process, except in the child."""
    kind = module_path.parent.name
    if kind in INTERPRET and os.environ.get(PROCESS) != kind:
        return OwnProcessFile.from_parent(parent, path=module_path)
    return None
