"""Mamba2 decode step in vectorized torch, on slots of a state tensor or on pages named by tables.

Letters: R rows, H heads, P head dimension, N state dimension, G groups of B and C, M members of a checkpoint.
Source: Dao and Gu, "Transformers are SSMs", 2024, equation (1) with scalar A per head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

PAD_SLOT = -1


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
    num_rows = inputs.x.shape[0]
    slots = torch.arange(num_rows, device=states.device) if slots is None else slots.to(torch.int64)
    active = slots != pad_slot
    if not bool(active.all()):
        rows = active.nonzero()[:, 0]
        out.zero_()
        active_out = torch.empty(rows.numel(), *out.shape[1:], dtype=out.dtype, device=out.device)
        update_slots(states, _select(inputs, rows), slots[rows], out=active_out, write_states=write_states)
        out.index_copy_(0, rows, active_out)
        return
    state = states.index_select(0, slots).float()
    out.copy_(_advance(state, inputs))
    if write_states:
        states.index_copy_(0, slots, state.to(states.dtype))


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
    """Update `state` and `out` in place, as `api.ssm_update`; all sources are read before a destination is written."""
    dst_table = src_table if dst_table is None else dst_table
    R, M = src_table.shape
    _, heads_per_member, P, N = state.shape
    sources, destinations = src_table.reshape(-1).to(torch.int64), dst_table.reshape(-1).to(torch.int64)
    members = state.index_select(0, sources.clamp(min=0)).float()
    absent = sources < 0
    if bool(absent.any()):
        members[absent] = 0.0
    y = _advance(members.view(R, M * heads_per_member, P, N), StepInputs(x, dt, A, B, C, D, None, dt_bias))
    out.copy_(y)
    if z is not None:
        out.mul_(functional.silu(z.float()).to(out.dtype))
    present = destinations >= 0
    if bool(present.all()):
        state.index_copy_(0, destinations, members.to(state.dtype))
        return
    rows = present.nonzero()[:, 0]
    state.index_copy_(0, destinations[rows], members[rows].to(state.dtype))
    out[((src_table < 0) & (dst_table < 0)).all(dim=1)] = 0.0


def _select(inputs: StepInputs, rows: Tensor) -> StepInputs:
    per_row = {name: getattr(inputs, name).index_select(0, rows) for name in ("x", "dt", "B", "C")}
    z = None if inputs.z is None else inputs.z.index_select(0, rows)
    return inputs._replace(**per_row, z=z)


def _advance(state: Tensor, inputs: StepInputs) -> Tensor:
    """Advance `state` [R, H, P, N] float32 in place by one token and return y [R, H, P] float32."""
    R, H, P, N = state.shape
    G = inputs.B.shape[1]
    x = inputs.x.float()
    dt = inputs.dt.float() if inputs.dt_bias is None else inputs.dt.float() + inputs.dt_bias.float()
    if inputs.dt_softplus:
        dt = functional.softplus(dt)
    state.mul_((dt * inputs.A.float()).exp()[:, :, None, None])
    grouped = state.view(R * G, H // G * P, N)
    grouped.baddbmm_((x * dt[:, :, None]).view(R * G, -1, 1), inputs.B.float().reshape(R * G, 1, N))
    y = torch.bmm(grouped, inputs.C.float().reshape(R * G, N, 1)).view(R, H, P)
    if inputs.D is not None:
        y.add_(x * (inputs.D if inputs.D.dim() == 2 else inputs.D[:, None]).float())
    if inputs.z is not None:
        y.mul_(functional.silu(inputs.z.float()))
    return y
