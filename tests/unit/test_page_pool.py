"""Device storage: no unit shares a byte with another, views follow the layout's addresses, tables follow the store."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import pytest
import torch

from bench.nano import MODELS
from sgl_hybrid.memory import ORGANIZATIONS, Layout, StateGeometry, layout_for
from sgl_hybrid.memory.checkpoints import CheckpointStore
from sgl_hybrid.memory.page_pool import PagePool
from sgl_hybrid.memory.pages import PageAllocator, PageKind
from sgl_hybrid.memory.presets import model_geometry
from tests.tiny_layouts import tiny_layout
from triton_ops.state_copy.api import state_copy, state_gather, state_scatter
from triton_ops.state_copy.layout import Arena, Checkpoints, Planes

ORGS = sorted(ORGANIZATIONS)
DTYPES = {1: torch.float8_e4m3fn, 2: torch.bfloat16, 4: torch.float32}
INK = 0x55


def nano_geometry(name: str, **dtypes: str) -> StateGeometry:
    return StateGeometry.from_config(MODELS[name].config, **dtypes)


LAYOUTS = {
    **{f"{name}-{org}": layout_for(org, nano_geometry(name)) for name in sorted(MODELS) for org in ORGS},
    **{
        f"mixed-{org}": layout_for(org, nano_geometry("falcon-h1-nano", kv_dtype="fp8_e4m3", ssm_dtype="float32"))
        for org in ORGS
    },
    **{f"groups-{org}": tiny_layout(org, groups=3, members=3, attention_layers=2) for org in ORGS},
}
ALL_LAYOUTS = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


class Rig(NamedTuple):
    """A pool with its host side. D0 counts attention pages apart."""

    layout: Layout
    attention: PageAllocator
    store: CheckpointStore
    pool: PagePool


def make_rig(layout: Layout, num_checkpoints: int = 6, device: str = "cpu") -> Rig:
    num_pages = 4 + (layout.member_pages + 1) * num_checkpoints
    attention = PageAllocator(num_pages)
    store = CheckpointStore(layout, attention if layout.shared else PageAllocator(num_checkpoints))
    return Rig(layout, attention, store, make_pool(layout, num_pages, store.num_virtual, device=device))


def make_pool(
    layout: Layout, num_pages: int, num_virtual: int, *, device: str = "cpu", **dtypes: torch.dtype
) -> PagePool:
    geometry = layout.geometry
    chosen = {
        "kv_dtype": DTYPES[geometry.kv_itemsize],
        "ssm_dtype": DTYPES[geometry.ssm_itemsize],
        "conv_dtype": DTYPES[geometry.conv_itemsize],
    }
    return PagePool(
        layout,
        num_pages,
        num_virtual=num_virtual,
        device=device,
        num_composites=None if layout.shared else num_virtual,
        **(chosen | dtypes),
    )


def ink(dtype: torch.dtype, byte: int = INK) -> torch.Tensor:
    """Return one element whose bytes are all `byte`."""
    return torch.full((dtype.itemsize,), byte, dtype=torch.uint8).view(dtype)


def checkpoint_views(rig: Rig, v: int) -> Iterator[torch.Tensor]:
    """Yield the member pages and the conv state of every recurrent layer of v, addressed through the device tables."""
    for layer in rig.layout.geometry.recurrent_layers:
        address = rig.layout.recurrent_slot(layer)
        for member in range(rig.layout.members):
            page = int(rig.pool.member_table[v, address.first_member + member])
            yield rig.pool.ssm_members(layer)[page]
        yield rig.pool.conv_lines(layer)[int(rig.pool.conv_line[v, address.conv_column])]


def block_views(rig: Rig, pages: list[int]) -> Iterator[torch.Tensor]:
    """Yield K and V of every token of a block in every attention layer; `pages` has one page per attention group."""
    pitch, tokens = rig.layout.tokens_per_page_pitch, rig.layout.page_tokens
    for layer in rig.layout.geometry.attention_layers:
        first = pages[rig.layout.attention_slot(layer)[0]] * pitch
        yield rig.pool.key_rows(layer)[first : first + tokens]
        yield rig.pool.value_rows(layer)[first : first + tokens]


def fill(views: Iterator[torch.Tensor], byte: int = INK) -> None:
    for view in views:
        view.copy_(ink(view.dtype, byte).expand(view.shape))


def storage(pool: PagePool) -> torch.Tensor:
    """Return a copy of all bytes of all planes."""
    pools = [pool.attention_planes] if pool.layout.shared else [pool.attention_planes, pool.recurrent_planes]
    return torch.cat([planes.flatten() for planes in pools])


@ALL_LAYOUTS
def test_no_two_checkpoints_or_blocks_share_a_byte(layout: Layout) -> None:
    rig = make_rig(layout)
    checkpoints = rig.store.allocate_many(4)
    blocks = [rig.attention.take(PageKind.ATTENTION, layout.attention_groups) for _ in range(2)]
    rig.pool.update_tables(rig.store)
    geometry = layout.geometry
    used = torch.zeros(rig.pool.state_bytes, dtype=torch.int32)
    for views in [*(checkpoint_views(rig, v) for v in checkpoints), *(block_views(rig, block) for block in blocks)]:
        before = storage(rig.pool)
        fill(views)
        used += storage(rig.pool) != before
    assert int(used.max()) == 1
    checkpoint_bytes = len(geometry.recurrent_layers) * geometry.composite_bytes
    block_bytes = len(geometry.attention_layers) * layout.block_bytes
    assert int(used.sum()) == 4 * checkpoint_bytes + 2 * block_bytes
    assert not rig.pool.attention_planes[:, 0].any()
    assert not rig.pool.recurrent_planes[:, 0].any()


@ALL_LAYOUTS
def test_b24_poisoned_freed_units_change_nothing_that_is_held(layout: Layout) -> None:
    rig = make_rig(layout)
    kept, other, freed = rig.store.allocate_many(3)
    blocks = [rig.attention.take(PageKind.ATTENTION, layout.attention_groups) for _ in range(2)]
    rig.pool.update_tables(rig.store)
    fill(itertools.chain(checkpoint_views(rig, kept), checkpoint_views(rig, other), block_views(rig, blocks[0])))
    before = storage(rig.pool)
    rig.attention.give_back(blocks[1])
    rig.pool.poison(attention_pages=blocks[1])
    lines, pages = rig.store.conv_row(freed), rig.store.pages_of(freed)
    rig.pool.poison(recurrent_pages=rig.store.free(freed), conv_lines=lines)
    after = storage(rig.pool)
    assert bool((after != before).any())
    held = before == INK
    assert torch.equal(after[held], before[held])
    # The next owner of these units finds NaN until it writes.
    again = rig.store.allocate()
    rig.pool.update_tables(rig.store)
    assert set(rig.store.pages_of(again)) == set(pages)
    assert all(bool(view.float().isnan().all()) for view in checkpoint_views(rig, again))
    assert all(bool(view.float().isfinite().all()) for view in checkpoint_views(rig, kept))


@ALL_LAYOUTS
def test_views_start_at_the_layouts_addresses(layout: Layout) -> None:
    """The address rules written out in bytes, for pages beyond 8,192 in planes that exist only as shapes."""
    num_pages = 9_000
    pool = make_pool(layout, num_pages, num_virtual=num_pages, device="meta")
    geometry, page = layout.geometry, 8_999

    def offset(view: torch.Tensor) -> int:
        return int(view.storage_offset()) * view.element_size()

    for layer in geometry.attention_layers:
        plane = layout.attention_slot(layer)[1] * (num_pages + 1) * layout.attention_page_bytes
        row = page * layout.tokens_per_page_pitch + 7
        token = plane + page * layout.attention_page_bytes + 7 * geometry.kv_token_bytes
        assert offset(pool.key_rows(layer)[row]) == token
        assert offset(pool.value_rows(layer)[row]) == token + geometry.kv_token_bytes // 2
        assert pool.key_rows(layer).shape == (pool.num_token_rows, geometry.kv_heads, geometry.head_dim)
    for layer in geometry.recurrent_layers:
        address = layout.recurrent_slot(layer)
        plane = address.plane * (num_pages + 1) * layout.recurrent_page_bytes
        head = layout.heads_per_member - 1
        wanted = plane + page * layout.recurrent_page_bytes + head * geometry.head_bytes
        assert offset(pool.ssm_members(layer)[page, head]) == wanted
        line = page * layout.slots_per_slab + layout.slots_per_slab - 1
        wanted = plane + line * layout.conv_stride_bytes + address.conv_offset_bytes
        assert offset(pool.conv_lines(layer)[line]) == wanted
        assert pool.conv_lines(layer).shape[1:] == (geometry.conv_channels, geometry.d_conv - 1)
        assert pool.conv_lines(layer)[line].is_contiguous()


def test_b31_offsets_of_the_real_model_pass_two_to_the_31() -> None:
    layout = layout_for("s2", model_geometry("falcon-h1-7b"))
    pool = make_pool(layout, 10_000, num_virtual=3_000, device="meta")
    member, line = pool.ssm_members(43)[9_999], pool.conv_lines(43)[16 * 9_999 + 15]
    assert member.storage_offset() == (43 * 10_001 + 9_999) * 262_144
    assert line.storage_offset() == ((43 * 10_001 + 9_999) * 16 + 15) * 16_384
    assert pool.ssm_members(0)[9_999].storage_offset() > 2**31


def test_b31_units_with_ids_above_8192_keep_to_themselves() -> None:
    layout = tiny_layout("s2")
    pages = PageAllocator(9_000)
    store = CheckpointStore(layout, pages)
    pages.take(PageKind.ATTENTION, 8_500)
    pool = make_pool(layout, 9_000, store.num_virtual)
    rig = Rig(layout, pages, store, pool)
    checkpoints = store.allocate_many(8)
    assert min(store.member_row(checkpoints[0])) > 8_192
    assert pool.update_tables(store) == 8
    for number, v in enumerate(checkpoints, start=1):
        fill(checkpoint_views(rig, v), number)
    for number, v in enumerate(checkpoints, start=1):
        assert all(bool((view.contiguous().view(torch.uint8) == number).all()) for view in checkpoint_views(rig, v))
    assert int((pool.recurrent_planes != 0).sum()) == 8 * layout.geometry.composite_bytes


@pytest.mark.parametrize("org", ORGS)
def test_tables_follow_the_store_and_only_dirty_rows_are_written(org: str) -> None:
    rig = make_rig(tiny_layout(org, groups=2))
    pool, store = rig.pool, rig.store
    assert pool.member_table.shape == (store.num_virtual + 1, rig.layout.member_pages)
    assert pool.conv_line.shape == (store.num_virtual + 1, rig.layout.conv_columns)
    assert pool.member_table.dtype == pool.conv_line.dtype == torch.int32
    ids = store.allocate_many(3)
    assert bool((pool.member_table[1:] == -1).all())
    assert pool.update_tables(store) == 3
    assert pool.update_tables(store) == 0
    store.free(ids[1])
    pool.member_table[ids[0]] = 99
    assert pool.update_tables(store) == 1
    assert pool.member_table[ids[0]].tolist() == [99] * rig.layout.member_pages
    pool.member_table[ids[0]] = torch.tensor(store.member_row(ids[0]))
    for v in range(store.num_virtual + 1):
        assert tuple(pool.member_table[v].tolist()) == store.member_row(v)
        assert tuple(pool.conv_line[v].tolist()) == store.conv_row(v)
    assert pool.member_table[0].tolist() == [0] * rig.layout.member_pages


def copy_parts(pool: PagePool, ids: list[int]) -> Iterator[tuple[Planes, Checkpoints]]:
    """Yield the launches that copy checkpoints: members of all groups at once, conv states group by group."""
    layout = pool.layout
    members = pool.member_table[ids].unflatten(1, (layout.groups, layout.members))
    yield Planes(pool.member_planes(), None), Checkpoints(members, None)
    for group in range(layout.groups):
        column = group if layout.conv_columns > 1 else 0
        lines = pool.conv_line[ids][:, column : column + 1]
        yield Planes(None, pool.conv_planes(group).transpose(2, 3)), Checkpoints(None, lines)


@ALL_LAYOUTS
def test_the_copy_kernels_take_the_pools_views_and_tables(layout: Layout) -> None:
    rig = make_rig(layout)
    first, second, third = rig.store.allocate_many(3)
    rig.pool.update_tables(rig.store)
    for v, byte in ((first, 0x11), (second, 0x22), (third, 0x33)):
        fill(checkpoint_views(rig, v), byte)
    sources, targets = copy_parts(rig.pool, [first]), copy_parts(rig.pool, [second])
    for (planes, src), (_, dst) in zip(sources, targets, strict=True):
        state_copy(planes, src, dst)
    for planes, ids in copy_parts(rig.pool, [second]):
        arena = arena_for(planes, layout)
        state_gather(planes, ids, arena)
        for part in arena:
            assert part is None or bool((part.contiguous().view(torch.uint8) == 0x11).all())
            if part is not None:
                part.copy_(ink(part.dtype, 0x44).expand(part.shape))
        state_scatter(arena, planes, ids)
    for v, byte in ((first, 0x11), (second, 0x44), (third, 0x33)):
        for view in checkpoint_views(rig, v):
            assert bool((view.contiguous().view(torch.uint8) == byte).all())


def arena_for(planes: Planes, layout: Layout) -> Arena:
    if planes.state is not None:
        heads, dim, width = planes.state.shape[2:]
        layers = planes.state.shape[0] * layout.groups
        return Arena(planes.state.new_empty((layers, 1, layout.members * heads, dim, width)), None)
    assert planes.conv is not None
    num_planes, _, taps, channels = planes.conv.shape
    return Arena(None, planes.conv.new_empty((num_planes, 1, channels, taps)).transpose(2, 3))


def test_a_dtype_or_stride_that_does_not_fit_is_refused() -> None:
    layout = tiny_layout("s2")
    with pytest.raises(ValueError, match=r"kv_dtype: expected a dtype of 2 bytes, got torch.float32 of 4"):
        make_pool(layout, 8, 2, kv_dtype=torch.float32)
    with pytest.raises(ValueError, match=r"ssm_dtype: expected a dtype of 2 bytes, got torch.float32 of 4"):
        make_pool(layout, 8, 2, ssm_dtype=torch.float32)
    odd = msgspec.structs.replace(layout, conv_base_bytes=3)
    with pytest.raises(ValueError, match="conv_dtype: expected strides and offsets in multiples of 2 bytes, got 3"):
        make_pool(odd, 8, 2)
    odd = msgspec.structs.replace(layout, recurrent_page_bytes=511, slots_per_slab=1, conv_stride_bytes=512)
    with pytest.raises(ValueError, match="ssm_dtype: expected strides and offsets in multiples of 2 bytes, got 511"):
        make_pool(odd, 8, 2)


def test_sizes_and_stores_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="expected num_pages >= 1, got 0"):
        make_pool(tiny_layout("s2"), 0, 2)
    same = dict.fromkeys(("kv_dtype", "ssm_dtype", "conv_dtype"), torch.bfloat16)
    with pytest.raises(ValueError, match=r"expected num_composites \(two pools\) for d0, got None"):
        PagePool(tiny_layout("d0"), 8, num_virtual=2, device="cpu", **same)
    with pytest.raises(ValueError, match=r"expected no num_composites \(one shared pool\) for s2, got 4"):
        PagePool(tiny_layout("s2"), 8, num_virtual=2, device="cpu", num_composites=4, **same)
    rig = make_rig(tiny_layout("s2"))
    with pytest.raises(ValueError, match=f"expected a store of {rig.pool.num_virtual} ids, got 1"):
        rig.pool.update_tables(CheckpointStore(rig.layout, PageAllocator(9), num_virtual=1))
    with pytest.raises(ValueError, match="expected a group from 0 to 0, got 1"):
        rig.pool.conv_planes(1)
    with pytest.raises(ValueError, match="expected a layer with attention state"):
        rig.pool.key_rows(1)


def test_the_allocators_load_no_torch() -> None:
    code = "import sys, sgl_hybrid.memory.checkpoints; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
