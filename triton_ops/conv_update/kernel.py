"""Triton kernel of the depthwise convolution's decode step on conv lines.

One program advances BLOCK channels of one batch row: it loads all taps before it stores any, so a line may be its own
destination. Strides and C are constants; with the tap-major layout every access is a 16-byte vector.

Letters: C channels, W width of the convolution (a line has W-1 taps).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triton_ops.launch import Launch, can_start_early


@triton.jit(do_not_specialize_on_alignment=["src_line", "dst_line"])
def _conv_update_kernel(
    lines,
    src_line,
    dst_line,
    x,
    weight,
    bias,
    out,
    LINE_STRIDE: tl.constexpr,
    TAP_STRIDE: tl.constexpr,
    CHANNEL_STRIDE: tl.constexpr,
    SRC_STRIDE: tl.constexpr,
    DST_STRIDE: tl.constexpr,
    X_STRIDE: tl.constexpr,
    WEIGHT_TAP_STRIDE: tl.constexpr,
    WEIGHT_CHANNEL_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    SILU: tl.constexpr,
    IN_PLACE: tl.constexpr,
    EARLY: tl.constexpr,
):
    batch_row = tl.program_id(1).to(tl.int64)
    first_channel = tl.program_id(0) * BLOCK
    c = tl.arange(0, BLOCK)
    inside = first_channel + c < C

    src = tl.load(src_line + batch_row * SRC_STRIDE).to(tl.int64)
    dst = src
    if not IN_PLACE:
        dst = tl.load(dst_line + batch_row * DST_STRIDE).to(tl.int64)
    out_channels = out + (batch_row * OUT_STRIDE + first_channel) + c
    if (src < 0) & (dst < 0):
        if EARLY:
            tl.extra.cuda.gdc_wait()
        tl.store(out_channels, tl.zeros([BLOCK], dtype=out.dtype.element_ty), mask=inside)
        return

    read = inside & (src >= 0)
    source = lines + (src * LINE_STRIDE + first_channel * CHANNEL_STRIDE) + c * CHANNEL_STRIDE
    weights = weight + first_channel * WEIGHT_CHANNEL_STRIDE + c * WEIGHT_CHANNEL_STRIDE
    tap0 = tl.load(source, mask=read, other=0.0).to(tl.float32)
    if W > 2:
        tap1 = tl.load(source + TAP_STRIDE, mask=read, other=0.0).to(tl.float32)
    if W > 3:
        tap2 = tl.load(source + 2 * TAP_STRIDE, mask=read, other=0.0).to(tl.float32)
    if EARLY:
        # The lines were written a step before; x comes from the kernel that may still run.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    new = tl.load(x + (batch_row * X_STRIDE + first_channel) + c, mask=inside, other=0.0).to(tl.float32)
    if W == 2:
        tap1 = new
    if W == 3:
        tap2 = new

    if bias is not None:
        y = tl.load(bias + first_channel + c, mask=inside, other=0.0).to(tl.float32)
    else:
        y = tl.zeros([BLOCK], dtype=tl.float32)
    y += tap0 * tl.load(weights, mask=inside, other=0.0).to(tl.float32)
    y += tap1 * tl.load(weights + WEIGHT_TAP_STRIDE, mask=inside, other=0.0).to(tl.float32)
    if W > 2:
        y += tap2 * tl.load(weights + 2 * WEIGHT_TAP_STRIDE, mask=inside, other=0.0).to(tl.float32)
    if W > 3:
        y += new * tl.load(weights + 3 * WEIGHT_TAP_STRIDE, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        y = y / (1.0 + tl.exp(-y))
    tl.store(out_channels, y.to(out.dtype.element_ty), mask=inside)

    write = inside & (dst >= 0)
    target = lines + (dst * LINE_STRIDE + first_channel * CHANNEL_STRIDE) + c * CHANNEL_STRIDE
    tl.store(target, tap1.to(lines.dtype.element_ty), mask=write)
    if W > 2:
        tl.store(target + TAP_STRIDE, tap2.to(lines.dtype.element_ty), mask=write)
    if W > 3:
        tl.store(target + 2 * TAP_STRIDE, new.to(lines.dtype.element_ty), mask=write)


def prepare(
    lines: torch.Tensor,
    src_line: torch.Tensor,
    dst_line: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    out: torch.Tensor,
    *,
    BLOCK: int | None = None,
    num_warps: int = 1,
    may_start_early: bool = False,
) -> Launch:
    """Return the launch for arguments that satisfy the contract of `api.conv_update`.

    BLOCK: channels per program; None takes 256 (8 per thread), fewer where the layer has fewer.
    """
    batch, C = x.shape
    BLOCK = BLOCK or min(256, triton.next_power_of_2(C))
    in_place = dst_line is None
    early = may_start_early and can_start_early()
    constants = {
        "LINE_STRIDE": lines.stride(0),
        "TAP_STRIDE": lines.stride(1),
        "CHANNEL_STRIDE": lines.stride(2),
        "SRC_STRIDE": src_line.stride(0),
        "DST_STRIDE": 0 if dst_line is None else dst_line.stride(0),
        "X_STRIDE": x.stride(0),
        "WEIGHT_TAP_STRIDE": weight.stride(0),
        "WEIGHT_CHANNEL_STRIDE": weight.stride(1),
        "OUT_STRIDE": out.stride(0),
        "C": C,
        "W": weight.shape[0],
        "BLOCK": BLOCK,
        "SILU": activation == "silu",
        "IN_PLACE": in_place,
        "EARLY": early,
    }
    args = (lines, src_line, src_line if dst_line is None else dst_line, x, weight, bias, out)
    return Launch(_conv_update_kernel, (triton.cdiv(C, BLOCK), batch, 1), args, constants, num_warps, early)
