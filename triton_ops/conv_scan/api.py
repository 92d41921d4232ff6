"""Contract of the depthwise causal convolution: a packed batch, windows in and out, cut at the checkpoint grid.

    y[t, c] = silu(bias[c] + sum over k of weight[c, k] x[t - (W - 1) + k, c])

in float32. With a grid, the W - 1 inputs before every absolute position that is a multiple of it are seen by the tokens
behind it rounded to the storage type, whether they were just computed or found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from triton_ops.chunk_grid import check_captures, cut_chunks

CHUNK_TOKENS = 128
"""Default chunk: its rows stay in the second-level cache for the channel counts of Mamba2 models."""


class ConvScanResult(NamedTuple):
    """out [T, C]; final_windows [num_seqs, C, W - 1], captured_windows [num captures, C, W - 1] in the storage type."""

    out: Tensor
    final_windows: Tensor
    captured_windows: Tensor


def conv_scan(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    query_start_loc: Sequence[int],
    window_dtype: torch.dtype,
    silu: bool = True,
    initial_windows: Tensor | None = None,
    start_positions: Sequence[int] | None = None,
    grid_tokens: int | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
    captures: Sequence[tuple[int, int]] = (),
    out: Tensor | None = None,
) -> ConvScanResult:
    """Convolve a packed batch of sequences.

    x: [T, C] float, any strides. weight: [C, W], W >= 2. bias: [C] or None.
    query_start_loc: num_seqs + 1 rows on the host, from 0 to T.
    start_positions: tokens each sequence has consumed before (None: all 0).
    grid_tokens: distance of two boundaries; None: no rounding and no cut.
    initial_windows: [num_seqs, C, W - 1], the inputs before the first token, the oldest first; None for zeros.
    captures: (sequence, absolute position) pairs, the position from the sequence's start to its end; the inputs before
        that position are returned.
    out: [T, C] written in place; None allocates one like x.

    Raises: ValueError for a wrong shape, device, type or position.
    """
    starts = [0] * (len(query_start_loc) - 1) if start_positions is None else start_positions
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    _check_shapes(x, weight, bias, initial_windows, out, len(starts))
    chunks = cut_chunks(query_start_loc, starts, chunk_tokens=chunk_tokens, grid_tokens=grid_tokens)
    if query_start_loc[-1] != x.shape[0]:
        raise ValueError(f"expected query_start_loc to end at {x.shape[0]} tokens, got {query_start_loc[-1]}")
    check_captures(captures, query_start_loc, starts)

    from triton_ops.conv_scan.torch_path import convolve_chunks

    final, captured = convolve_chunks(
        x,
        weight,
        bias,
        chunks,
        initial_windows,
        captures,
        silu=silu,
        num_sequences=len(starts),
        chunk_tokens=chunk_tokens,
        window_dtype=window_dtype,
        out=out,
    )
    return ConvScanResult(out, final, captured)


def _check_shapes(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial_windows: Tensor | None, out: Tensor, num_sequences: int
) -> None:
    if x.dim() != 2 or weight.dim() != 2:
        raise ValueError(f"expected x [T, C] and weight [C, W], got {list(x.shape)} and {list(weight.shape)}")
    T, channels = x.shape
    taps = weight.shape[1]
    if taps < 2:
        raise ValueError(f"expected at least 2 taps, got {taps}")
    expected: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {
        "weight": (weight, (channels, taps)),
        "bias": (bias, (channels,)),
        "initial_windows": (initial_windows, (num_sequences, channels, taps - 1)),
        "out": (out, (T, channels)),
    }
    for name, (tensor, shape) in expected.items():
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape:
            raise ValueError(f"expected {name} {shape}, got {tuple(tensor.shape)}")
        if tensor.device != x.device:
            raise ValueError(f"expected {name} on {x.device}, got {tensor.device}")
        if not tensor.is_floating_point():
            raise ValueError(f"expected {name} of a floating point type, got {tensor.dtype}")
