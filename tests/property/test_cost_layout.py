"""Properties of layouts: exact strides, every layer once, no overlap, least-waste planes, honest refusals."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_hybrid.errors import SettingError
from sgl_hybrid.memory import ORGANIZATIONS, StateGeometry, layout_for
from sgl_hybrid.memory.organization import ConvPlacement
from tests.strategies import geometries, layout_or_skip, presets

ORGS = st.sampled_from(sorted(ORGANIZATIONS))
PAGES = st.integers(1, 80).map(lambda n: 16 * n)


@given(geometry=st.one_of(geometries(), presets()), org=ORGS, page_tokens=PAGES, planes=st.integers(1, 50))
def test_a_layout_is_exact_or_refused(geometry: StateGeometry, org: str, page_tokens: int, planes: int) -> None:
    layout = layout_or_skip(org, geometry, page_tokens=page_tokens, planes=planes)
    assert layout.members * layout.heads_per_member == geometry.ssm_heads
    assert layout.heads_per_member * geometry.head_bytes <= layout.recurrent_page_bytes
    assert layout.slots_per_slab * layout.conv_stride_bytes == layout.recurrent_page_bytes
    assert layout.conv_base_bytes + layout.conv_slot_bytes <= layout.conv_stride_bytes
    assert layout.tokens_per_page_pitch * geometry.kv_token_bytes == layout.attention_page_bytes
    assert layout.page_tokens <= layout.tokens_per_page_pitch
    assert layout.checkpoint_interval % layout.page_tokens == 0
    itemsizes = (geometry.kv_itemsize, geometry.ssm_itemsize, geometry.conv_itemsize)
    for stride in (layout.recurrent_page_bytes, layout.conv_stride_bytes):
        assert all(stride % size == 0 for size in itemsizes)


@given(geometry=geometries(), org=ORGS, planes=st.integers(1, 50))
def test_planes_and_groups_cover_every_layer_exactly_once(geometry: StateGeometry, org: str, planes: int) -> None:
    layout = layout_or_skip(org, geometry, planes=planes)
    attention = [layout.attention_slot(layer) for layer in geometry.attention_layers]
    recurrent = [(a.group, a.plane) for a in map(layout.recurrent_slot, geometry.recurrent_layers)]
    for slots, groups, width in (
        (attention, layout.attention_groups, layout.attention_planes),
        (recurrent, layout.groups, layout.recurrent_planes),
    ):
        assert len(set(slots)) == len(slots)
        assert set(slots) <= set(itertools.product(range(groups), range(width)))
        assert {group for group, _ in slots} == set(range(groups))


@given(geometry=geometries(), org=ORGS, planes=st.integers(1, 50))
def test_no_two_states_of_a_checkpoint_share_a_byte(geometry: StateGeometry, org: str, planes: int) -> None:
    layout = layout_or_skip(org, geometry, planes=planes)
    page_bytes = layout.recurrent_page_bytes
    # Pages 0 .. G*M-1 are members; inside a composite the conv line is the member page, else the next page's slot 0.
    used: dict[int, list[tuple[int, int]]] = {}
    for layer in geometry.recurrent_layers:
        address = layout.recurrent_slot(layer)
        spans = used.setdefault(address.plane, [])
        for member in range(layout.members):
            start = (address.first_member + member) * page_bytes
            spans.append((start, start + layout.heads_per_member * geometry.head_bytes))
        inside = layout.conv_placement is ConvPlacement.INSIDE
        line = address.conv_column if inside else layout.member_pages * layout.slots_per_slab
        start = line * layout.conv_stride_bytes + address.conv_offset_bytes
        spans.append((start, start + geometry.conv_bytes))
    for spans in used.values():
        spans.sort()
        assert all(first_end <= start for (_, first_end), (start, _) in itertools.pairwise(spans))


@given(geometry=geometries(), planes=st.integers(1, 50))
def test_default_planes_are_least_waste(geometry: StateGeometry, planes: int) -> None:
    def pages(count: int) -> float:
        groups = math.ceil(len(geometry.recurrent_layers) / count)
        if groups * geometry.conv_bytes > 512 * geometry.kv_token_bytes:
            return math.inf
        members = math.ceil(geometry.ssm_bytes / (512 * geometry.kv_token_bytes))
        return count * (math.ceil(len(geometry.attention_layers) / count) + groups * members)

    assert pages(geometry.planes) <= pages(planes)


@pytest.mark.parametrize("org", sorted(ORGANIZATIONS))
@given(geometry=geometries(), page_tokens=PAGES)
def test_a_refusal_names_pages_that_fit(org: str, geometry: StateGeometry, page_tokens: int) -> None:
    try:
        layout_for(org, geometry, page_tokens=page_tokens)
    except SettingError as error:
        if "nearest that fit: " in str(error):
            for near in str(error).split("nearest that fit: ")[1].split(", "):
                assert layout_for(org, geometry, page_tokens=int(near)).page_tokens == int(near)
