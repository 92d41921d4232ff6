"""Arguments for the ops in the shapes the tests need: NaN everywhere that must not be touched, all kinds of rows.

The rows of a batch cycle through the kinds of a decode batch: moved (source and destination differ), in place, adopted
(the source of an earlier row), new (no source), score (no destination) and padding (neither). Outputs have a row to
spare, so that a kernel that overruns its row damages nothing else.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch

from bench.micro.shapes import ConvArguments, SsmArguments
from triton_ops.state_copy.layout import Checkpoints, Planes

KINDS = ("moved", "in_place", "new", "score", "padding", "adopted")
NAN = float("nan")
MAP_NORESERVE = 0x4000  # Linux; the mmap module names it from Python 3.13 on


def tables(batch: int, width: int, num_units: int, kinds: Sequence[str] = KINDS) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a source and a destination table `[batch, width]` of distinct random units; rows cycle through `kinds`."""
    ids = torch.randperm(num_units)[: 2 * batch * width].to(torch.int32).view(2, batch, width)
    src, dst = ids[0].clone(), ids[1].clone()
    for row in range(batch):
        kind = kinds[row % len(kinds)]
        if kind == "in_place":
            dst[row] = src[row]
        if kind == "adopted":
            src[row] = src[row - row % len(kinds)]
        if kind in ("new", "padding"):
            src[row] = -1
        if kind in ("score", "padding"):
            dst[row] = -1
    return src, dst


def ssm_arguments(
    batch: int,
    *,
    M: int = 3,
    heads_per_member: int = 2,
    P: int = 4,
    N: int = 16,
    bc_groups: int = 1,
    layer_groups: int = 1,
    state_dtype: torch.dtype = torch.bfloat16,
    gate: bool = False,
    num_pages: int | None = None,
    kinds: Sequence[str] = KINDS,
) -> SsmArguments:
    """Build one layer's arguments.

    Pages are longer than a member by 24 elements. Only the pages that a source names hold numbers. The table has the
    columns of `layer_groups` groups and the arguments take those of the last one.
    """
    H = M * heads_per_member
    width = layer_groups * M
    num_pages = num_pages or 2 * batch * width + 3
    src, dst = tables(batch, width, num_pages, kinds)
    member = heads_per_member * P * N
    pool = torch.full((num_pages, member + 24), NAN, dtype=state_dtype)
    state = pool[:, :member].unflatten(1, (heads_per_member, P, N))
    src, dst = src[:, width - M :], dst[:, width - M :]
    for page in set(src.flatten().tolist()) - {-1}:
        state[page] = torch.randn(heads_per_member, P, N).to(state_dtype)
    # The layer's projections are slices of wider rows, as in the model.
    xbc = torch.randn(batch, H * P + 2 * bc_groups * N + 8).to(torch.bfloat16)
    B, C = (part.unflatten(1, (bc_groups, N)) for part in xbc[:, H * P : -8].chunk(2, dim=1))
    proj = torch.randn(batch, H * P + 8 + H).to(torch.bfloat16)
    return SsmArguments(
        state=state,
        src_table=src,
        dst_table=dst,
        x=xbc[:, : H * P].unflatten(1, (H, P)),
        dt=proj[:, H * P + 8 :],
        A=-4.0 * torch.rand(H),
        B=B,
        C=C,
        D=torch.randn(H),
        dt_bias=torch.randn(H),
        z=proj[:, : H * P].unflatten(1, (H, P)) if gate else None,
        out=torch.full((batch + 1, H, P), NAN, dtype=torch.bfloat16)[:batch],
    )


def conv_arguments(
    batch: int,
    *,
    C: int = 40,
    W: int = 4,
    line_dtype: torch.dtype = torch.bfloat16,
    channel_major: bool = False,
    line_stride: int | None = None,
    bias: bool = True,
    activation: str | None = "silu",
    kinds: Sequence[str] = KINDS,
) -> ConvArguments:
    """Build one layer's arguments; a line is longer than its payload and holds numbers only where it is a source."""
    payload = (W - 1) * C
    num_lines = 2 * batch + 3
    src, dst = (table[:, 0] for table in tables(batch, 1, num_lines, kinds))
    pool = torch.full((num_lines, line_stride or payload + 16), NAN, dtype=line_dtype)
    if channel_major:
        lines = pool[:, :payload].unflatten(1, (C, W - 1)).transpose(1, 2)
        weight = torch.randn(C, W).t()
    else:
        lines = pool[:, :payload].unflatten(1, (W - 1, C))
        weight = torch.randn(W, C)
    for line in set(src.tolist()) - {-1}:
        lines[line] = torch.randn(W - 1, C).to(line_dtype)
    return ConvArguments(
        lines=lines,
        src_line=src,
        dst_line=dst,
        x=torch.randn(batch, C + 8).to(torch.bfloat16)[:, :C],
        weight=weight,
        bias=torch.randn(C) if bias else None,
        activation=activation,
        out=torch.full((batch + 1, C), NAN, dtype=torch.bfloat16)[:batch],
    )


def copy_arguments(dtype: torch.dtype) -> tuple[Planes, Checkpoints, Checkpoints]:
    """Build two planes of two groups, units longer than their payload, and a moved, a new and a score row."""
    state, conv = torch.randn(2, 40, 72).to(dtype), torch.randn(2, 40, 40).to(dtype)
    members = [table.view(3, 2, 3) for table in tables(3, 6, 40, kinds=("moved", "new", "score"))]
    lines = tables(3, 2, 40, kinds=("moved", "new", "score"))
    planes = Planes(state[:, :, :64].unflatten(2, (2, 4, 8)), conv[:, :, :30].unflatten(2, (3, 10)))
    return planes, Checkpoints(members[0], lines[0]), Checkpoints(members[1], lines[1])


def sparse(elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Map zeros that take memory only where they are written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, elements * dtype.itemsize, flags=flags), dtype=dtype)


def pool_of(view: torch.Tensor) -> torch.Tensor:
    """Return the whole storage behind a view, one dimensional, as integers of the element's size."""
    flat = view.new_empty(0).set_(view.untyped_storage())
    return flat.view({2: torch.int16, 4: torch.int32}[view.element_size()])


def copy_of(view: torch.Tensor) -> torch.Tensor:
    """Copy a view together with the whole storage behind it."""
    storage = view.new_empty(0).set_(view.untyped_storage()).clone()
    return storage.as_strided(view.shape, view.stride(), view.storage_offset())


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Tell whether the storages behind two views hold the same bits, NaN payloads included."""
    return torch.equal(pool_of(left), pool_of(right))
