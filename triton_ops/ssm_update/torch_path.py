"""Mamba2 decode step in vectorized torch, on pages named by tables or on slots of a state tensor.

The batch is walked in blocks of rows whose states stay in the cache.

Letters: R rows, H heads, P head dimension, N state dimension, G groups of B and C, M members of a checkpoint.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

PAD_SLOT = -1
BLOCK_BYTES = 1 << 21
"""float32 state of one block of rows; the fastest of 2^17 to 2^22 at batches 8 to 64 on two AVX2 cores."""


class StepInputs(NamedTuple):
    """One token per row: x, z [R, H, P]; dt [R, H]; A, dt_bias [H]; B, C [R, G, N]; D [H] or [H, P]."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None = None
    z: Tensor | None = None
    dt_bias: Tensor | None = None
    dt_softplus: bool = True


def ssm_update(
    state: Tensor,
    src_table: Tensor,
    dst_table: Tensor | None,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    z: Tensor | None,
    out: Tensor,
) -> None:
    """Update `state` and `out` in place, as `api.ssm_update`."""
    dst_table = src_table if dst_table is None else dst_table
    _step(state, src_table, dst_table, StepInputs(x, dt, A, B, C, D, z, dt_bias), out)


def update_slots(
    states: Tensor,
    inputs: StepInputs,
    slots: Tensor | None,
    *,
    out: Tensor,
    pad_slot: int = PAD_SLOT,
    write_states: bool = True,
) -> None:
    """Advance states[slots] by one token in place and write the outputs.

    states: [num_slots, H, P, N] float, any strides. slots: [R] integer, distinct except for `pad_slot`; None means the
    first R slots. out: [R, H, P]. A row with `pad_slot` reads and writes no state and its output is zero.
    """
    if slots is None:
        slots = torch.arange(inputs.x.shape[0], device=states.device)
    table = slots.masked_fill(slots == pad_slot, -1)[:, None]
    _step(states, table, table, inputs, out, write_states=write_states)


def _step(
    pages: Tensor, src_table: Tensor, dst_table: Tensor, inputs: StepInputs, out: Tensor, *, write_states: bool = True
) -> None:
    """Advance the states of all rows; pages: [num_pages, H / M, P, N], tables: [R, M] with -1 for absent."""
    R, M = src_table.shape
    _, heads_per_member, P, N = pages.shape
    H, G = M * heads_per_member, inputs.B.shape[1]
    x = inputs.x.float()
    dt = inputs.dt.float() if inputs.dt_bias is None else inputs.dt.float() + inputs.dt_bias.float()
    if inputs.dt_softplus:
        dt = functional.softplus(dt)
    decay = (dt * inputs.A.float()).exp()
    dB = (inputs.B.float()[:, :, None] * dt.view(R, G, H // G, 1)).view(R, H, 1, N)
    C = inputs.C.float()[:, :, None].expand(R, G, H // G, N).reshape(R, H, 1, N)
    y = torch.empty(R, H, P, dtype=torch.float32, device=x.device)

    sources, destinations = src_table.tolist(), dst_table.tolist()
    block_rows = max(1, BLOCK_BYTES // (4 * H * P * N))
    state = torch.empty(min(R, block_rows), M, heads_per_member, P, N, dtype=torch.float32, device=x.device)
    product = torch.empty(min(R, block_rows), H, P, N, dtype=torch.float32, device=x.device)
    for first in range(0, R, block_rows):
        rows = range(first, min(first + block_rows, R))
        for row, member in itertools.product(rows, range(M)):
            page = sources[row][member]
            target = state[row - first, member]
            target.zero_() if page < 0 else target.copy_(pages[page])
        batch = slice(rows.start, rows.stop)
        S, SC = state[: len(rows)].view(len(rows), H, P, N), product[: len(rows)]
        S.mul_(decay[batch, :, None, None])
        S.add_(torch.mul(dB[batch], x[batch, :, :, None], out=SC))
        torch.sum(torch.mul(S, C[batch], out=SC), dim=3, out=y[batch])
        if write_states:
            for row, member in itertools.product(rows, range(M)):
                page = destinations[row][member]
                if page >= 0:
                    pages[page].copy_(state[row - first, member])

    if inputs.D is not None:
        y.add_(x * (inputs.D if inputs.D.dim() == 2 else inputs.D[:, None]).float())
    out.copy_(y)
    if inputs.z is not None:
        out.mul_(functional.silu(inputs.z.float()).to(out.dtype))
    padded = [row for row in range(R) if max(sources[row]) < 0 and max(destinations[row]) < 0]
    if padded:
        out[padded] = 0.0
