"""One decode step of the depthwise causal convolution on conv lines: contract and dispatch.

For row b and channel c, with the line's W-1 taps oldest first:

    y   = bias[c] + sum_j taps[j, c] * weight[j, c] + x[b, c] * weight[W-1, c]       out[b, c] = silu(y) or y
    the destination line becomes taps[1:], x[b, c]

The arithmetic is float32, oldest tap first; taps are stored in the dtype of the lines, unrounded otherwise.

A line is a row of a strided view, so that a conv slot in a slab, a page, and the tail of a composite page are the same
thing. Two layouts of taps in a line are taken: tap-major `[W-1, C]` (channels contiguous, 16-byte loads: the fast one)
and SGLang's channel-major `[C, W-1]`, passed as its transposed view. The same holds for the weight. Bytes of a line
behind its payload are never touched.

The id -1 means absent. An absent source reads as zero, an absent destination is not written, a row absent on both sides
(padding) gets a zero output and touches no line.
"""

from __future__ import annotations

from typing import Literal

import torch

from triton_ops.contract import ACTIVATION_DTYPES, PARAMETER_DTYPES, STATE_DTYPES, check_tensor, expect, runs_triton

Activation = Literal["silu"] | None


def conv_update(
    lines: torch.Tensor,
    src_line: torch.Tensor,
    dst_line: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    activation: Activation = "silu",
    out: torch.Tensor | None = None,
    may_start_early: bool = False,
) -> torch.Tensor:
    """Advance the conv lines of a batch by one token and return the convolution's output.

    Runs the Triton kernel on CUDA (and in Triton's interpreter), the vectorized torch path on the CPU. Does not
    synchronize. Allocates only `out`, and only where it is not given.

    Args:
        lines: `[num_lines, W-1, C]` bfloat16 or float32, W in 2..4; strides (line_stride, C, 1) or
            (line_stride, 1, W-1) elements. Written in place.
        src_line: `[batch] int32`, any stride; a table of several groups is passed as the group's column.
        dst_line: `[batch] int32`; None means in place, `src_line`.
        x: `[batch, C]`, any row stride.
        weight: `[W, C]`, strides (C, 1) or (1, W).
        bias: `[C]`.
        activation: "silu" or None.
        out: `[batch, C]`; may be `x`.
        may_start_early: permission: the previous kernel on the stream writes neither `lines` nor the tables. On Hopper
            and later this one then loads its lines while that one ends; elsewhere it changes nothing.

    Raises:
        ValueError: a dtype, device, shape, stride or activation that the contract excludes.
    """
    expect(activation in ("silu", None), "activation", "'silu' or None", repr(activation))
    _check(lines, src_line, dst_line, x, weight, bias)
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    else:
        check_tensor("out", out, x.shape, ACTIVATION_DTYPES, x.device)
    if x.shape[0] == 0:
        return out
    if runs_triton(x):
        from triton_ops.conv_update.kernel import prepare

        prepare(lines, src_line, dst_line, x, weight, bias, activation, out, may_start_early=may_start_early).run()
    else:
        from triton_ops.conv_update import torch_path

        target = src_line if dst_line is None else dst_line
        windows, silu = lines.transpose(1, 2), activation == "silu"
        torch_path.update_lines(windows, x, weight.t(), bias, src_line, target, silu=silu, out=out)
        out.masked_fill_(((src_line < 0) & (target < 0))[:, None], 0.0)
    return out


def _check(
    lines: torch.Tensor,
    src_line: torch.Tensor,
    dst_line: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:
    device = lines.device
    check_tensor("lines", lines, (None, None, None), STATE_DTYPES, device, contiguous=False)
    _, taps, C = lines.shape
    expect(1 <= taps <= 3, "lines.shape[1] (W-1)", "1, 2 or 3", taps)
    expect(C > 0, "lines.shape[2] (C)", "at least one channel", C)
    _check_layout("lines", lines, taps)
    check_tensor("x", x, (None, C), ACTIVATION_DTYPES, device)
    check_tensor("src_line", src_line, (x.shape[0],), (torch.int32,), device, contiguous=False)
    if dst_line is not None:
        check_tensor("dst_line", dst_line, (x.shape[0],), (torch.int32,), device, contiguous=False)
    check_tensor("weight", weight, (taps + 1, C), PARAMETER_DTYPES, device, contiguous=False)
    _check_layout("weight", weight, taps + 1)
    if bias is not None:
        check_tensor("bias", bias, (C,), PARAMETER_DTYPES, device)


def _check_layout(name: str, tensor: torch.Tensor, rows: int) -> None:
    """Check that the last two dimensions, `[rows, C]`, are dense: channels contiguous, or rows contiguous."""
    C, strides = tensor.shape[-1], tensor.stride()[-2:]
    dense = strides in ((C, 1), (1, rows)) or (rows == 1 and strides[1] == 1)
    expect(dense, f"{name}.stride", f"{(C, 1)} or {(1, rows)} for the last two dimensions", strides)
