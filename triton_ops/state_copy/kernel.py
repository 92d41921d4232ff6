"""Triton kernel that copies checkpoints between pages and a contiguous arena, as machine words.

The grid is (chunks of a checkpoint, rows, layers): the first programs of a checkpoint move its M members, the last its
conv line, 16 KiB each. A side with ids is paged: the unit is looked up and lies in plane layer % T. A side without ids
is dense: the unit is the row (times M, plus the member) and lies in the layer itself.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from triton_ops.launch import Launch
from triton_ops.state_copy.layout import Arena, Checkpoints, Planes

CHUNK_BYTES = 16384


@triton.jit
def _move(
    source,
    target,
    src_ids,
    dst_ids,
    row,
    layer,
    member,
    first_word,
    SRC_LAYER: tl.constexpr,
    SRC_UNIT: tl.constexpr,
    SRC_ROW: tl.constexpr,
    SRC_GROUP: tl.constexpr,
    DST_LAYER: tl.constexpr,
    DST_UNIT: tl.constexpr,
    DST_ROW: tl.constexpr,
    DST_GROUP: tl.constexpr,
    NUM_PLANES: tl.constexpr,
    UNITS_PER_ROW: tl.constexpr,
    WORDS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    plane = layer % NUM_PLANES
    group = layer // NUM_PLANES
    if src_ids is None:
        src = row * UNITS_PER_ROW + member
        source += layer * SRC_LAYER + src * SRC_UNIT + first_word
    else:
        src = tl.load(src_ids + row * SRC_ROW + group * SRC_GROUP + member).to(tl.int64)
        source += plane * SRC_LAYER + src * SRC_UNIT + first_word
    if dst_ids is None:
        dst = row * UNITS_PER_ROW + member
        target += layer * DST_LAYER + dst * DST_UNIT + first_word
    else:
        dst = tl.load(dst_ids + row * DST_ROW + group * DST_GROUP + member).to(tl.int64)
        target += plane * DST_LAYER + dst * DST_UNIT + first_word
    i = tl.arange(0, CHUNK)
    write = (first_word + i < WORDS) & (dst >= 0)
    words = tl.load(source + i, mask=write & (src >= 0), other=0)
    tl.store(target + i, words, mask=write)


@triton.jit(do_not_specialize_on_alignment=["src_members", "dst_members", "src_lines", "dst_lines"])
def _state_copy_kernel(
    src_state,
    dst_state,
    src_members,
    dst_members,
    src_conv,
    dst_conv,
    src_lines,
    dst_lines,
    SRC_LAYER: tl.constexpr,
    SRC_UNIT: tl.constexpr,
    SRC_ROW: tl.constexpr,
    SRC_GROUP: tl.constexpr,
    DST_LAYER: tl.constexpr,
    DST_UNIT: tl.constexpr,
    DST_ROW: tl.constexpr,
    DST_GROUP: tl.constexpr,
    CONV_SRC_LAYER: tl.constexpr,
    CONV_SRC_UNIT: tl.constexpr,
    CONV_SRC_ROW: tl.constexpr,
    CONV_SRC_GROUP: tl.constexpr,
    CONV_DST_LAYER: tl.constexpr,
    CONV_DST_UNIT: tl.constexpr,
    CONV_DST_ROW: tl.constexpr,
    CONV_DST_GROUP: tl.constexpr,
    NUM_PLANES: tl.constexpr,
    M: tl.constexpr,
    MEMBER_WORDS: tl.constexpr,
    MEMBER_CHUNK: tl.constexpr,
    MEMBER_PROGRAMS: tl.constexpr,
    LINE_WORDS: tl.constexpr,
    LINE_CHUNK: tl.constexpr,
    LINE_PROGRAMS: tl.constexpr,
):
    program = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    layer = tl.program_id(2).to(tl.int64)
    if program < M * MEMBER_PROGRAMS:
        if MEMBER_PROGRAMS > 0:
            _move(
                src_state,
                dst_state,
                src_members,
                dst_members,
                row,
                layer,
                program // MEMBER_PROGRAMS,
                (program % MEMBER_PROGRAMS) * MEMBER_CHUNK,
                SRC_LAYER,
                SRC_UNIT,
                SRC_ROW,
                SRC_GROUP,
                DST_LAYER,
                DST_UNIT,
                DST_ROW,
                DST_GROUP,
                NUM_PLANES,
                M,
                MEMBER_WORDS,
                MEMBER_CHUNK,
            )
    else:
        if LINE_PROGRAMS > 0:
            _move(
                src_conv,
                dst_conv,
                src_lines,
                dst_lines,
                row,
                layer,
                0,
                (program - M * MEMBER_PROGRAMS) * LINE_CHUNK,
                CONV_SRC_LAYER,
                CONV_SRC_UNIT,
                CONV_SRC_ROW,
                CONV_SRC_GROUP,
                CONV_DST_LAYER,
                CONV_DST_UNIT,
                CONV_DST_ROW,
                CONV_DST_GROUP,
                NUM_PLANES,
                1,
                LINE_WORDS,
                LINE_CHUNK,
            )


class _Part(NamedTuple):
    """Members or conv lines of one copy: word views `[layers, units, words]` and the ids of the paged sides."""

    source: torch.Tensor
    target: torch.Tensor
    src_ids: torch.Tensor | None
    dst_ids: torch.Tensor | None
    units_per_row: int

    def strides(self) -> list[int]:
        """Layer, unit, row and group stride of the source, then of the target."""
        values: list[int] = []
        for words, ids in ((self.source, self.src_ids), (self.target, self.dst_ids)):
            values += [*words.stride()[:2], *((0, 0) if ids is None else ids.stride()[:2])]
        return values

    def chunks(self) -> tuple[int, int, int]:
        """Words of a unit, words of a program, programs of a unit."""
        words = self.source.shape[2]
        chunk = min(CHUNK_BYTES // self.source.element_size(), triton.next_power_of_2(words))
        return words, chunk, triton.cdiv(words, chunk)


def prepare_gather(planes: Planes, src: Checkpoints, arena: Arena) -> Launch:
    """Return the launch of `api.state_gather` for arguments that satisfy its contract."""
    return _prepare(planes, arena, src, Checkpoints(None, None), _first(arena).shape[0])


def prepare_scatter(arena: Arena, planes: Planes, dst: Checkpoints) -> Launch:
    """Return the launch of `api.state_scatter` for arguments that satisfy its contract."""
    return _prepare(arena, planes, Checkpoints(None, None), dst, _first(arena).shape[0])


def prepare_copy(planes: Planes, src: Checkpoints, dst: Checkpoints, num_layers: int) -> Launch:
    """Return the launch of `api.state_copy` for arguments that satisfy its contract."""
    return _prepare(planes, planes, src, dst, num_layers)


def _prepare(
    source: Planes | Arena, target: Planes | Arena, src: Checkpoints, dst: Checkpoints, num_layers: int
) -> Launch:
    paged = source if isinstance(source, Planes) else target
    ids = src if isinstance(source, Planes) else dst
    state = conv = None
    if source.state is not None and target.state is not None and paged.state is not None and ids.members is not None:
        elements, M = paged.state[0, 0].numel(), ids.members.shape[2]
        state = _part(source.state, target.state, src.members, dst.members, elements, M)
    if source.conv is not None and target.conv is not None and paged.conv is not None:
        conv = _part(source.conv, target.conv, src.lines, dst.lines, paged.conv[0, 0].numel(), 1)

    M = 0 if state is None else state.units_per_row
    words, chunk, programs = (0, 1, 0) if state is None else state.chunks()
    line_words, line_chunk, line_programs = (0, 1, 0) if conv is None else conv.chunks()
    strides = (0,) * 8
    values = [
        *(strides if state is None else state.strides()),
        *(strides if conv is None else conv.strides()),
        *(_first(paged).shape[0], M, words, chunk, programs, line_words, line_chunk, line_programs),
    ]
    names = [name for name in _state_copy_kernel.arg_names if name.isupper()]
    args: tuple[torch.Tensor | None, ...] = (
        *((None,) * 4 if state is None else state[:4]),
        *((None,) * 4 if conv is None else conv[:4]),
    )
    grid = (M * programs + line_programs, _first(ids).shape[0], num_layers)
    return Launch(_state_copy_kernel, grid, args, dict(zip(names, values, strict=True)), num_warps=4)


def _part(
    source: torch.Tensor,
    target: torch.Tensor,
    src_ids: torch.Tensor | None,
    dst_ids: torch.Tensor | None,
    elements: int,
    units_per_row: int,
) -> _Part:
    """View both sides as the widest words that divide every size and stride: 4 bytes, or else one element."""
    sides = [_units(source, src_ids, elements, units_per_row), _units(target, dst_ids, elements, units_per_row)]
    word = torch.int32 if sides[0].element_size() == 4 or all(map(_is_even, sides)) else torch.int16
    return _Part(sides[0].view(word), sides[1].view(word), src_ids, dst_ids, units_per_row)


def _units(tensor: torch.Tensor, ids: torch.Tensor | None, elements: int, units_per_row: int) -> torch.Tensor:
    """View one side as `[layers, units, elements]`: pages or lines of a plane, or the rows of a dense layer."""
    if ids is not None:
        return tensor.as_strided((*tensor.shape[:2], elements), (*tensor.stride()[:2], 1))
    units = tensor.shape[1] * units_per_row
    return tensor.as_strided((tensor.shape[0], units, elements), (units * elements, elements, 1))


def _is_even(side: torch.Tensor) -> bool:
    """Tell whether pairs of elements are aligned words in every unit."""
    return all(n % 2 == 0 for n in (*side.stride()[:2], side.shape[2], side.storage_offset()))


def _first(parts: Planes | Arena | Checkpoints) -> torch.Tensor:
    return next(part for part in parts if part is not None)
