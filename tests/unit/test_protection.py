"""Retention and pins on one budget: what is freed, protected and unprotected, and that the budget always adds up."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radix.pinning import Pins, Resident
from radix.protection import ProtectionBudget
from radix.retention import Lifetime, Plan, Produced, Retention


def produced(checkpoint: int, depth: int, boundary: bytes = b"", cost: int = 3) -> Produced:
    return Produced(boundary or bytes([checkpoint]), depth, checkpoint, (cost,))


def retention(lifetime: Lifetime, wanted: dict[bytes, int], limit: int = 1000, k: int = 2) -> Retention:
    return Retention(lifetime, lambda boundary: wanted.get(boundary, 0), budget(limit), k=k)


def budget(limit: int) -> ProtectionBudget:
    return ProtectionBudget([limit])


def resident(depth: int, requesters: int, cost: int = 3) -> Resident:
    return Resident(depth, depth * 10, requesters, (cost,))


def test_a_budget_is_a_share_of_each_pool() -> None:
    held = ProtectionBudget.share(0.29, [100, 7])
    assert held.limits == (29, 2)
    assert held.take((20, 1))
    assert not held.take((1, 2))
    assert held.used == (20, 1)
    assert held.take((9, 1))
    assert not held.fits((1, 0))
    held.give_back((29, 2))
    assert held.used == (0, 0)


@pytest.mark.parametrize("share", [-0.1, 1.01])
def test_a_share_beyond_the_pool_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        ProtectionBudget.share(share, [10])


def test_wrong_quantities_of_a_budget_are_refused() -> None:
    held = budget(5)
    with pytest.raises(ValueError, match="at most"):
        held.give_back((1,))
    with pytest.raises(ValueError, match="from 0 units on"):
        ProtectionBudget([-1])


def test_transient_frees_the_earlier_boundary_of_the_same_producer_only() -> None:
    policy = retention(Lifetime.TRANSIENT, {})
    assert policy.published("a", produced(1, 512)) == Plan()
    assert policy.published("b", produced(2, 512)) == Plan()
    assert policy.published("a", produced(3, 1024)) == Plan(free=(1,))
    policy.lost(1)
    assert policy.published("a", produced(4, 1536)) == Plan(free=(3,))
    policy.ended("a")
    assert policy.producer_of(4) is None
    assert policy.producer_of(2) == "b"


def test_transient_asks_again_for_a_boundary_that_another_request_was_using() -> None:
    policy = retention(Lifetime.TRANSIENT, {})
    policy.published("a", produced(1, 512))
    assert policy.published("a", produced(2, 1024)).free == (1,)
    assert policy.published("a", produced(3, 1536)).free == (1, 2)


def test_cached_neither_frees_nor_protects() -> None:
    policy = retention(Lifetime.CACHED, {b"c": 9})
    for checkpoint, depth in ((1, 512), (2, 1024)):
        assert policy.published("a", produced(checkpoint, depth, b"c")) == Plan()
    assert policy.demanded([b"c"]) == Plan()
    assert policy.ended("a") == Plan()


def test_retained_protects_what_enough_requests_want_while_the_producer_runs() -> None:
    wanted = {b"c": 2, b"d": 1}
    policy = retention(Lifetime.RETAINED, wanted)
    assert policy.published("a", produced(1, 512, b"c")) == Plan(protect=(1,))
    assert policy.published("a", produced(2, 1024, b"d")) == Plan()
    wanted[b"d"] = 2
    assert policy.demanded([b"d", b"c"]) == Plan(protect=(2,))
    assert sorted(policy.protected) == [1, 2]
    assert policy.ended("a") == Plan(unprotect=(1, 2))
    assert policy.demanded([b"c", b"d"]) == Plan()
    assert policy.protected == {}


def test_retained_stays_within_the_budget_and_goes_on_when_it_has_room() -> None:
    policy = retention(Lifetime.RETAINED, {b"c": 2}, limit=7)
    plans = [policy.published(name, produced(v, 512, b"c")) for v, name in enumerate("abc", start=1)]
    assert [plan.protect for plan in plans] == [(1,), (2,), ()]
    assert policy.ended("a").unprotect == (1,)
    assert policy.demanded([b"c"]).protect == (3,)


def test_retained_protection_yields_whole() -> None:
    policy = retention(Lifetime.RETAINED, {b"c": 2}, limit=3)
    policy.published("a", produced(1, 512, b"c"))
    assert policy.yielded() == Plan(unprotect=(1,))
    assert policy.producer_of(1) == "a"
    assert policy.published("b", produced(2, 512, b"c")).protect == (2,)


@pytest.mark.parametrize("make", [lambda: retention(Lifetime.RETAINED, {}, k=0), lambda: Pins(0, budget(5))])
def test_a_threshold_below_one_is_refused(make) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        make()


@pytest.mark.parametrize(("k", "expected"), [(1, 1536), (2, 1024), (3, 512), (4, None)])
def test_the_rightmost_boundary_with_enough_requesters_is_pinned(k: int, expected: int | None) -> None:
    pins = Pins(k, budget(100))
    found = pins.choose("a", [resident(512, 3), resident(1024, 2), resident(1536, 1)])
    assert (found and found.depth) == expected
    assert pins.counts.eligible == pins.counts.pinned == (expected is not None)


def test_without_a_threshold_nothing_is_pinned_or_counted() -> None:
    pins = Pins(None, budget(100))
    assert pins.choose("a", [resident(512, 9)]) is None
    assert (pins.counts.tested, pins.held) == (0, {})


def test_a_boundary_beyond_the_budget_is_passed_over() -> None:
    pins = Pins(1, budget(5))
    boundaries = [resident(512, 1, cost=2), resident(1024, 1, cost=6)]
    assert pins.choose("a", boundaries) == boundaries[0]
    assert pins.choose("b", boundaries[1:]) is None
    assert (pins.counts.tested, pins.counts.eligible, pins.counts.pinned) == (2, 2, 1)


def test_a_pin_is_held_until_it_is_dropped_once() -> None:
    held = budget(3)
    pins = Pins(1, held)
    pin = pins.choose("a", [resident(512, 1)])
    with pytest.raises(ValueError, match="without a pin"):
        pins.choose("a", [resident(512, 1)])
    assert held.used == (3,)
    assert pins.drop("a") == pin
    assert pins.drop("a") is None
    assert held.used == (0,)
    assert pins.counts.most_at_once == 1


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["publish", "want", "end", "lose", "yield", "pin", "drop"]),
        st.integers(0, 4),
        st.integers(0, 5),
    ),
    max_size=60,
)


@given(ACTIONS, st.sampled_from(Lifetime), st.integers(1, 3), st.integers(0, 12))
def test_whatever_happens_the_budget_equals_what_is_protected(
    actions: list[tuple[str, int, int]], lifetime: Lifetime, k: int, limit: int
) -> None:
    """The caller's side: a set of protected checkpoints kept from the plans alone."""
    held, wanted = budget(limit), Counter[bytes]()
    policy, pins = Retention(lifetime, wanted.__getitem__, held, k=k), Pins(k, held)
    live: dict[int, int] = {}
    protected: set[int] = set()

    def carry_out(plan: Plan) -> None:
        for checkpoint in plan.unprotect:
            protected.remove(checkpoint)
        for checkpoint in plan.protect:
            assert checkpoint not in protected
            protected.add(checkpoint)
        for checkpoint in plan.free:
            assert checkpoint not in protected
            policy.lost(checkpoint)
            del live[checkpoint]

    for serial, (action, request, number) in enumerate(actions):
        if action == "publish":
            live[serial] = number
            carry_out(policy.published(str(request), Produced(bytes([number]), serial + 1, serial, (2,))))
        elif action == "want":
            wanted[bytes([number])] += 1
            carry_out(policy.demanded([bytes([number])]))
        elif action == "end":
            carry_out(policy.ended(str(request)))
        elif action == "yield":
            carry_out(policy.yielded())
        elif action == "lose" and set(live) - protected:
            checkpoint = min(set(live) - protected)
            del live[checkpoint]
            policy.lost(checkpoint)
        elif action == "pin" and str(request) not in pins.held:
            pins.choose(str(request), [resident(number + 1, number, cost=1 + number)])
        elif action == "drop":
            pins.drop(str(request))
        assert protected == set(policy.protected)
        assert held.used == (2 * len(protected) + sum(pin.cost[0] for pin in pins.held.values()),)
        assert held.used[0] <= limit
