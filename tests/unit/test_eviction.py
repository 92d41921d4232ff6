"""Which cached unit goes next: the least recent of all kinds, and which of equally recent ones."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radix.eviction import Candidate, Kind, next_victim, replay_value, slab_recency, value_per_byte

CANDIDATES = st.lists(
    st.builds(
        Candidate, st.sampled_from(Kind), st.integers(0, 5).map(float), st.integers(0, 9), st.just(0.0), st.just(False)
    ),
    max_size=6,
)


def test_nothing_to_evict_is_no_victim() -> None:
    assert next_victim([]) is None


@pytest.mark.parametrize("kind", Kind)
def test_the_least_recent_goes_whatever_its_kind(kind: Kind) -> None:
    oldest = Candidate(kind, 1.0, 7)
    others = [Candidate(other, 2.0, key) for key, other in enumerate(Kind)]
    assert next_victim([*others, oldest]) == oldest


@pytest.mark.parametrize("kind", Kind)
def test_what_a_session_refers_to_goes_last_whatever_its_recency_and_value(kind: Kind) -> None:
    told = [Candidate(kind, recency, key, in_session=True) for key, recency in enumerate((2.0, 1.0))]
    other = Candidate(kind, 9.0, 7, value=5.0)
    assert next_victim([*told, other]) == other
    assert next_victim(told) == told[1]


def test_of_equals_a_slab_goes_before_a_checkpoint_before_attention() -> None:
    equals = [Candidate(kind, 3.0, key) for key, kind in enumerate(Kind)]
    expected = [Kind.SLAB, Kind.CHECKPOINT, Kind.ATTENTION]
    for order in itertools.permutations(equals):
        left = list(order)
        found = []
        while (victim := next_victim(left)) is not None:
            found.append(victim.kind)
            left.remove(victim)
        assert found == expected


@given(CANDIDATES)
def test_evicting_all_yields_each_once_in_order_of_recency(candidates: list[Candidate]) -> None:
    left, found = list(candidates), []
    while (victim := next_victim(left)) is not None:
        found.append(victim)
        left.remove(victim)
    assert [victim.recency for victim in found] == sorted(candidate.recency for candidate in candidates)


@given(st.lists(st.floats(0, 100), min_size=1))
def test_a_slab_may_go_when_its_last_checkpoint_may(recencies: list[float]) -> None:
    assert slab_recency(recencies) == sorted(recencies)[-1]


def test_an_empty_slab_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one checkpoint"):
        slab_recency([])


def test_the_least_valuable_goes_before_the_least_recent() -> None:
    old_and_wanted = Candidate(Kind.CHECKPOINT, 1.0, 1, value=0.5)
    new_and_unwanted = Candidate(Kind.ATTENTION, 9.0, 2, value=0.25)
    newest = Candidate(Kind.ATTENTION, 10.0, 3, value=0.25)
    assert next_victim([old_and_wanted, newest, new_and_unwanted]) == new_and_unwanted


def test_value_is_the_replay_that_each_requester_is_spared() -> None:
    assert replay_value(2048, 1536, 3) == 3 * 512
    assert replay_value(2048, 0, 1) == 2048
    assert replay_value(512, 0, 0) == 0
    assert value_per_byte(1024, 4096) == 0.25
    assert value_per_byte(0, 4096) == 0.0


def test_a_checkpoint_whose_loss_strands_more_attention_goes_later() -> None:
    """Two contexts of equal depth and demand: one with a boundary just before, one whose only state this is."""
    dense, lone = replay_value(2048, 1536, 2), replay_value(2048, 0, 2)
    victims = [Candidate(Kind.CHECKPOINT, 1.0, 1, lone / 100), Candidate(Kind.CHECKPOINT, 2.0, 2, dense / 100)]
    assert next_victim(victims) == victims[1]


def test_what_frees_nothing_goes_last() -> None:
    assert value_per_byte(0, 0) == float("inf")


@pytest.mark.parametrize("call", [lambda: replay_value(512, 512, 1), lambda: replay_value(512, -1, 1)])
def test_a_boundary_that_is_not_on_the_left_is_refused(call) -> None:
    with pytest.raises(ValueError, match="nearest boundary"):
        call()


def test_negative_quantities_are_refused() -> None:
    with pytest.raises(ValueError, match="from 0 on"):
        value_per_byte(-1, 4)
