"""What a copy moves: planes, checkpoint ids and arenas, and the checks that they fit together."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from triton_ops.contract import STATE_DTYPES, check_tensor, expect


class Planes(NamedTuple):
    """The paged side, T planes of the pool. A part that is None is not moved.

    state: `[T, num_pages, heads_per_member, P, N]`, strides (plane_stride, page_stride, P * N, N, 1).
    conv: `[T, num_lines, W-1, C]`, strides (plane_stride, line_stride) and a dense line, tap-major or channel-major.
    """

    state: torch.Tensor | None
    conv: torch.Tensor | None


class Checkpoints(NamedTuple):
    """The ids of a batch of checkpoints.

    members: `[batch, G, M] int32`, any row and group stride.
    lines: `[batch, G] int32`, any row stride.
    """

    members: torch.Tensor | None
    lines: torch.Tensor | None


class Arena(NamedTuple):
    """The contiguous side: L layers of a batch, in the dtype of the planes.

    state: `[L, batch, H, P, N]`, contiguous.
    conv: `[L, batch, W-1, C]`, dense, a line laid out as in the planes.
    """

    state: torch.Tensor | None
    conv: torch.Tensor | None


class Extent(NamedTuple):
    """Planes T, groups G and rows of a copy."""

    num_planes: int
    num_groups: int
    batch: int


def check_planes(planes: Planes, ids: Checkpoints, name: str) -> Extent:
    """Check that `ids` (called `name` in messages) name units of `planes`; return the extent.

    Raises:
        ValueError: naming the part, what was expected and what came.
    """
    extents = []
    for part, plane, table in (("members", planes.state, ids.members), ("lines", planes.conv, ids.lines)):
        both = (plane is None) == (table is None)
        expect(both, f"{name}.{part}", "a table with its planes, or None for both", "one of them")
        if plane is None or table is None:
            continue
        if part == "members":
            check_tensor("planes.state", plane, (None,) * 5, STATE_DTYPES, plane.device)
            _, _, _, P, N = plane.shape
            _expect_strides("planes.state", plane, (P * N, N, 1))
            check_tensor(f"{name}.members", table, (None, None, None), (torch.int32,), plane.device)
        else:
            check_tensor("planes.conv", plane, (None,) * 4, STATE_DTYPES, plane.device, contiguous=False)
            _expect_strides("planes.conv", plane, _line_strides(plane))
            check_tensor(f"{name}.lines", table, (None, None), (torch.int32,), plane.device)
        extents.append(Extent(plane.shape[0], table.shape[1], table.shape[0]))
    expect(bool(extents), "planes", "at least one part", "None for both")
    expect(extents[0] == extents[-1], f"{name}.lines", f"{extents[0]} as the members have", extents[-1])
    return extents[0]


def check_arena(arena: Arena, planes: Planes, ids: Checkpoints, name: str) -> Extent:
    """Check that `arena` holds what `ids` name in `planes`; return the extent.

    Raises:
        ValueError: naming the part, what was expected and what came.
    """
    extent = check_planes(planes, ids, name)
    num_layers = {part.shape[0] for part in arena if part is not None}
    limit = extent.num_planes * extent.num_groups
    expect(len(num_layers) == 1 and 0 < min(num_layers) <= limit, "arena layers", f"1..{limit}", sorted(num_layers))
    for part, mine, plane in (("state", arena.state, planes.state), ("conv", arena.conv, planes.conv)):
        expect((mine is None) == (plane is None), f"arena.{part}", "given where the planes are", "one of them")
        if mine is None or plane is None:
            continue
        expect(mine.dtype == plane.dtype, f"arena.{part}.dtype", plane.dtype, mine.dtype)
        expect(mine.device == plane.device, f"arena.{part}.device", plane.device, mine.device)
        inner = list(plane.shape[2:])
        strides: tuple[int, ...] = _line_strides(plane)
        if part == "state" and ids.members is not None:
            inner[0] *= ids.members.shape[2]
            strides = (inner[1] * inner[2], inner[2], 1)
        shape, size = [mine.shape[0], extent.batch, *inner], math.prod(inner)
        expect(list(mine.shape) == shape, f"arena.{part}.shape", shape, list(mine.shape))
        _expect_strides(f"arena.{part}", mine, (extent.batch * size, size, *strides))
    return extent


def _line_strides(plane: torch.Tensor) -> tuple[int, int]:
    """Return the strides of a dense line in the plane's own layout: tap-major, unless the taps are contiguous."""
    taps, C = plane.shape[-2:]
    return (1, taps) if plane.stride(-2) == 1 and taps > 1 else (C, 1)


def _expect_strides(name: str, tensor: torch.Tensor, wanted: tuple[int, ...]) -> None:
    """Check the last strides; the stride of a dimension of size one is free."""
    got = tensor.stride()[-len(wanted) :]
    sizes = tensor.shape[-len(wanted) :]
    same = all(g == w or size <= 1 for g, w, size in zip(got, wanted, sizes, strict=True))
    expect(same, f"{name}.stride", f"{wanted} for the last {len(wanted)} dimensions", got)
