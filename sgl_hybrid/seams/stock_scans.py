"""The prefill of Mamba2 layers by SGLang's Triton kernels, with states wanted inside sequences.

A boundary need be neither the end of a chunk nor of a sequence. The state there is what SGLang computes for a sequence
that ends there, with its kernel for the ends of sequences: from the state before the chunk, or the sequence's own if it
began in that chunk, and the rows since. That kernel takes one place of a sequence per launch, so the second boundary of
a sequence takes a second launch. The window there is rows of the input, and where these do not suffice what the
sequence brought.

Chunks begin at the first row of the batch, and results are SGLang's: states are float32 inside a call and rounded to
their storage type where a chunk or a sequence ends. SGLang is not imported before `stock_operators` is called.

Source: SGLang 0.5.23, `kernels/ops/mamba/triton_ops/ssd_combined.py`, `ssd_chunk_state.py`, `ssd_state_passing.py`,
`kernels/ops/mamba/causal_conv1d_triton.py`, `srt/layers/attention/mamba/mamba.py`, `mamba2_metadata.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from sgl_hybrid.memory.transfer import upload
from sgl_hybrid.seams.prefill_scans import Batch
from triton_ops.conv_scan.api import ConvScanResult
from triton_ops.ssm_scan.api import ScanResult

TAPS = (2, 3, 4)
"""Widths of the convolution that SGLang's kernel computes; it takes others without an error."""


class StockOperators(NamedTuple):
    """SGLang's functions: the convolution; the scan, with what it computed on the way; further states of a scan."""

    convolve: Callable[..., torch.Tensor]
    scan: Callable[..., tuple[torch.Tensor, ...]]
    states_at: Callable[..., torch.Tensor]


def stock_operators() -> StockOperators:
    """Import SGLang's functions."""
    from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_fn
    from sglang.kernels.ops.mamba.triton_ops import ssd_combined

    return StockOperators(causal_conv1d_fn, ssd_combined._mamba_chunk_scan_combined_fwd, ssd_combined._track_states_at)


class Places(NamedTuple):
    """Captures of different sequences, in packed order: their indices, their sequences, the packed rows behind them.

    Lists on the host, or int64 tensors on the device.
    """

    captures: Any
    sequences: Any
    rows: Any


class WindowSources(NamedTuple):
    """Where the inputs before each capture come from, the oldest first; [num captures, W - 1] each.

    rows: packed rows. brought: columns of the sequence's own window where the row is before its first, else -1.
    """

    rows: list[list[int]]
    brought: list[list[int]]


def pieces_of(row_ends: Sequence[int], chunk_tokens: int) -> list[int]:
    """Return the first rows of the parts of chunks that lie in one sequence, as the scan takes them: chunks of
    `chunk_tokens` rows from row 0, cut where a sequence begins."""
    return sorted({*range(0, row_ends[-1], chunk_tokens), *row_ends[:-1]})


def places_of(batch: Batch) -> list[Places]:
    """Return the captures in as many parts as the sequence with most of them has; no sequence is twice in a part."""
    parts: list[Places] = []
    taken = [0] * len(batch.starts)
    order = sorted(range(len(batch.captures)), key=lambda index: batch.captures[index])
    for index in order:
        sequence, position = batch.captures[index]
        if taken[sequence] == len(parts):
            parts.append(Places([], [], []))
        part = parts[taken[sequence]]
        taken[sequence] += 1
        row = batch.row_ends[sequence] + position - batch.starts[sequence]
        for column, value in zip(part, (index, sequence, row), strict=True):
            column.append(value)
    return parts


def window_sources(batch: Batch, past: int) -> WindowSources:
    """Return where the `past` inputs before each capture come from."""
    rows, brought = [], []
    for sequence, position in batch.captures:
        consumed = position - batch.starts[sequence]
        before = range(consumed - past, consumed)
        rows.append([batch.row_ends[sequence] + max(offset, 0) for offset in before])
        brought.append([offset + past if offset < 0 else -1 for offset in before])
    return WindowSources(rows, brought)


