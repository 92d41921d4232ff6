"""Mamba2 decode step in vectorized torch, on pages named by tables or on slots of a state tensor.

The batch is walked row by row and member by member, and a float32 state is advanced in its page: what one row needs
stays in the cache, and nothing is copied. A row has the bits that it has alone.

Letters: R rows, H heads, P head dimension, N state dimension, G groups of B and C, M members of a checkpoint.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from triton_ops.by_rows import by_rows

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
        dt = by_rows(functional.softplus, dt)
    decay = (dt * inputs.A.float()).exp().view(R, M, heads_per_member, 1, 1)
    dB = (inputs.B.float()[:, :, None] * dt.view(R, G, H // G, 1)).view(R, H, 1, N)
    C = inputs.C.float()[:, :, None].expand(R, G, H // G, N).reshape(R, M, heads_per_member, 1, N)
    y = torch.empty(R, H, P, dtype=torch.float32, device=x.device)

    sources, destinations = src_table.tolist(), dst_table.tolist()
    product = torch.empty(H, P, N, dtype=torch.float32, device=x.device)
    products = product.view(M, heads_per_member, P, N).unbind()
    absent = torch.zeros_like(products[0])
    computed = torch.empty_like(absent)
    in_pages = write_states and pages.dtype == torch.float32
    per_row = zip(sources, destinations, decay.unbind(), dB.unbind(), C.unbind(), x.unbind(), y.unbind(), strict=True)
    for row_sources, row_destinations, row_decay, row_dB, row_C, row_x, row_y in per_row:
        torch.mul(row_dB, row_x[:, :, None], out=product)
        per_member = zip(row_sources, row_destinations, row_decay.unbind(), row_C.unbind(), products, strict=True)
        for source, destination, member_decay, member_C, member_product in per_member:
            before = absent if source < 0 else pages.select(0, source)
            if not in_pages or destination < 0:
                after = computed
            else:
                after = before if destination == source else pages.select(0, destination)
            torch.mul(before, member_decay, out=after).add_(member_product)
            torch.mul(after, member_C, out=member_product)
            if write_states and after is computed and destination >= 0:
                pages[destination].copy_(computed)
        torch.sum(product, dim=2, out=row_y)

    if inputs.D is not None:
        y.add_(x * (inputs.D if inputs.D.dim() == 2 else inputs.D[:, None]).float())
    out.copy_(y)
    if inputs.z is not None:
        out.mul_(by_rows(functional.silu, inputs.z.float().flatten(1)).view(out.shape).to(out.dtype))
    padded = [row for row in range(R) if max(sources[row]) < 0 and max(destinations[row]) < 0]
    if padded:
        out[padded] = 0.0
