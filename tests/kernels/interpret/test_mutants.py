"""Every check of the kernels notices its planted faults and passes on the kernels as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.interpret import checks
from tests.kernels.interpret.mutants import MUTANTS, Mutant, load
from triton_ops.conv_update import kernel as conv_kernel
from triton_ops.ssm_update import kernel as ssm_kernel
from triton_ops.state_copy import kernel as copy_kernel

KERNELS = {"ssm": ssm_kernel, "conv": conv_kernel, "copy": copy_kernel}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.op}: {mutant.name}")
def test_a_planted_fault_is_noticed(mutant: Mutant, tmp_path: Path) -> None:
    kernel = load(mutant, KERNELS[mutant.op], tmp_path)
    assert not getattr(checks, mutant.check)(mutant.op, kernel)


@pytest.mark.parametrize(("op", "check"), sorted({(mutant.op, mutant.check) for mutant in MUTANTS}))
def test_the_check_passes_on_the_kernel(op: str, check: str) -> None:
    assert getattr(checks, check)(op, KERNELS[op])
