"""Admission headroom: H = floor(f*B) as the paper's settings give it, who is admitted, and the automatic fraction."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radix.headroom import (
    HIGHEST,
    LOWEST,
    AutoHeadroom,
    FixedHeadroom,
    PoolCheck,
    Verdict,
    headroom_blocks,
    judge,
)

FRACTIONS = (0.0, 0.10, 0.19, 0.27, 0.35)
EXPECTED_BLOCKS = {
    63: (0, 6, 11, 17, 22),
    193: (0, 19, 36, 52, 67),
    84: (0, 8, 15, 22, 29),
    254: (0, 25, 48, 68, 88),
    109: (0, 10, 20, 29, 38),
    331: (0, 33, 62, 89, 115),
    3256: (0, 325, 618, 879, 1139),
}
"""Blocks of a pool -> H at each fraction. Source: paper section 4.4 (the five values of f) at the block counts of table
B-2; 3256 are D0's attention units at b63."""

POOLS = st.lists(
    st.builds(PoolCheck, st.integers(0, 60), st.integers(0, 60), st.integers(0, 60)), min_size=1, max_size=2
)


@pytest.mark.parametrize("num_blocks", EXPECTED_BLOCKS)
def test_headroom_of_the_papers_settings(num_blocks: int) -> None:
    assert tuple(headroom_blocks(fraction, num_blocks) for fraction in FRACTIONS) == EXPECTED_BLOCKS[num_blocks]


def test_a_fraction_is_the_decimal_that_was_written() -> None:
    """0.29 * 100 is 28.999... in floating point."""
    assert headroom_blocks(0.29, 100) == 29
    assert [headroom_blocks(0.1 * 3, 10), headroom_blocks(0.3, 10)] == [3, 3]


@pytest.mark.parametrize("fraction", [-0.1, 1.0, 1.5, float("nan")])
def test_a_fraction_outside_the_range_is_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match="0 <= f < 1"):
        headroom_blocks(fraction, 10)


@pytest.mark.parametrize(
    ("need", "available", "idle", "expected"),
    [
        (10, 29, False, Verdict.HEADROOM),
        (10, 30, False, Verdict.ADMIT),
        (10, 10, True, Verdict.ADMIT),
        (10, 9, True, Verdict.SHORT),
        (10, 9, False, Verdict.SHORT),
    ],
)
def test_the_need_and_the_headroom_must_both_be_there(need: int, available: int, idle: bool, expected: Verdict) -> None:
    assert judge([PoolCheck(need, available, headroom_blocks(0.2, 100))], idle=idle) is expected


def test_each_of_two_pools_has_its_own_headroom() -> None:
    attention, recurrent = PoolCheck(10, 100, 30), PoolCheck(2, 5, 3)
    assert judge([attention, recurrent], idle=False) is Verdict.ADMIT
    assert judge([attention, recurrent._replace(headroom=4)], idle=False) is Verdict.HEADROOM
    assert judge([attention._replace(headroom=91), recurrent], idle=False) is Verdict.HEADROOM
    assert judge([attention, recurrent._replace(available=1)], idle=False) is Verdict.SHORT


@given(POOLS, st.integers(0, 60), st.booleans())
def test_more_headroom_never_admits_more(pools: list[PoolCheck], more: int, idle: bool) -> None:
    raised = [pool._replace(headroom=pool.headroom + more) for pool in pools]
    if judge(raised, idle=idle) is Verdict.ADMIT:
        assert judge(pools, idle=idle) is Verdict.ADMIT
    assert (judge(pools, idle=idle) is Verdict.SHORT) == (judge(raised, idle=idle) is Verdict.SHORT)


@given(POOLS)
def test_when_nothing_runs_what_fits_is_admitted(pools: list[PoolCheck]) -> None:
    fits = all(pool.need <= pool.available for pool in pools)
    assert (judge(pools, idle=True) is Verdict.ADMIT) == fits


def test_a_given_fraction_stays() -> None:
    headroom = FixedHeadroom(0.19)
    headroom.retracted(5000)
    headroom.deferred()
    assert headroom.fraction == 0.19


def test_retractions_raise_the_automatic_fraction_and_waiting_lowers_it() -> None:
    headroom = AutoHeadroom(100_000, start=0.1)
    headroom.retracted(3000)
    raised = headroom.fraction
    assert raised > 0.1
    headroom.deferred()
    assert 0.1 < headroom.fraction < raised


def test_a_prefix_that_is_computed_again_raises_the_automatic_fraction_as_a_retraction_does() -> None:
    retracted, missed, fixed = AutoHeadroom(100_000), AutoHeadroom(100_000), FixedHeadroom(0.1)
    retracted.retracted(3000)
    missed.missed(3000)
    fixed.missed(3000)
    assert missed.fraction == retracted.fraction > fixed.fraction == 0.1


def test_the_automatic_fraction_rests_where_both_errors_cost_the_same() -> None:
    """A retraction of 3,000 tokens at half of a token each is worth 1,500 rounds of waiting."""
    headroom = AutoHeadroom(100_000, start=0.1)
    for _ in range(10):
        headroom.retracted(3000)
        for _ in range(1500):
            headroom.deferred()
    assert headroom.fraction == pytest.approx(0.1)


@given(st.lists(st.one_of(st.none(), st.integers(0, 10**6)), max_size=60))
def test_the_automatic_fraction_stays_within_its_bounds(events: list[int | None]) -> None:
    headroom = AutoHeadroom(50_000)
    for lost_tokens in events:
        headroom.deferred() if lost_tokens is None else headroom.retracted(lost_tokens)
        assert LOWEST <= headroom.fraction <= HIGHEST
        headroom_blocks(headroom.fraction, 254)


@pytest.mark.parametrize(("tokens", "start"), [(0, 0.1), (100, 0.5)])
def test_an_automatic_fraction_needs_a_pool_and_a_start_within_the_bounds(tokens: int, start: float) -> None:
    with pytest.raises(ValueError, match="expected a pool"):
        AutoHeadroom(tokens, start=start)
