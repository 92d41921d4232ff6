"""Depthwise causal convolution decode step in vectorized torch, on slots of a window tensor or on conv lines. A row has
the bits that it has alone.

Letters: R rows, C channels, W taps. A window [C, W - 1] holds the inputs before the token, the oldest first.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from triton_ops.by_rows import by_rows

PAD_SLOT = -1


def update_slots(
    windows: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    slots: Tensor | None,
    *,
    silu: bool,
    out: Tensor,
    pad_slot: int = PAD_SLOT,
) -> None:
    """Convolve one token per row with windows[slots], shift the windows in place and write the outputs.

    windows: [num_slots, C, W - 1] float, any strides. x, out: [R, C]. weight: [C, W]. bias: [C] or None.
    slots: [R] integer, distinct except for `pad_slot`; None means the first R slots. A row with `pad_slot` reads and
    writes no window and its output is zero.
    """
    if slots is None:
        slots = torch.arange(x.shape[0], device=x.device)
    padded = slots == pad_slot
    ids = slots.masked_fill(padded, -1)
    update_lines(windows, x, weight, bias, ids, ids, silu=silu, out=out)
    out.masked_fill_(padded[:, None], 0.0)


def update_lines(
    lines: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    source_lines: Tensor,
    destination_lines: Tensor,
    *,
    silu: bool,
    out: Tensor,
) -> None:
    """Convolve one token per row with the windows of `source_lines` and write the shifted ones to `destination_lines`.

    lines: [num_lines, C, W - 1] float view of a pool, any line stride; bytes beyond a window are not touched.
    Line ids: [R] integer, -1 for absent: an absent source reads as zero, an absent destination is not written.
    Destinations are distinct; a line may be source and destination of one row. x, out: [R, C], all rows are written.
    """
    sources, destinations = source_lines.to(torch.int64), destination_lines.to(torch.int64)
    window = lines.index_select(0, sources.clamp(min=0)).float()
    absent = sources < 0
    if bool(absent.any()):
        window[absent] = 0.0
    window = torch.cat((window, x.float()[:, :, None]), dim=2)
    total = torch.zeros_like(x, dtype=torch.float32) if bias is None else bias.float().expand(x.shape).clone()
    for tap in range(weight.shape[1]):
        total.add_(window[:, :, tap] * weight[:, tap].float())
    out.copy_(by_rows(functional.silu, total) if silu else total)

    shifted = window[:, :, 1:].to(lines.dtype)
    present = (destinations >= 0).nonzero()[:, 0]
    if present.numel() == destinations.numel():
        lines.index_copy_(0, destinations, shifted)
    else:
        lines.index_copy_(0, destinations[present], shifted[present])
