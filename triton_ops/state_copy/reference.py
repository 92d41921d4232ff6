"""Oracle of the checkpoint copies: one row, layer and unit at a time, in torch indexing."""

from __future__ import annotations

import torch

from triton_ops.state_copy.layout import Arena, Checkpoints, Planes


def state_gather(planes: Planes, src: Checkpoints, arena: Arena) -> None:
    """Fill `arena` in place, as `api.state_gather`."""
    if planes.state is not None and src.members is not None and arena.state is not None:
        T, _, heads = planes.state.shape[:3]
        for layer in range(arena.state.shape[0]):
            for row, members in enumerate(src.members[:, layer // T].tolist()):
                for m, page in enumerate(members):
                    target = arena.state[layer, row, m * heads : (m + 1) * heads]
                    _assign(target, planes.state[layer % T], page)
    if planes.conv is not None and src.lines is not None and arena.conv is not None:
        T = planes.conv.shape[0]
        for layer in range(arena.conv.shape[0]):
            for row, line in enumerate(src.lines[:, layer // T].tolist()):
                _assign(arena.conv[layer, row], planes.conv[layer % T], line)


def state_scatter(arena: Arena, planes: Planes, dst: Checkpoints) -> None:
    """Write the units of `dst` in place, as `api.state_scatter`."""
    if planes.state is not None and dst.members is not None and arena.state is not None:
        T, _, heads = planes.state.shape[:3]
        for layer in range(arena.state.shape[0]):
            for row, members in enumerate(dst.members[:, layer // T].tolist()):
                for m, page in enumerate(members):
                    if page >= 0:
                        planes.state[layer % T, page] = arena.state[layer, row, m * heads : (m + 1) * heads]
    if planes.conv is not None and dst.lines is not None and arena.conv is not None:
        T = planes.conv.shape[0]
        for layer in range(arena.conv.shape[0]):
            for row, line in enumerate(dst.lines[:, layer // T].tolist()):
                if line >= 0:
                    planes.conv[layer % T, line] = arena.conv[layer, row]


def state_copy(planes: Planes, src: Checkpoints, dst: Checkpoints, num_layers: int) -> None:
    """Copy the units of `src` to those of `dst` in place, as `api.state_copy`: gather all, then scatter."""
    arena = _arena_like(planes, src, num_layers)
    state_gather(planes, src, arena)
    state_scatter(arena, planes, dst)


def _assign(target: torch.Tensor, units: torch.Tensor, unit: int) -> None:
    if unit < 0:
        target.zero_()
    else:
        target.copy_(units[unit])


def _arena_like(planes: Planes, ids: Checkpoints, num_layers: int) -> Arena:
    state = conv = None
    if planes.state is not None and ids.members is not None:
        batch, _, M = ids.members.shape
        heads, P, N = planes.state.shape[2:]
        state = planes.state.new_empty((num_layers, batch, M * heads, P, N))
    if planes.conv is not None and ids.lines is not None:
        conv = planes.conv.new_empty((num_layers, ids.lines.shape[0], *planes.conv.shape[2:]))
    return Arena(state, conv)
