"""The gate of the GPU benchmark, run on the CPU in the interpreter: open on the kernels, closed on faulty ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.micro import gpu_gate
from bench.micro.rivals import Rival
from bench.micro.shapes import Shape, SsmArguments
from tests.kernels.interpret.mutants import Mutant, load
from triton_ops.conv_update import kernel as conv_kernel
from triton_ops.ssm_update import kernel as ssm_kernel
from triton_ops.ssm_update import reference
from triton_ops.state_copy import kernel as copy_kernel

TINY = Shape("tiny", num_layers=2, H=4, P=4, N=16, G=2, C=24, W=4, member_bytes=256, slot_bytes=256)


def oracle_as_rival(arguments: SsmArguments) -> object:
    return lambda: reference.ssm_update(*arguments)


def test_the_gate_is_open_on_the_kernels() -> None:
    rivals = [Rival("oracle", oracle_as_rival, ""), Rival("nobody", None, "absent")]
    checks = list(gpu_gate.run_gate(TINY, rivals, device="cpu", batches=(3,)))
    assert [check.name for check in checks if not check.passed] == []
    assert sum("oracle" in check.name for check in checks) > 10
    assert not any("nobody" in check.name for check in checks)


FAULTS = (
    Mutant("paged", "ssm", "contiguous", "    S = S * decay", "    S = S * (decay if IN_PLACE else decay * 2.0)"),
    Mutant("oracle", "ssm", "close to the oracle", "tl.log(tl.exp(step) + 1.0)", "tl.exp(step)"),
    Mutant("conv", "conv", "line bits", "tl.store(target, tap1", "tl.store(target, tap0"),
    Mutant("copy", "copy", "state_gather", "plane = layer % NUM_PLANES", "plane = layer * 0"),
)


@pytest.mark.parametrize("mutant", FAULTS, ids=lambda mutant: mutant.name)
def test_the_gate_closes_on_a_faulty_kernel(mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = {"ssm": ssm_kernel, "conv": conv_kernel, "copy": copy_kernel}
    monkeypatch.setattr(gpu_gate, f"{mutant.op}_kernel", load(mutant, kernels[mutant.op], tmp_path))
    failed = [check for check in gpu_gate.run_gate(TINY, [], device="cpu", batches=(2,)) if not check.passed]
    assert any(mutant.check in check.name and check.required for check in failed)


def test_a_rival_that_fails_is_a_line_and_does_not_close_the_gate() -> None:
    def broken(arguments: SsmArguments) -> object:
        raise RuntimeError("no such kernel for this device")

    checks = list(gpu_gate.run_gate(TINY, [Rival("broken", broken, "")], device="cpu", batches=()))
    lines = [check for check in checks if "broken" in check.name]
    assert all(not check.passed and not check.required and "no such kernel" in check.name for check in lines)
    assert len(lines) == len(gpu_gate.STATES)
    assert torch.bfloat16 in gpu_gate.STATES.values()
