"""Effects, tests and intervals, each against a case worked out by hand."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.cases import MOST_SEEDS
from bench.stats.decisions import (
    Decision,
    adoption_scenarios,
    holm,
    least_p,
    sign_flip,
    two_look,
)
from bench.stats.effects import (
    geometric_mean,
    interaction,
    mean_ratio,
    relative,
)
from bench.stats.intervals import Interval, bootstrap, containment, paired_t, paired_t_percent
from tests.unit.outcomes import from_percent


def test_effects_are_formed_within_the_seed() -> None:
    effects = relative({1: 150.0, 2: 110.0, 9: 1.0}, {2: 100.0, 1: 100.0, 5: 1.0})
    assert effects.seeds == (1, 2)  # 9 and 5 have no partner
    assert effects.shown == pytest.approx((50.0, 10.0))
    assert effects.logs == pytest.approx((math.log(1.5), math.log(1.1)))
    # The mean of the ratios, 1.3, is not the ratio of the means.
    assert mean_ratio({1: 150.0, 2: 44.0}, {1: 100.0, 2: 40.0}) == pytest.approx(1.3)


@pytest.mark.parametrize("zero", [0.0, -1.0])
def test_a_measurement_of_zero_has_no_ratio(zero: float) -> None:
    with pytest.raises(ValueError, match=r"above zero to form a ratio, got 1 and .* at seed 7"):
        relative({7: 1.0}, {7: zero})
    with pytest.raises(ValueError, match="above zero"):
        relative({7: zero}, {7: 1.0})


def test_no_common_seed_has_no_mean() -> None:
    assert relative({1: 1.0}, {2: 1.0}).seeds == ()
    with pytest.raises(ValueError, match="both sides have"):
        mean_ratio({1: 1.0}, {2: 1.0})


def test_an_interaction_is_a_difference_within_the_seed() -> None:
    shared, alone = from_percent([1, 2, 3], [50.0, 20.0, 9.0]), from_percent([2, 1, 4], [10.0, 30.0, 5.0])
    found = interaction(shared, alone)
    assert (found.seeds, found.unit) == ((1, 2), "pp")
    assert found.shown == pytest.approx((20.0, 10.0))
    assert found.logs == pytest.approx((math.log(1.5 / 1.3), math.log(1.2 / 1.1)))


def test_the_geometric_mean() -> None:
    assert geometric_mean([1.0, 4.0, 16.0]) == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("effects", "num_as_large"),
    [
        ([1.0, 2.0, 3.0], 2),  # all alike: the observed assignment and its mirror
        ([1.0, 2.0, -0.5], 4),  # |2.5|: also 1+2+0.5
        ([1.0, 1.0, -1.0], 8),  # every assignment gives 1 or 3
        ([0.0, 1.0], 4),  # a tie counts under both signs
        ([0.0, 0.0], 4),
        ([5.0], 2),
        ([0.3, -0.1, -0.6, 0.5, 0.2, 0.0, 0.3, -0.6], 256),  # cancels to nothing but for rounding
    ],
)
def test_sign_flip_counts_assignments(effects: list[float], num_as_large: int) -> None:
    assert sign_flip(effects) == num_as_large / 2 ** len(effects)


@given(st.lists(st.integers(-9, 9), min_size=1, max_size=7))
def test_sign_flip_is_the_count_in_whole_numbers(effects: list[int]) -> None:
    observed = abs(sum(effects))
    count = sum(
        abs(sum(s * e for s, e in zip(signs, effects, strict=True))) >= observed
        for signs in product((1, -1), repeat=len(effects))
    )
    assert sign_flip([effect / 10 for effect in effects]) == count / 2 ** len(effects)


def test_one_sign_gives_the_least_p_there_is() -> None:
    for num_seeds in (2, 3, 6, 12):
        assert sign_flip(range(1, num_seeds + 1)) == least_p(num_seeds) == 2 / 2**num_seeds
    assert least_p(1) == 1


@pytest.mark.parametrize("count", [0, MOST_SEEDS + 1])
def test_what_cannot_be_enumerated_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"expected 1 to 20 effects to enumerate, got {count}"):
        sign_flip([1.0] * count)


def test_two_looks_double_the_smaller_p() -> None:
    assert two_look(0.03) == 0.06  # no second look: it counts as 1
    assert two_look(0.03, 0.01) == 0.02
    assert two_look(0.01, 0.9) == 0.02
    assert two_look(0.7, 0.8) == 1.0


def test_holm_by_hand() -> None:
    # Sorted: 0.01 x 3, 0.02 x 2, 0.03 x 1 -> 0.03, 0.04, and 0.03 raised to 0.04.
    assert holm({"c": 0.03, "a": 0.01, "b": 0.02}) == {
        "c": Decision(0.03, pytest.approx(0.04), True),
        "a": Decision(0.01, pytest.approx(0.03), True),
        "b": Decision(0.02, pytest.approx(0.04), True),
    }
    # 0.03 x 2 is above the level, so 0.04, which would pass alone, does not.
    assert [decision.rejected for decision in holm({"a": 0.03, "b": 0.04}).values()] == [False, False]
    assert holm({"a": 0.9, "b": 0.8})["a"].adjusted_p == 1.0
    assert holm({}) == {}


def test_adoption_scenarios_correct_the_whole_family_again() -> None:
    a, b, c = adoption_scenarios({"x": 0.01, "y": 0.02}, {"x": 0.04})
    assert [scenario.num_rejected for scenario in (a, b, c)] == [2, 2, 1]
    assert b.decisions["y"].adjusted_p == pytest.approx(0.04)
    assert c.decisions["x"].adjusted_p == 1.0
    assert c.decisions["y"].adjusted_p == pytest.approx(0.04)
    with pytest.raises(ValueError, match="affected contrasts out of the family, got z"):
        adoption_scenarios({"x": 0.01}, {"z": 0.04})


def test_paired_t_by_hand() -> None:
    # 1, 2, 3: mean 2, standard deviation 1, error 1/sqrt(3), t(0.975, 2) = 4.302653.
    found = paired_t([1.0, 2.0, 3.0])
    assert found.estimate == 2.0
    assert (found.low, found.high) == pytest.approx(
        (2 - 4.302653 / math.sqrt(3), 2 + 4.302653 / math.sqrt(3)), abs=1e-6
    )
    assert not found.excludes_zero
    assert Interval(1.0, 0.5, 1.5).excludes_zero
    assert Interval(-1.0, -1.5, -0.5).excludes_zero
    with pytest.raises(ValueError, match="at least 2 seeds for an interval, got 1"):
        paired_t([1.0])


def test_the_interval_of_log_ratios_is_turned_into_percent_at_the_end() -> None:
    logs = [math.log(1.1), math.log(1.2), math.log(1.3)]
    inside, found = paired_t(logs), paired_t_percent(logs)
    assert found.estimate == pytest.approx(100 * ((1.1 * 1.2 * 1.3) ** (1 / 3) - 1))
    assert found.high == pytest.approx(100 * (math.exp(inside.high) - 1))
    assert found.high - found.estimate > found.estimate - found.low  # not symmetric in percent


def test_bootstrap_of_two_seeds_by_hand() -> None:
    # Means of two draws from {0, 1}: 0, 0.5, 1 with 1/4, 1/2, 1/4. So 2.5 % and 97.5 % are the ends,
    # and the central 40 % lies at 0.5.
    assert bootstrap([0.0, 1.0]) == Interval(0.5, 0.0, 1.0)
    assert bootstrap([0.0, 1.0], level=0.4) == Interval(0.5, 0.5, 0.5)
    assert bootstrap([7.0, 7.0, 7.0]) == Interval(7.0, 7.0, 7.0)
    with pytest.raises(ValueError, match="at least 2 seeds to resample, got 1"):
        bootstrap([1.0])


def test_bootstrap_is_repeatable_and_narrower_than_t_for_few_seeds() -> None:
    values = [10.0, 14.1, 9.03, 12.7, 11.6, 13.9]
    first = bootstrap(values)
    assert first == bootstrap(values)
    wide = paired_t(values)
    assert wide.low < first.low < first.estimate < first.high < wide.high
    assert bootstrap(values, seed=1) != first


def test_bootstrap_of_many_seeds_agrees_with_t() -> None:
    values = np.random.default_rng(3).normal(5.0, 2.0, size=200)
    display, exact = bootstrap(values.tolist()), paired_t(values.tolist())
    assert (display.low, display.high) == pytest.approx((exact.low, exact.high), abs=0.02)


def test_containment_needs_the_whole_interval_inside() -> None:
    # 100 ln = 1, 2, 3: 2 +- 2.919986 / sqrt(3) = [0.314, 3.686].
    logs = [0.01, 0.02, 0.03]
    found = containment(logs)
    assert (found.interval.low, found.interval.high) == pytest.approx((0.314150, 3.685850), abs=1e-5)
    assert not found.contained
    assert containment(logs, margin=3.7).contained
    assert not containment([-log for log in logs]).contained
    assert not containment([-0.05, 0.05, 0.0]).contained


THROUGHPUTS = st.dictionaries(st.integers(0, 40), st.floats(1.0, 1e4), min_size=2, max_size=6)


@given(THROUGHPUTS, THROUGHPUTS, st.floats(0.1, 10.0))
def test_swapping_the_sides_turns_the_effect_and_keeps_the_test(
    ours: dict[int, float], theirs: dict[int, float], factor: float
) -> None:
    forth, back = relative(ours, theirs), relative(theirs, ours)
    assert forth.seeds == back.seeds
    assert forth.logs == pytest.approx([-log for log in back.logs], abs=1e-12)
    scaled = relative({seed: factor * value for seed, value in ours.items()}, theirs)
    assert scaled.logs == pytest.approx([log + math.log(factor) for log in forth.logs], abs=1e-9)
    if forth.seeds:
        assert sign_flip(forth.logs) == sign_flip(back.logs)
    if len(forth.seeds) > 1:
        here, there = paired_t(forth.logs), paired_t(back.logs)
        assert (here.low, here.high) == pytest.approx((-there.high, -there.low), abs=1e-9)


@settings(max_examples=25)
@given(st.lists(st.integers(0, 64), min_size=1, max_size=6))
def test_holm_never_lowers_a_p_and_keeps_their_order(counts: list[int]) -> None:
    family = holm({str(place): count / 64 for place, count in enumerate(counts)})
    decisions = sorted(family.values(), key=lambda decision: decision.p)
    assert all(decision.p <= decision.adjusted_p <= 1.0 for decision in decisions)
    assert decisions[0].adjusted_p == pytest.approx(min(1.0, len(counts) * decisions[0].p))
    adjusted = [decision.adjusted_p for decision in decisions]
    assert adjusted == sorted(adjusted)
