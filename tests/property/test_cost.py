"""Properties of layouts, cost, capacity and budgets over drawn geometries and published models."""

from __future__ import annotations

import itertools
import math

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sgl_hybrid.errors import SettingError
from sgl_hybrid.memory import ORGANIZATIONS, Layout, StateGeometry, Units, layout_for, parse_budget, plan_units
from sgl_hybrid.memory.budget import minimum_budget
from sgl_hybrid.memory.cost import Mix, capacity, cost, fits, pool_fits
from sgl_hybrid.memory.organization import ConvPlacement
from sgl_hybrid.memory.split import auto_fraction, stranded_share
from tests.strategies import geometries, mixes, presets

ORGS = st.sampled_from(sorted(ORGANIZATIONS))
PAGES = st.integers(1, 80).map(lambda n: 16 * n)


def layout_or_skip(org: str, geometry: StateGeometry, **overrides: int) -> Layout:
    try:
        return layout_for(org, geometry, **overrides)
    except SettingError:
        assume(False)
        raise


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


@given(geometry=st.one_of(geometries(), presets()), org=ORGS, mix=mixes(), data=st.data())
def test_cost_is_monotone_in_every_count(geometry: StateGeometry, org: str, mix: Mix, data: st.DataObject) -> None:
    layout = layout_or_skip(org, geometry)
    base = cost(layout, mix).total_bytes
    for field in ("attention", "checkpoints", "requests"):
        more = msgspec.structs.replace(mix, **{field: getattr(mix, field) + data.draw(st.integers(1, 100))})
        assert cost(layout, more).total_bytes >= base
    if layout.conv_placement is ConvPlacement.SLAB:
        least = math.ceil(mix.checkpoints / layout.slots_per_slab)
        assert cost(layout, mix, slabs=least + 1).total_bytes > base == cost(layout, mix, slabs=least).total_bytes


@given(geometry=st.one_of(geometries(), presets()), org=ORGS, mix=mixes())
def test_allocation_covers_the_payload(geometry: StateGeometry, org: str, mix: Mix) -> None:
    result = cost(layout_or_skip(org, geometry), mix)
    assert result.payload_bytes <= result.total_bytes
    assert 0 <= result.efficiency <= 1


@given(geometry=st.one_of(geometries(), presets()), mix=mixes(least=1))
def test_packed_slots_never_cost_more_than_a_page_each(geometry: StateGeometry, mix: Mix) -> None:
    s1, s2 = layout_or_skip("s1", geometry), layout_or_skip("s2", geometry)
    slots = s2.slots_per_slab
    assert cost(s2, mix).total_bytes <= cost(s1, mix).total_bytes
    assert (cost(s2, mix).total_bytes < cost(s1, mix).total_bytes) == (slots > 1 and mix.checkpoints > 1)


@st.composite
def bought(draw: st.DrawFn) -> Units:
    """Draw an organization of a geometry and a budget, by size or by label, that buys some units."""
    geometry = draw(st.one_of(geometries(), presets()))
    layout = layout_or_skip(draw(ORGS), geometry)
    least = minimum_budget(layout, context_tokens=1, checkpoints_per_request=1).budget.total_bytes
    size = st.integers(least, 20 * least).map(str)
    budget = parse_budget(draw(st.one_of(size, st.integers(1, 200).map("b{}".format))), geometry)
    try:
        return plan_units(layout, budget)
    except SettingError:
        assume(False)
        raise


@given(units=bought())
def test_floored_units_stay_within_the_budget_and_waste_less_than_one_unit(units: Units) -> None:
    layout, budget = units.layout, units.budget
    if not layout.shared:
        assert units.total_bytes <= budget.total_bytes
        return
    one = layout.page_bytes * layout.planes
    if budget.nearest:
        assert 2 * abs(units.total_bytes - budget.total_bytes) <= one
    else:
        assert units.total_bytes <= budget.total_bytes < units.total_bytes + one


@given(units=bought(), mix=mixes())
def test_capacity_is_the_largest_feasible_integer(units: Units, mix: Mix) -> None:
    assume(mix.attention or mix.checkpoints)
    copies = capacity(units, mix)
    assert copies == 0 or fits(units, mix.times(copies))
    assert not fits(units, mix.times(copies + 1))


@given(units=bought(), mix=st.builds(Mix, attention=st.integers(0, 6), checkpoints=st.integers(1, 6)))
def test_capacity_equals_brute_force(units: Units, mix: Mix) -> None:
    def feasible(copies: int) -> bool:
        # Count units one by one, independently of the formulas.
        layout = units.layout
        blocks = -(-copies * mix.attention * 512 // layout.page_tokens)
        if not layout.shared:
            return blocks <= units.num_attention_pages and copies * mix.checkpoints <= units.num_checkpoints
        pages = blocks * layout.attention_groups
        for checkpoint in range(copies * mix.checkpoints):
            pages += layout.groups * layout.members
            if layout.conv_placement is not ConvPlacement.INSIDE:
                pages += checkpoint % layout.slots_per_slab == 0
        return pages <= units.num_pages

    brute = next(copies for copies in itertools.count() if not feasible(copies + 1))
    assert capacity(units, mix) == brute


@given(units=bought(), mix=mixes())
def test_dual_pools_bind_separately(units: Units, mix: Mix) -> None:
    pools = pool_fits(units, mix)
    assert fits(units, mix) == all(pool.needed_bytes <= pool.available_bytes for pool in pools)
    assert len(pools) == (1 if units.layout.shared else 2)


@given(geometry=geometries(), org=ORGS, context=st.integers(1, 100_000), checkpoints=st.integers(1, 8))
def test_the_minimum_budget_is_enough(geometry: StateGeometry, org: str, context: int, checkpoints: int) -> None:
    layout = layout_or_skip(org, geometry)
    units = minimum_budget(layout, context_tokens=context, checkpoints_per_request=checkpoints)
    blocks = math.ceil(context / layout.page_tokens)
    if layout.shared:
        needed = layout.attention_groups * blocks + layout.member_pages * checkpoints
        assert units.num_pages >= needed
    else:
        assert units.num_attention_pages >= blocks
        assert units.num_checkpoints >= checkpoints
    assert units.total_bytes <= units.budget.total_bytes


@given(share=st.fractions(0, 1), fraction=st.fractions(0, 1))
def test_a_split_strands_nothing_only_at_the_mixs_own_share(share: object, fraction: object) -> None:
    stranded = stranded_share(fraction, share)  # type: ignore[arg-type]
    assert 0 <= stranded <= 1
    assert (stranded == 0) == (share == fraction)


@given(geometry=geometries())
def test_the_automatic_split_is_usable(geometry: StateGeometry) -> None:
    assert 0 < auto_fraction(geometry) < 1


@pytest.mark.parametrize("org", sorted(ORGANIZATIONS))
@given(geometry=geometries(), page_tokens=PAGES)
def test_a_refusal_names_pages_that_fit(org: str, geometry: StateGeometry, page_tokens: int) -> None:
    try:
        layout_for(org, geometry, page_tokens=page_tokens)
    except SettingError as error:
        if "nearest that fit: " in str(error):
            for near in str(error).split("nearest that fit: ")[1].split(", "):
                assert layout_for(org, geometry, page_tokens=int(near)).page_tokens == int(near)
