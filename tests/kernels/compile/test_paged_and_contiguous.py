"""The paged SSM update costs what the contiguous one costs, and does the same arithmetic: results can be bit-equal."""

from __future__ import annotations

import pytest

from bench.micro.static_compile import ARCHITECTURES
from tests.kernels.compile.assertions import assert_equal_cost
from tests.kernels.compile.budgets import PAGED_OVER_CONTIGUOUS, SSM
from tests.kernels.compile.compiled import compiled_update


@pytest.mark.parametrize("capability", ARCHITECTURES)
@pytest.mark.parametrize(("state", "BM", "gate"), SSM)
def test_paged_costs_what_contiguous_costs(capability: int, state: str, BM: int, gate: bool) -> None:
    paged, contiguous = (compiled_update(capability, state, BM, gate, paged=paged) for paged in (True, False))
    assert_equal_cost(paged, contiguous)
    if capability == 90:
        assert paged.instructions <= PAGED_OVER_CONTIGUOUS * contiguous.instructions
