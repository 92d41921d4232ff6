"""Gather, scatter and copy of checkpoints under the interpreter: bytes are moved, nothing else is touched."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.interpret.arguments import NAN, copy_of, same_bits, tables
from triton_ops.state_copy import reference
from triton_ops.state_copy.api import state_copy, state_gather, state_scatter
from triton_ops.state_copy.layout import Arena, Checkpoints, Planes

SHAPES = pytest.mark.parametrize(
    ("dtype", "T", "G", "M", "num_layers"),
    [
        (torch.bfloat16, 3, 1, 1, 3),
        (torch.float32, 3, 1, 1, 3),
        (torch.bfloat16, 2, 1, 3, 2),
        (torch.float32, 2, 1, 6, 2),
        (torch.bfloat16, 1, 9, 3, 9),
        (torch.float32, 4, 2, 3, 7),
    ],
    ids=str,
)


def planes_of(
    T: int,
    num_pages: int,
    num_lines: int,
    dtype: torch.dtype,
    *,
    C: int = 10,
    taps: int = 3,
    channel_major: bool = False,
) -> Planes:
    """Build planes full of random bit patterns, units longer than their payload."""
    payload = 2 * 4 * 8
    state_pool = torch.randint(-(2**15), 2**15, (T, num_pages, payload + 8), dtype=torch.int16)
    conv_pool = torch.randint(-(2**15), 2**15, (T, num_lines, taps * C + 6), dtype=torch.int16)
    if dtype == torch.float32:
        state_pool, conv_pool = state_pool.int() * 40503, conv_pool.int() * 40503
    lines = conv_pool.view(dtype)[:, :, : taps * C]
    conv = lines.unflatten(2, (C, taps)).transpose(2, 3) if channel_major else lines.unflatten(2, (taps, C))
    return Planes(state_pool.view(dtype)[:, :, :payload].unflatten(2, (2, 4, 8)), conv)


def copy_planes(planes: Planes) -> Planes:
    return Planes(*(None if part is None else copy_of(part) for part in planes))


def checkpoints_of(batch: int, G: int, M: int, num_pages: int, num_lines: int) -> tuple[Checkpoints, Checkpoints]:
    """Return distinct source and destination checkpoints; row 1 has no source, row 2 no destination."""
    src, dst = tables(batch, G * M, num_pages, kinds=("moved", "new", "score"))
    src_line, dst_line = tables(batch, G, num_lines, kinds=("moved", "new", "score"))
    return Checkpoints(src.view(batch, G, M), src_line), Checkpoints(dst.view(batch, G, M), dst_line)


def arena_of(planes: Planes, num_layers: int, batch: int, M: int) -> Arena:
    """Build an arena full of NaN."""
    assert planes.state is not None
    assert planes.conv is not None
    heads, P, N = planes.state.shape[2:]
    state = torch.full((num_layers, batch, M * heads, P, N), NAN, dtype=planes.state.dtype)
    taps, C = planes.conv.shape[2:]
    conv = torch.full((num_layers, batch, taps, C), NAN, dtype=planes.conv.dtype)
    if planes.conv.stride(-1) != 1:
        conv = conv.transpose(2, 3).contiguous().transpose(2, 3)
    return Arena(state, conv)


@SHAPES
def test_gather_equals_the_oracle(dtype: torch.dtype, T: int, G: int, M: int, num_layers: int) -> None:
    torch.manual_seed(G)
    planes = planes_of(T, 7 * G * M, 7 * G, dtype)
    src, _ = checkpoints_of(3, G, M, 7 * G * M, 7 * G)
    arena, expected = (arena_of(planes, num_layers, 3, M) for _ in range(2))
    before = copy_planes(planes)
    state_gather(planes, src, arena)
    reference.state_gather(planes, src, expected)
    for mine, theirs in zip((*arena, *planes), (*expected, *before), strict=True):
        assert same_bits(mine, theirs)


@SHAPES
def test_scatter_equals_the_oracle(dtype: torch.dtype, T: int, G: int, M: int, num_layers: int) -> None:
    torch.manual_seed(G)
    planes = planes_of(T, 7 * G * M, 7 * G, dtype)
    src, dst = checkpoints_of(3, G, M, 7 * G * M, 7 * G)
    arena = arena_of(planes, num_layers, 3, M)
    state_gather(planes, src, arena)
    expected = copy_planes(planes)
    state_scatter(arena, planes, dst)
    reference.state_scatter(arena, expected, dst)
    for mine, theirs in zip(planes, expected, strict=True):
        assert same_bits(mine, theirs)


@SHAPES
def test_copy_equals_the_oracle(dtype: torch.dtype, T: int, G: int, M: int, num_layers: int) -> None:
    torch.manual_seed(G)
    planes = planes_of(T, 7 * G * M, 7 * G, dtype)
    src, dst = checkpoints_of(3, G, M, 7 * G * M, 7 * G)
    expected = copy_planes(planes)
    state_copy(planes, src, dst, num_layers=num_layers)
    reference.state_copy(expected, src, dst, num_layers)
    for mine, theirs in zip(planes, expected, strict=True):
        assert same_bits(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("channel_major", [False, True], ids=["tap-major", "channel-major"])
def test_gather_then_scatter_is_the_identity(dtype: torch.dtype, channel_major: bool) -> None:
    torch.manual_seed(0)
    planes = planes_of(4, 30, 30, dtype, channel_major=channel_major)
    members = torch.randperm(30)[:24].to(torch.int32).view(4, 2, 3)
    ids = Checkpoints(members, torch.randperm(30)[:8].to(torch.int32).view(4, 2))
    arena, before = arena_of(planes, 8, 4, 3), copy_planes(planes)
    state_gather(planes, ids, arena)
    assert planes.state is not None
    assert planes.conv is not None
    for page in members.flatten().tolist():
        planes.state[:, page] = NAN
    for line in ids.lines.flatten().tolist() if ids.lines is not None else ():
        planes.conv[:, line] = NAN
    assert not same_bits(planes.state, before.state)
    state_scatter(arena, planes, ids)
    for mine, theirs in zip(planes, before, strict=True):
        assert same_bits(mine, theirs)


@pytest.mark.parametrize(("C", "taps"), [(5, 1), (7, 3), (640, 3)])
def test_lines_of_odd_and_of_many_elements(C: int, taps: int) -> None:
    """An odd bfloat16 payload is moved in 2-byte words, a payload of 1,920 elements by one program of 1,024 words."""
    torch.manual_seed(1)
    planes = planes_of(2, 30, 30, torch.bfloat16, C=C, taps=taps)
    src, dst = checkpoints_of(3, 1, 3, 30, 30)
    expected = copy_planes(planes)
    state_copy(planes, src, dst)
    reference.state_copy(expected, src, dst, 2)
    for mine, theirs in zip(planes, expected, strict=True):
        assert same_bits(mine, theirs)


@pytest.mark.parametrize("part", ["state", "conv"])
def test_one_part_can_be_moved_alone(part: str) -> None:
    """Slab migration moves conv lines only."""
    torch.manual_seed(2)
    full = planes_of(4, 30, 30, torch.bfloat16)
    src, dst = checkpoints_of(3, 1, 3, 30, 30)
    if part == "conv":
        planes, src, dst = full._replace(state=None), src._replace(members=None), dst._replace(members=None)
    else:
        planes, src, dst = full._replace(conv=None), src._replace(lines=None), dst._replace(lines=None)
    before, expected = copy_planes(full), copy_planes(planes)
    state_copy(planes, src, dst)
    reference.state_copy(expected, src, dst, 4)
    for mine, theirs, untouched in zip(full, expected, before, strict=True):
        assert same_bits(mine, untouched if theirs is None else theirs)


def test_members_of_falcon_h1_7b_take_32_programs_each() -> None:
    """512 KiB members and 21 KiB lines: several programs per unit, the last one of a line partly masked."""
    torch.manual_seed(3)
    state = torch.randint(-(2**15), 2**15, (1, 8, 8, 128, 256), dtype=torch.int16).view(torch.bfloat16)
    conv = torch.randint(-(2**15), 2**15, (1, 4, 16384), dtype=torch.int16).view(torch.bfloat16)
    planes = Planes(state, conv[:, :, : 3 * 3584].unflatten(2, (3, 3584)))
    src = Checkpoints(torch.tensor([[[1, 3, 5]]], dtype=torch.int32), torch.tensor([[2]], dtype=torch.int32))
    dst = Checkpoints(torch.tensor([[[0, 7, 2]]], dtype=torch.int32), torch.tensor([[0]], dtype=torch.int32))
    expected = copy_planes(planes)
    state_copy(planes, src, dst)
    reference.state_copy(expected, src, dst, 1)
    for mine, theirs in zip(planes, expected, strict=True):
        assert same_bits(mine, theirs)
