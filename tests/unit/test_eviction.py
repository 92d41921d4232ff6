"""Which cached unit goes next: the least recent of all kinds, and which of equally recent ones."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radix.eviction import Candidate, Kind, next_victim, slab_recency

CANDIDATES = st.lists(
    st.builds(Candidate, st.sampled_from(Kind), st.integers(0, 5).map(float), st.integers(0, 9)), max_size=6
)


def test_nothing_to_evict_is_no_victim() -> None:
    assert next_victim([]) is None


@pytest.mark.parametrize("kind", Kind)
def test_the_least_recent_goes_whatever_its_kind(kind: Kind) -> None:
    oldest = Candidate(kind, 1.0, 7)
    others = [Candidate(other, 2.0, key) for key, other in enumerate(Kind)]
    assert next_victim([*others, oldest]) == oldest


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
