"""Properties of cost, capacity, budgets and the split over drawn geometries and published models."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import msgspec
from hypothesis import assume, given, reject
from hypothesis import strategies as st

from sgl_hybrid.errors import SettingError
from sgl_hybrid.memory import ORGANIZATIONS, StateGeometry, Units, parse_budget, plan_units
from sgl_hybrid.memory.budget import minimum_budget
from sgl_hybrid.memory.cost import Mix, capacity, cost, fits
from sgl_hybrid.memory.organization import ConvPlacement
from sgl_hybrid.memory.split import auto_fraction, stranded_share
from tests.strategies import geometries, layout_or_skip, mixes, presets

ORGS = st.sampled_from(sorted(ORGANIZATIONS))


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
        reject()


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
def test_a_split_strands_nothing_only_at_the_mixs_own_share(share: Fraction, fraction: Fraction) -> None:
    stranded = stranded_share(fraction, share)
    assert 0 <= stranded <= 1
    assert (stranded == 0) == (share == fraction)


@given(geometry=geometries())
def test_the_automatic_split_is_usable(geometry: StateGeometry) -> None:
    assert 0 < auto_fraction(geometry) < 1
