"""The chunked scan equals the recurrence; behind a boundary a found state gives the same bits as a computed one."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from triton_ops.chunk_grid import cut_chunks, cut_tokens
from triton_ops.ssm_scan.api import ScanResult, ssm_scan
from triton_ops.ssm_scan.reference import scan_packed

DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Geometry:
    heads: int
    head_dim: int
    state: int
    groups: int


NANO = Geometry(24, 32, 128, 2)
SMALL = Geometry(4, 8, 16, 2)
ODD = Geometry(6, 5, 9, 3)
pytestmark = pytest.mark.usefixtures("threads")


class Inputs:
    """Packed random inputs, x, B and C being views of one projection as in the model."""

    def __init__(self, geometry: Geometry, num_tokens: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        H, P, N, G = geometry.heads, geometry.head_dim, geometry.state, geometry.groups
        self.geometry, self.num_tokens = geometry, num_tokens
        projection = self.random(num_tokens, H * P + 2 * G * N + 3, dtype=dtype)[:, 3:]
        x, B, C = projection.split([H * P, G * N, G * N], dim=-1)
        self.x, self.B, self.C = x.view(-1, H, P), B.view(-1, G, N), C.view(-1, G, N)
        self.dt = self.random(num_tokens, H, dtype=dtype)
        self.A = -torch.rand(H, generator=self.generator) - 0.1
        self.D, self.dt_bias = self.random(H), self.random(H) - 2.0

    def random(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype)

    def states(self, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self.random(count, self.geometry.heads, self.geometry.head_dim, self.geometry.state, dtype=dtype)

    def scan(self, first: int = 0, last: int | None = None, **options: Any) -> ScanResult:
        """Scan rows first..last, one sequence at position `first` unless `options` say otherwise."""
        rows = slice(first, self.num_tokens if last is None else last)
        num_rows = len(range(self.num_tokens)[rows])
        arguments: dict[str, Any] = {
            "query_start_loc": [0, num_rows],
            "start_positions": [first],
            "state_dtype": torch.float32,
            "D": self.D,
            "dt_bias": self.dt_bias,
            "out": torch.full_like(self.x[rows], float("nan")),
        }
        return ssm_scan(self.x[rows], self.dt[rows], self.A, self.B[rows], self.C[rows], **(arguments | options))

    def oracle(self, query_start_loc: list[int], **options: Any) -> tuple[np.ndarray, list[np.ndarray]]:
        arrays = [tensor.float().numpy() for tensor in (self.x, self.dt, self.A, self.B, self.C)]
        arguments: dict[str, Any] = {"D": self.D.numpy(), "dt_bias": self.dt_bias.numpy()}
        return scan_packed(*arrays, query_start_loc, **(arguments | options))


def close(actual: torch.Tensor, expected: np.ndarray, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(actual.float(), torch.from_numpy(expected), rtol=tolerance, atol=tolerance)


def rounded(array: np.ndarray) -> np.ndarray:
    return torch.from_numpy(array).bfloat16().float().numpy()


@pytest.mark.parametrize("geometry", [SMALL, ODD])
@pytest.mark.parametrize("lengths", [[1], [16], [0, 17, 1, 0, 40], [64, 31]])
@pytest.mark.parametrize("with_initial", [False, True])
def test_scan_equals_the_recurrence(geometry: Geometry, lengths: list[int], with_initial: bool) -> None:
    rows = [0, *np.cumsum(lengths).tolist()]
    inputs = Inputs(geometry, rows[-1])
    initial = inputs.states(len(lengths)) if with_initial else None
    result = inputs.scan(
        query_start_loc=rows, start_positions=None, initial_states=initial, chunk_tokens=16, state_dtype=torch.float32
    )
    y, states = inputs.oracle(rows, initial_states=None if initial is None else initial.numpy())
    close(result.out, y)
    close(result.final_states, np.stack([after[-1] for after in states]))


def test_options_follow_the_recurrence() -> None:
    inputs = Inputs(SMALL, 45)
    H, P = SMALL.heads, SMALL.head_dim
    z, D = inputs.random(45, H, P), inputs.random(H, P)
    options = {"dt_softplus": False, "dt_limit": (0.05, 0.7)}
    result = inputs.scan(z=z, D=D, dt_bias=None, chunk_tokens=16, **options)
    y, states = inputs.oracle([0, 45], z=z.numpy(), D=D.numpy(), dt_bias=None, **options)
    close(result.out, y)
    close(result.final_states[0], states[0][-1])
    plain = inputs.scan(D=None, chunk_tokens=16)
    close(plain.out, inputs.oracle([0, 45], D=None)[0])


def test_strong_decay_neither_overflows_nor_leaks_the_future() -> None:
    inputs = Inputs(SMALL, 64)
    inputs.A = inputs.A * 1e4
    result = inputs.scan(chunk_tokens=64)
    close(result.out, inputs.oracle([0, 64])[0])
    changed = Inputs(SMALL, 64)
    changed.A = inputs.A
    changed.x[40:] = 1e6
    assert torch.equal(changed.scan(chunk_tokens=64).out[:40], result.out[:40])


def test_bfloat16_inputs_are_computed_in_float32() -> None:
    inputs = Inputs(SMALL, 50, torch.bfloat16)
    result = inputs.scan(chunk_tokens=16)
    y, states = inputs.oracle([0, 50])
    assert result.out.dtype == torch.bfloat16
    close(result.out, y, 1e-2)
    close(result.final_states[0], states[0][-1])


@pytest.mark.parametrize(("start", "grid", "chunk"), [(0, 32, 16), (5, 24, 16), (24, 24, 16), (30, 7, 16), (3, 64, 16)])
def test_states_are_rounded_at_boundaries_only(start: int, grid: int, chunk: int) -> None:
    inputs = Inputs(SMALL, 70)
    initial = inputs.states(1)
    boundaries = [position for position in range(start, start + 71) if position % grid == 0]
    result = inputs.scan(
        start_positions=[start],
        initial_states=initial,
        grid_tokens=grid,
        chunk_tokens=chunk,
        state_dtype=torch.bfloat16,
        captures=[(0, position) for position in boundaries],
    )
    y, states = inputs.oracle(
        [0, 70], initial_states=initial.numpy(), start_positions=[start], grid_tokens=grid, storage=rounded
    )
    assert result.captured_states.dtype == torch.bfloat16
    # A value near the middle of two bf16 neighbours may be rounded the other way than the oracle's: 2^-8 of its size.
    close(result.out, y, 2e-2)
    close(result.captured_states, np.stack([states[0][position - start] for position in boundaries]), 2e-2)
    unrounded = inputs.scan(start_positions=[start], initial_states=initial, chunk_tokens=chunk)
    if any(start < position < start + 70 for position in boundaries):
        assert not torch.equal(unrounded.out, result.out)


def test_captures_are_the_states_before_their_positions() -> None:
    inputs = Inputs(ODD, 90)
    initial = inputs.states(2)
    rows, starts = [0, 50, 90], [13, 32]
    captures = [(1, 32), (0, 63), (0, 13), (0, 14), (1, 72), (0, 32), (1, 50), (0, 31), (1, 33), (0, 32)]
    result = inputs.scan(
        query_start_loc=rows,
        start_positions=starts,
        initial_states=initial,
        grid_tokens=32,
        chunk_tokens=16,
        captures=captures,
    )
    plain = inputs.scan(
        query_start_loc=rows, start_positions=starts, initial_states=initial, grid_tokens=32, chunk_tokens=16
    )
    assert torch.equal(result.out, plain.out)
    _, states = inputs.oracle(rows, initial_states=initial.numpy())
    for index, (sequence, position) in enumerate(captures):
        close(result.captured_states[index], states[sequence][position - starts[sequence]])
    assert torch.equal(result.captured_states[5], result.captured_states[9])
    assert torch.equal(result.captured_states[1], result.final_states[0])


@pytest.mark.parametrize("state_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("geometry", "num_tokens", "grid", "chunk", "threads"),
    [(NANO, 700, 256, 64, 1), (NANO, 450, 224, 128, 1), (NANO, 200, 64, 64, 2), (ODD, 203, 37, 16, 1)],
    indirect=["threads"],
)
def test_b20_resumed_at_a_boundary_is_bit_identical(
    geometry: Geometry,
    num_tokens: int,
    grid: int,
    chunk: int,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
) -> None:
    inputs = Inputs(geometry, num_tokens, dtype)
    options = {"grid_tokens": grid, "chunk_tokens": chunk, "state_dtype": state_dtype}
    boundaries = range(grid, num_tokens, grid)
    cold = inputs.scan(captures=[(0, boundary) for boundary in boundaries], **options)
    assert not cold.out.isnan().any()
    for index, boundary in enumerate(boundaries):
        warm = inputs.scan(boundary, initial_states=cold.captured_states[index : index + 1], **options)
        assert torch.equal(warm.out, cold.out[boundary:])
        assert torch.equal(warm.final_states, cold.final_states)


@pytest.mark.parametrize(
    ("dtype", "grid", "expected"), [("float32", 96, 32), ("float32", 80, 80), ("bfloat16", 96, 96)]
)
def test_a_call_may_end_where_cut_tokens_says_and_not_anywhere(dtype: str, grid: int, expected: int) -> None:
    state_dtype = getattr(torch, dtype)
    inputs = Inputs(SMALL, 300)
    options = {"chunk_tokens": 32, "grid_tokens": grid, "state_dtype": state_dtype}
    cut = cut_tokens(32, grid, state_is_exact=state_dtype == torch.float32)
    assert cut == expected
    whole = inputs.scan(**options).out
    for end in (cut, 2 * cut, cut - 7):
        state = inputs.scan(last=end, **options).final_states
        rest = inputs.scan(end, initial_states=state, **options).out
        assert torch.equal(rest, whole[end:]) == (end % cut == 0)


@pytest.mark.parametrize("threads", [1, 2], indirect=True)
def test_a_sequence_does_not_depend_on_its_batch() -> None:
    rows, starts = [0, 1, 90, 200, 203, 300], [511, 0, 512, 30, 1000]
    inputs = Inputs(NANO, rows[-1])
    initial = inputs.states(5, torch.bfloat16)
    options = {"grid_tokens": 512, "chunk_tokens": 64, "state_dtype": torch.bfloat16}
    packed = inputs.scan(query_start_loc=rows, start_positions=starts, initial_states=initial, **options)
    for sequence, (first, last) in enumerate(pairwise(rows)):
        alone = inputs.scan(
            first,
            last,
            start_positions=starts[sequence : sequence + 1],
            initial_states=initial[sequence : sequence + 1],
            **options,
        )
        assert torch.equal(alone.out, packed.out[first:last])
        assert torch.equal(alone.final_states[0], packed.final_states[sequence])


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_broken_sequence_does_not_spoil_the_next(poison: float) -> None:
    inputs = Inputs(SMALL, 37)
    rows = [0, 32, 37]
    clean = inputs.scan(query_start_loc=rows, start_positions=None, chunk_tokens=16)
    for tensor in (inputs.x, inputs.B, inputs.C, inputs.dt):
        tensor[:32] = poison
    spoiled = inputs.scan(query_start_loc=rows, start_positions=None, chunk_tokens=16)
    assert torch.equal(spoiled.out[32:], clean.out[32:])
    assert torch.equal(spoiled.final_states[1], clean.final_states[1])


def test_a_token_does_not_depend_on_those_after_it() -> None:
    inputs = Inputs(NANO, 150)
    whole = inputs.scan(grid_tokens=128, chunk_tokens=64)
    for length in (1, 37, 64, 65, 149):
        assert torch.equal(inputs.scan(0, length, grid_tokens=128, chunk_tokens=64).out, whole.out[:length])


def test_skipped_rounding_breaks_the_continuation() -> None:
    inputs = Inputs(SMALL, 96)
    cold = inputs.scan(captures=[(0, 64)], state_dtype=torch.bfloat16, chunk_tokens=16)
    warm = inputs.scan(64, initial_states=cold.captured_states, state_dtype=torch.bfloat16, chunk_tokens=16)
    assert not torch.equal(warm.out, cold.out[64:])


@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=4),
    data=st.data(),
    chunk_tokens=st.integers(1, 20),
    grid_tokens=st.none() | st.integers(1, 50),
)
def test_b12_chunks_partition_the_rows_on_the_absolute_grid(
    lengths: list[int], data: st.DataObject, chunk_tokens: int, grid_tokens: int | None
) -> None:
    starts = data.draw(st.lists(st.integers(0, 100), min_size=len(lengths), max_size=len(lengths)))
    rows = [0, *np.cumsum(lengths).tolist()]
    grid = {"chunk_tokens": chunk_tokens, "grid_tokens": grid_tokens}
    chunks = cut_chunks(rows, starts, **grid)
    assert [row for chunk in chunks for row in range(chunk.row, chunk.row + chunk.num_tokens)] == list(range(rows[-1]))
    for chunk in chunks:
        end = chunk.position + chunk.num_tokens
        assert rows[chunk.sequence] <= chunk.row < chunk.row + chunk.num_tokens <= rows[chunk.sequence + 1]
        assert chunk.position - chunk.row == starts[chunk.sequence] - rows[chunk.sequence]
        assert 0 < chunk.num_tokens <= chunk_tokens
        assert chunk.ends_at_boundary == (grid_tokens is not None and end % grid_tokens == 0)
        if grid_tokens is not None:
            assert chunk.position // grid_tokens == (end - 1) // grid_tokens
            if end < starts[chunk.sequence] + lengths[chunk.sequence] and end % grid_tokens:
                assert end % grid_tokens % chunk_tokens == 0
            if chunk.ends_at_boundary and len(lengths) == 1:
                tail = cut_chunks([0, lengths[0] - (end - starts[0])], [end], **grid)
                row = end - starts[0]
                assert [c._replace(row=c.row + row) for c in tail] == [c for c in chunks if c.row >= row]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_start_loc": [0, 7]}, "end at 8 tokens, got 7"),
        ({"query_start_loc": [1, 8]}, "ascend from 0"),
        ({"query_start_loc": [0, 9, 8], "start_positions": [0, 0]}, "ascend from 0"),
        ({"start_positions": [0, 1]}, "got 2 and 2"),
        ({"start_positions": [-1]}, "start_positions >= 0"),
        ({"grid_tokens": 0}, "grid_tokens > 0"),
        ({"chunk_tokens": 0}, "chunk_tokens > 0"),
        ({"captures": [(1, 0)]}, r"sequence in \[0, 1\), got 1"),
        ({"captures": [(0, 9)]}, r"position in \[0, 8\] of sequence 0, got 9"),
        ({"initial_states": torch.zeros(2, 4, 8, 16)}, r"initial_states \(1, 4, 8, 16\), got \(2, 4, 8, 16\)"),
        ({"D": torch.zeros(5)}, r"D \(4,\) or \(4, 8\), got \(5,\)"),
        ({"dt_bias": torch.zeros(4, dtype=torch.int32)}, "floating point type, got torch.int32"),
        ({"z": torch.zeros(8, 4, 8, device="meta")}, "z on cpu, got meta"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Inputs(SMALL, 8).scan(**change)


def test_groups_must_divide_the_heads() -> None:
    inputs = Inputs(SMALL, 8)
    inputs.B = inputs.C = torch.zeros(8, 3, 16)
    with pytest.raises(ValueError, match="divides 4 heads, got 3"):
        inputs.scan()
