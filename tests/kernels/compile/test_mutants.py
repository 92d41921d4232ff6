"""The static checks notice kernels that are slower than they look."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.micro.static_compile import MachineCode
from tests.kernels.compile.assertions import assert_equal_cost, assert_within
from tests.kernels.compile.budgets import PAGED_OVER_CONTIGUOUS, SSM
from tests.kernels.compile.compiled import compiled_update
from tests.kernels.interpret.mutants import Mutant, load
from triton_ops.ssm_update import kernel as ssm_kernel

PAGED_LOAD = "dst = tl.load(dst_table + batch_row * DST_STRIDE + member).to(tl.int64)"

MUTANTS = (
    Mutant("page starts off the vector", "ssm", "within", "(src * PAGE_STRIDE + in_page)", "(src * PAGE_STRIDE + 1)"),
    Mutant("barrier", "ssm", "within", "    S = S * decay", "    tl.debug_barrier()\n    S = S * decay"),
    Mutant("strided tile", "ssm", "within", "m[:, None] * N + n[None, :]", "m[:, None] + n[None, :] * BM"),
    Mutant(
        "arithmetic where paged",
        "ssm",
        "equal",
        "    S = S * decay",
        "    if not IN_PLACE:\n        decay = decay * 1.5 + step\n    S = S * decay",
    ),
    Mutant("third table load", "ssm", "equal", PAGED_LOAD, f"{PAGED_LOAD} + tl.load(dst_table + member).to(tl.int64)"),
    Mutant(
        "page arithmetic per element where paged",
        "ssm",
        "ratio",
        "state + (dst * PAGE_STRIDE + in_page) + tile",
        "state + (dst * PAGE_STRIDE + in_page) + tile * (1 + ((dst - src) >> 40))",
    ),
)


def check(name: str, paged: MachineCode, contiguous: MachineCode) -> None:
    if name == "within":
        assert_within(paged, SSM["bf16", 4, False])
    elif name == "equal":
        assert_equal_cost(paged, contiguous)
    else:
        assert paged.instructions <= PAGED_OVER_CONTIGUOUS * contiguous.instructions


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_slowness_is_noticed(mutant: Mutant, tmp_path: Path) -> None:
    kernel = load(mutant, ssm_kernel, tmp_path)
    paged, contiguous = (compiled_update(90, "bf16", 4, False, paged, kernel=kernel) for paged in (True, False))
    with pytest.raises(AssertionError):
        check(mutant.check, paged, contiguous)
