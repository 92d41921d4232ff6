"""Layers of real models as arguments of the kernels, on any device.

The same pool of bytes is seen as pages of `heads_per_member` heads or, contiguous, as slots of all heads; a slot is M
consecutive pages. On the meta device the arguments have shapes and strides but no memory: enough to compile.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from triton_ops.state_copy.layout import Arena, Checkpoints, Planes


class Shape(NamedTuple):
    """One recurrent layer: H heads of P, state dimension N, G groups of B and C, C conv channels of width W.

    member_bytes: length of a member page. slot_bytes: length of a conv slot, payload and what is behind it.
    """

    name: str
    num_layers: int
    H: int
    P: int
    N: int
    G: int
    C: int
    W: int
    member_bytes: int = 512 * 1024
    slot_bytes: int = 32 * 1024

    def heads_per_member(self, state_dtype: torch.dtype) -> int:
        """Heads whose state fills one member page."""
        head_bytes = self.P * self.N * int(state_dtype.itemsize)
        return self.member_bytes // head_bytes

    def num_members(self, state_dtype: torch.dtype) -> int:
        """M: member pages of one layer's state."""
        return self.H // self.heads_per_member(state_dtype)


FALCON_H1_7B = Shape("falcon-h1-7b", 44, 24, 128, 256, 1, 3584, 4)
"""Source: the model's public config: mamba_n_heads, mamba_d_head, mamba_d_state, mamba_n_groups, mamba_d_conv."""

GRANITE_4_H_MICRO = Shape("granite-4.0-h-micro", 36, 64, 64, 128, 1, 4352, 4)
"""Source: the model's public config, as above."""


class SsmArguments(NamedTuple):
    """Arguments of `ssm_update`'s kernel and reference, in order."""

    state: torch.Tensor
    src_table: torch.Tensor
    dst_table: torch.Tensor | None
    x: torch.Tensor
    dt: torch.Tensor
    A: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    D: torch.Tensor
    dt_bias: torch.Tensor
    z: torch.Tensor | None
    out: torch.Tensor


class ConvArguments(NamedTuple):
    """Arguments of `conv_update`'s kernel and reference, in order."""

    lines: torch.Tensor
    src_line: torch.Tensor
    dst_line: torch.Tensor | None
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    activation: str | None
    out: torch.Tensor


class CopyArguments(NamedTuple):
    """Planes of all layers, a batch of checkpoints and another, and an arena for one of them."""

    planes: Planes
    src: Checkpoints
    dst: Checkpoints
    arena: Arena


def ssm_arguments(
    shape: Shape,
    pool: torch.Tensor,
    src: torch.Tensor,
    dst: torch.Tensor | None,
    *,
    gate: bool,
    seed: int = 0,
) -> SsmArguments:
    """Build the arguments of one layer's step on `pool`.

    Args:
        pool: `[units, heads, P, N]`: pages, or slots with heads = H.
        src: `[batch, H // heads] int32` on the pool's device; dst likewise, None for in place.
        gate: fuse the gate z.
    """
    device, batch = pool.device, src.shape[0]
    H, P, N, G = shape.H, shape.P, shape.N, shape.G
    # x, B and C are slices of the conv's output; z and dt are slices of the input projection, as in the model.
    xbc = _random((batch, H * P + 2 * G * N), torch.bfloat16, device, seed)
    proj = _random((batch, H * P + shape.C + H), torch.bfloat16, device, seed + 1)
    B, C = (part.unflatten(1, (G, N)) for part in xbc[:, H * P :].chunk(2, dim=1))
    return SsmArguments(
        state=pool,
        src_table=src,
        dst_table=dst,
        x=xbc[:, : H * P].unflatten(1, (H, P)),
        dt=proj[:, H * P + shape.C :],
        A=-1.0 - _random((H,), torch.float32, device, seed + 2).abs(),
        B=B,
        C=C,
        D=_random((H,), torch.float32, device, seed + 3),
        dt_bias=_random((H,), torch.float32, device, seed + 4),
        z=proj[:, : H * P].unflatten(1, (H, P)) if gate else None,
        out=torch.empty((batch, H, P), dtype=torch.bfloat16, device=device),
    )


def conv_arguments(
    shape: Shape, lines: torch.Tensor, src: torch.Tensor, dst: torch.Tensor | None, *, seed: int = 0
) -> ConvArguments:
    """Build the arguments of one layer's conv step; a weight of channel-major lines is channel-major too."""
    device, batch = lines.device, src.shape[0]
    weight = _random((shape.W, shape.C), torch.bfloat16, device, seed)
    if lines.stride(-1) != 1:
        weight = weight.t().contiguous().t()
    proj = _random((batch, shape.H * shape.P + shape.C + shape.H), torch.bfloat16, device, seed + 1)
    return ConvArguments(
        lines=lines,
        src_line=src,
        dst_line=dst,
        x=proj[:, shape.H * shape.P : shape.H * shape.P + shape.C],
        weight=weight,
        bias=_random((shape.C,), torch.bfloat16, device, seed + 2),
        activation="silu",
        out=torch.empty((batch, shape.C), dtype=torch.bfloat16, device=device),
    )


def conv_lines(shape: Shape, num_lines: int, dtype: torch.dtype, device: str, *, channel_major: bool) -> torch.Tensor:
    """Allocate conv slots, each at least as long as its payload, and return the view of the payloads."""
    payload = (shape.W - 1) * shape.C
    stride = max(shape.slot_bytes // dtype.itemsize, payload)
    lines = _random((num_lines, stride), dtype, torch.device(device), 5)[:, :payload]
    if channel_major:
        return lines.unflatten(1, (shape.C, shape.W - 1)).transpose(1, 2)
    return lines.unflatten(1, (shape.W - 1, shape.C))


def copy_arguments(
    shape: Shape, batch: int, dtype: torch.dtype, device: str, *, num_planes: int, seed: int = 0
) -> CopyArguments:
    """Build the copy of `batch` checkpoints of all planes, with random pages and lines."""
    heads, M = shape.heads_per_member(dtype), shape.num_members(dtype)
    num_pages, num_lines = 2 * batch * M, 2 * batch
    state = _random((num_planes, num_pages, heads, shape.P, shape.N), dtype, torch.device(device), seed)
    conv = torch.stack([conv_lines(shape, num_lines, dtype, device, channel_major=False) for _ in range(num_planes)])
    generator = torch.Generator().manual_seed(seed)
    members = torch.randperm(num_pages, generator=generator).to(torch.int32).view(2, batch, 1, M).to(device)
    lines = torch.randperm(num_lines, generator=generator).to(torch.int32).view(2, batch, 1).to(device)
    return CopyArguments(
        planes=Planes(state, conv),
        src=Checkpoints(members[0], lines[0]),
        dst=Checkpoints(members[1], lines[1]),
        arena=Arena(
            torch.empty((num_planes, batch, shape.H, shape.P, shape.N), dtype=dtype, device=device),
            torch.empty((num_planes, batch, shape.W - 1, shape.C), dtype=dtype, device=device),
        ),
    )


def _random(size: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    if device.type == "meta":
        return torch.empty(size, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(size, generator=generator, dtype=dtype, device=device)
