"""Oracle of the convolution's decode step: numpy float32, the operations in the order of the kernel."""

from __future__ import annotations

import numpy as np
import torch


def conv_update(
    lines: torch.Tensor,
    src_line: torch.Tensor,
    dst_line: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    out: torch.Tensor,
) -> None:
    """Update `lines` and `out` in place, as `api.conv_update`; all sources are read before a destination is written."""
    dst_line = src_line if dst_line is None else dst_line
    _, num_taps, C = lines.shape
    window = torch.zeros((x.shape[0], num_taps + 1, C), dtype=torch.float32)
    for b, line in enumerate(src_line.tolist()):
        if line >= 0:
            window[b, :num_taps] = lines[line].float()
    window[:, num_taps] = x.float()

    taps, weights = window.numpy(), weight.float().numpy()
    y = np.zeros((x.shape[0], C), dtype=np.float32) + (0.0 if bias is None else bias.float().numpy())
    for j in range(num_taps + 1):
        y = y + taps[:, j] * weights[j]
    if activation == "silu":
        with np.errstate(over="ignore"):
            y = y / (np.float32(1.0) + np.exp(-y))

    padded = (src_line < 0) & (dst_line < 0)
    out.copy_(torch.from_numpy(y).masked_fill(padded[:, None], 0.0))
    for b, line in enumerate(dst_line.tolist()):
        if line >= 0:
            lines[line] = window[b, 1:].to(lines.dtype)
