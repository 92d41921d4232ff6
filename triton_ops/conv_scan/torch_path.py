"""Depthwise causal convolution of a packed batch in vectorized torch.

Works through the same chunks of fixed shape as the scan, so that the result of a token does not depend on what else is
in the batch. Letters: T tokens, L tokens of a chunk, C channels, W taps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from triton_ops.chunk_grid import Chunk


def convolve_chunks(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    chunks: Sequence[Chunk],
    initial_windows: Tensor | None,
    captures: Sequence[tuple[int, int]],
    *,
    silu: bool,
    num_sequences: int,
    chunk_tokens: int,
    window_dtype: torch.dtype,
    out: Tensor,
) -> tuple[Tensor, Tensor]:
    """Convolve `chunks`, write `out` [T, C], and return (final windows, captured windows) in `window_dtype`.

    A window [C, W - 1] holds the inputs before a token, the oldest first. Where a chunk ends at a boundary the inputs
    before it are seen by the next chunk rounded to `window_dtype`.

    initial_windows: [num_sequences, C, W - 1] in any float dtype, or None for zeros.
    captures: (sequence, absolute position) in any order, from the sequence's start to its end.

    Returns final windows [num_sequences, C, W - 1] and captured windows [len(captures), C, W - 1]; allocates both.
    """
    channels, taps = weight.shape
    past, device = taps - 1, x.device
    final = torch.zeros(num_sequences, channels, past, dtype=window_dtype, device=device)
    if initial_windows is not None:
        final.copy_(initial_windows)
    captured = torch.empty(len(captures), channels, past, dtype=window_dtype, device=device)
    wanted: dict[int, list[tuple[int, int]]] = {}
    for index, (sequence, position) in enumerate(captures):
        captured[index].copy_(final[sequence])
        wanted.setdefault(sequence, []).append((position, index))

    inputs = torch.zeros(past + chunk_tokens, channels, dtype=torch.float32, device=device)
    total = torch.empty(chunk_tokens, channels, dtype=torch.float32, device=device)
    product = torch.empty_like(total)
    rows_of_weight = weight.t().float().contiguous()
    start_value = torch.zeros(channels, device=device) if bias is None else bias.float()
    sequence = -1
    for chunk in chunks:
        n = chunk.num_tokens
        if chunk.sequence != sequence:
            sequence = chunk.sequence
            window = (final if initial_windows is None else initial_windows)[sequence].t().float()
        inputs[:past].copy_(window)
        inputs[past : past + n].copy_(x[chunk.row : chunk.row + n])
        total.copy_(start_value)
        for tap in range(taps):
            total.add_(torch.mul(inputs[tap : tap + chunk_tokens], rows_of_weight[tap], out=product))
        if silu:
            torch.nn.functional.silu(total, inplace=True)
        out[chunk.row : chunk.row + n].copy_(total[:n])

        for position, index in wanted.get(sequence, ()):
            offset = position - chunk.position
            if 0 < offset <= n:
                captured[index].copy_(inputs[offset : offset + past].t())
        window = inputs[n : n + past].clone()
        final[sequence].copy_(window.t())
        if chunk.ends_at_boundary:
            window = window.to(window_dtype).float()
    return final, captured