class StockScans:
    """SGLang's kernels on one batch (see the module). Uploads what the batch looks like; waits for nothing.

    chunk_tokens: the chunk of the model's scan, a power of two. taps: the convolution's W. device: of the batch.

    Raises:
        ValueError: a convolution that the kernel does not compute, an empty sequence, or a capture that is not behind
            the start of its sequence and up to its end.
    """

    def __init__(
        self, batch: Batch, operators: StockOperators, *, chunk_tokens: int, taps: int, device: torch.device
    ) -> None:
        _check(batch, taps)
        row_ends = batch.row_ends
        self.operators = operators
        self.chunk_tokens = chunk_tokens
        self.lengths = [end - first for first, end in pairwise(row_ends)]
        self.row_ends = upload(row_ends, torch.int32, device)
        self.has_state = upload([start > 0 for start in batch.starts], torch.bool, device)
        self.sequences = torch.arange(len(self.lengths), dtype=torch.int32, device=device)
        self.sequence_of_row = torch.repeat_interleave(
            self.sequences, upload(self.lengths, torch.int64, device), output_size=row_ends[-1]
        ).unsqueeze(0)
        pieces = pieces_of(row_ends, chunk_tokens)
        self.piece_chunks = upload([row // chunk_tokens for row in pieces], torch.int32, device)
        self.piece_offsets = upload([row % chunk_tokens for row in pieces], torch.int32, device)

        self.num_captures = len(batch.captures)
        self.places = [Places(*upload(part, torch.int64, device)) for part in places_of(batch)]
        sources = window_sources(batch, taps - 1)
        self.window_rows = upload(sources.rows, torch.int64, device)
        self.brought = None
        if any(column >= 0 for columns in sources.brought for column in columns):
            self.brought = upload(sources.brought, torch.int64, device)
            self.capture_sequences = upload([sequence for sequence, _ in batch.captures], torch.int64, device)

    def convolve(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        silu: bool,
        windows: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> ConvScanResult:
        if windows is None:
            windows = x.new_zeros(len(self.lengths), x.shape[1], weight.shape[1] - 1, dtype=dtype)
        captured = self._captured_windows(x, windows)
        out = self.operators.convolve(
            x.t(),
            weight,
            bias,
            conv_states=windows,
            query_start_loc=self.row_ends,
            seq_lens_cpu=self.lengths,
            cache_indices=self.sequences,
            has_initial_state=self.has_state,
            activation="silu" if silu else None,
        )
        return ConvScanResult(out.t(), windows, captured)

    def scan(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        mixer: Any,
        *,
        states: torch.Tensor | None,
        dtype: torch.dtype,
        out: torch.Tensor,
    ) -> ScanResult:
        x, B = x.unsqueeze(0), B.unsqueeze(0)
        _, steps, decays, chunk_states, _, final, _ = self.operators.scan(
            x,
            dt.unsqueeze(0),
            mixer.A,
            B,
            C.unsqueeze(0),
            self.chunk_tokens,
            D=mixer.D,
            dt_bias=mixer.dt_bias,
            initial_states=states,
            seq_idx=self.sequence_of_row,
            chunk_indices=self.piece_chunks,
            chunk_offsets=self.piece_offsets,
            cu_seqlens=self.row_ends,
            dt_softplus=True,
            state_dtype=dtype,
            out=out.unsqueeze(0),
        )
        captured = final.new_empty(self.num_captures, *final.shape[1:])
        for part in self.places:
            found = self.operators.states_at(
                B, x, steps, decays, chunk_states, self.row_ends, states, part.sequences, part.rows
            )
            captured[part.captures] = found.squeeze(0)
        return ScanResult(out, final, captured)

    def _captured_windows(self, x: torch.Tensor, windows: torch.Tensor) -> torch.Tensor:
        """Windows [num captures, C, W - 1] at the captures, from x [T, C] and what the sequences bring."""
        if not self.num_captures:
            return windows[:0]
        found = x[self.window_rows].transpose(1, 2).to(windows.dtype)
        if self.brought is None:
            return found
        columns = self.brought.unsqueeze(1)
        brought = windows[self.capture_sequences].gather(2, columns.clamp(min=0).expand_as(found))
        return torch.where(columns >= 0, brought, found)


def _check(batch: Batch, taps: int) -> None:
    if taps not in TAPS:
        raise ValueError(f"expected a convolution of {', '.join(map(str, TAPS))} taps, got {taps}")
    if any(end <= first for first, end in pairwise(batch.row_ends)):
        raise ValueError(f"expected sequences of at least one token, got row ends {list(batch.row_ends)}")
    for sequence, position in batch.captures:
        start = batch.starts[sequence]
        end = start + batch.row_ends[sequence + 1] - batch.row_ends[sequence]
        if not start < position <= end:
            raise ValueError(f"expected a boundary in ({start}, {end}] of sequence {sequence}, got {position}")
