"""The compiled SSM update: budgets on every architecture."""

from __future__ import annotations

import pytest

from bench.micro.shapes import FALCON_H1_7B, GRANITE_4_H_MICRO
from bench.micro.static_compile import ARCHITECTURES
from tests.kernels.compile.assertions import assert_within, vector_loads_around_waits
from tests.kernels.compile.budgets import SSM
from tests.kernels.compile.compiled import DTYPES, compiled_update
from triton_ops.ssm_update.kernel import tile_rows


@pytest.mark.parametrize("capability", ARCHITECTURES)
@pytest.mark.parametrize(("state", "BM", "gate"), SSM)
def test_paged_update_is_within_its_budget(capability: int, state: str, BM: int, gate: bool) -> None:
    assert_within(compiled_update(capability, state, BM, gate, paged=True), SSM[state, BM, gate])


def test_the_budgets_cover_the_tiles_that_are_launched() -> None:
    launched = {
        (name, tile_rows(batch, FALCON_H1_7B.P, FALCON_H1_7B.N, dtype.itemsize))
        for name, dtype in DTYPES.items()
        for batch in (1, 4, 7, 8, 64, 128)
    }
    assert launched == {(state, BM) for state, BM, _ in SSM}


@pytest.mark.parametrize("state", DTYPES)
def test_another_model_keeps_its_vectors(state: str) -> None:
    """Granite-4-H: P 64 and N 128, a row is half a warp."""
    shape, dtype = GRANITE_4_H_MICRO, DTYPES[state]
    BM = tile_rows(8, shape.P, shape.N, dtype.itemsize)
    code = compiled_update(90, state, BM, True, paged=True, shape=shape)
    state_vectors = BM * shape.N * dtype.itemsize // (32 * 16)
    assert (code.stack_bytes, code.local_bytes, code.barriers) == (0, 0, 0)
    assert code.stores[128] == state_vectors
    assert code.loads[128] >= state_vectors


def test_the_columns_of_a_later_group_compile_to_the_same_code() -> None:
    """A table view that starts at an odd column is not 16-byte aligned; it must not become another kernel."""
    first, later = (compiled_update(90, "bf16", 4, False, paged=True, columns=columns) for columns in (0, 3))
    assert first.sequence == later.sequence


@pytest.mark.parametrize("capability", [90, 100])
def test_an_early_start_loads_the_state_before_it_waits_and_the_activations_after(capability: int) -> None:
    early = compiled_update(capability, "bf16", 4, True, paged=True, early=True)
    assert_within(early, SSM["bf16", 4, True])
    assert (4, 2) in vector_loads_around_waits(early)


def test_no_early_start_before_hopper() -> None:
    ordinary, early = (compiled_update(80, "bf16", 4, True, paged=True, early=early) for early in (False, True))
    assert early.sequence == ordinary.sequence
