"""What SGLang's prefill kernels are told of a batch: pieces of chunks, places of captures, sources of windows."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_hybrid.seams.prefill_scans import Batch
from sgl_hybrid.seams.stock_scans import StockOperators, StockScans, pieces_of, places_of, window_sources

CHUNK, PAST = 8, 3


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """A few sequences, fresh and continued, with captures in any order, at most one per place."""
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=5))
    starts = [draw(st.integers(0, 40)) for _ in lengths]
    places = [
        (sequence, start + consumed)
        for sequence, (start, length) in enumerate(zip(starts, lengths, strict=True))
        for consumed in range(1, length + 1)
    ]
    captures = draw(st.lists(st.sampled_from(places), max_size=8, unique=True))
    return Batch(starts, [0, *accumulate(lengths)], captures)


@given(batches())
def test_a_piece_lies_in_one_chunk_and_one_sequence(batch: Batch) -> None:
    first_rows = pieces_of(batch.row_ends, CHUNK)
    sequence_of = [
        torch.searchsorted(torch.tensor(batch.row_ends), row, right=True).item() for row in range(batch.row_ends[-1])
    ]
    changes = [row for row in range(1, len(sequence_of)) if sequence_of[row] != sequence_of[row - 1] or not row % CHUNK]
    assert first_rows == [0, *changes]


@given(batches())
def test_a_part_has_each_sequence_once_in_packed_order(batch: Batch) -> None:
    parts = places_of(batch)
    for part in parts:
        assert part.sequences == sorted(set(part.sequences))
        bounds = [
            bound
            for place in zip(part.sequences, part.rows, strict=True)
            for bound in (batch.row_ends[place[0]], place[1])
        ]
        assert bounds == sorted(bounds), "the kernel reads no sequence backwards"
    found = {index: place for part in parts for index, *place in zip(*part, strict=True)}
    assert sorted(found) == list(range(len(batch.captures)))
    for index, (sequence, row) in found.items():
        assert (sequence, row - batch.row_ends[sequence] + batch.starts[sequence]) == batch.captures[index]
    counts = [sequence for sequence, _ in batch.captures]
    assert len(parts) == max(map(counts.count, counts), default=0)


@given(batches())
def test_a_window_is_the_inputs_before_its_capture(batch: Batch) -> None:
    """Every input is named by its absolute position; what a sequence brought ends where it starts."""
    sources = window_sources(batch, PAST)
    for (sequence, position), rows, brought in zip(batch.captures, *sources, strict=True):
        first, start = batch.row_ends[sequence], batch.starts[sequence]
        named = [
            start - PAST + column if column >= 0 else row - first + start
            for row, column in zip(rows, brought, strict=True)
        ]
        assert named == list(range(position - PAST, position))
        assert all(first <= row < batch.row_ends[sequence + 1] for row in rows)


@pytest.mark.parametrize(
    ("batch", "taps", "message"),
    [
        (Batch([0], [0, 5], []), 5, "expected a convolution of 2, 3, 4 taps, got 5"),
        (Batch([0, 0], [0, 5, 5], []), 4, "at least one token"),
        (Batch([8], [0, 5], [(0, 8)]), 4, r"expected a boundary in \(8, 13\] of sequence 0, got 8"),
        (Batch([8], [0, 5], [(0, 14)]), 4, r"got 14"),
    ],
)
def test_what_the_kernels_do_not_compute_is_refused(batch: Batch, taps: int, message: str) -> None:
    unused = StockOperators(*[lambda *_, **__: pytest.fail("called")] * 3)
    with pytest.raises(ValueError, match=message):
        StockScans(batch, unused, chunk_tokens=CHUNK, taps=taps, device=torch.device("cpu"))
