"""Copies of whole checkpoints: gather to an arena, scatter from it, copy to other pages.

A checkpoint is G * M member pages and G conv lines; recurrent layer l lies in plane l % T and names its units by group
l // T of the tables. Each function moves the members and the conv lines of all rows and all layers in one launch, as
bytes: nothing is converted, every bit pattern survives.

The id -1 means absent. An absent source reads as zero, an absent destination is not written. A unit may be the
destination of one row only, and no row may read a unit that another place writes.
"""

from __future__ import annotations

import torch

from triton_ops.contract import expect, runs_triton
from triton_ops.state_copy.layout import Arena, Checkpoints, Planes, check_arena, check_planes


def state_gather(planes: Planes, src: Checkpoints, arena: Arena) -> None:
    """Copy the checkpoints `src` from the pages into `arena`; an absent member or line becomes zero.

    Does not synchronize or allocate.

    Raises:
        ValueError: a dtype, device, shape, stride or table width that the contract excludes.
    """
    if check_arena(arena, planes, src, "src").batch == 0:
        return
    if _runs_triton(planes):
        from triton_ops.state_copy.kernel import prepare_gather

        prepare_gather(planes, src, arena).run()
    else:
        from triton_ops.state_copy import torch_path

        torch_path.state_gather(planes, src, arena)


def state_scatter(arena: Arena, planes: Planes, dst: Checkpoints) -> None:
    """Copy `arena` to the pages of the checkpoints `dst`; an absent member or line is not written.

    Does not synchronize or allocate.

    Raises:
        ValueError: a dtype, device, shape, stride or table width that the contract excludes.
    """
    if check_arena(arena, planes, dst, "dst").batch == 0:
        return
    if _runs_triton(planes):
        from triton_ops.state_copy.kernel import prepare_scatter

        prepare_scatter(arena, planes, dst).run()
    else:
        from triton_ops.state_copy import torch_path

        torch_path.state_scatter(arena, planes, dst)


def state_copy(planes: Planes, src: Checkpoints, dst: Checkpoints, *, num_layers: int | None = None) -> None:
    """Copy the checkpoints `src` to the checkpoints `dst` in the same planes.

    Does not synchronize or allocate.

    Args:
        num_layers: recurrent layers to copy, the first of the G * T; None means all.

    Raises:
        ValueError: a dtype, device, shape, stride or table width that the contract excludes.
    """
    extent = check_planes(planes, src, "src")
    other = check_planes(planes, dst, "dst")
    expect(other == extent, "dst", f"{extent} as src has", other)
    if src.members is not None and dst.members is not None:
        width = src.members.shape[2]
        expect(dst.members.shape[2] == width, "dst.members.shape[2] (M)", width, dst.members.shape[2])
    limit = extent.num_groups * extent.num_planes
    layers = limit if num_layers is None else num_layers
    expect(0 < layers <= limit, "num_layers", f"1..{limit}", layers)
    if extent.batch == 0:
        return
    if _runs_triton(planes):
        from triton_ops.state_copy.kernel import prepare_copy

        prepare_copy(planes, src, dst, layers).run()
    else:
        from triton_ops.state_copy import torch_path

        torch_path.state_copy(planes, src, dst, layers)


def _runs_triton(planes: Planes) -> bool:
    present: list[torch.Tensor] = [part for part in planes if part is not None]
    return runs_triton(present[0])
