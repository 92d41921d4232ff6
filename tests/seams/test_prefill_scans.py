"""Which operators a server's prefills get, and that SGLang's kernels are told of a batch what SGLang tells them."""

from __future__ import annotations

from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.layers.attention.mamba.mamba2_metadata import Mamba2Metadata

from sgl_hybrid.seams.mamba_backend import choose_scans
from sgl_hybrid.seams.prefill_scans import Batch, TorchScans
from sgl_hybrid.seams.stock_scans import StockScans, stock_operators

CHUNK = 8
BATCH = Batch([0], [0, 5], [])


@pytest.mark.parametrize(
    ("device", "exact", "operators"),
    [("cpu", True, TorchScans), ("cpu", False, TorchScans), ("cuda", True, TorchScans), ("cuda", False, StockScans)],
)
def test_sglangs_kernels_run_on_a_gpu_where_continuation_is_not_exact(
    device: str, exact: bool, operators: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = SimpleNamespace(checkpoint_interval=512, geometry=SimpleNamespace(d_conv=4))
    memory = SimpleNamespace(layout=layout, pool=SimpleNamespace(device=torch.device(device)))
    make_scans = choose_scans(memory, exact=exact, chunk_tokens=CHUNK)
    assert make_scans.func is operators
    if operators is TorchScans:
        assert make_scans(BATCH).position["grid_tokens"] == 512


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6))
def test_pieces_and_sequences_are_those_of_sglangs_metadata(lengths: list[int]) -> None:
    row_ends = [0, *accumulate(lengths)]
    scans = StockScans(
        Batch([1] * len(lengths), row_ends, []),
        stock_operators(),
        chunk_tokens=CHUNK,
        taps=4,
        device=torch.device("cpu"),
    )
    chunks, offsets = Mamba2Metadata._query_start_loc_to_chunk_indices_offsets(
        torch.tensor(row_ends, dtype=torch.int32), CHUNK, row_ends[-1]
    )
    assert torch.equal(scans.piece_chunks, chunks)
    assert torch.equal(scans.piece_offsets, offsets)
    rows = torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32), torch.tensor(lengths))
    assert torch.equal(scans.sequence_of_row, rows[None])
