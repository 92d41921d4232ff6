"""The policies of one scheduler joined: who is counted where, what is pinned and protected, and the counters."""

from __future__ import annotations

import pytest

from radix.demand import Namespace
from radix.headroom import AutoHeadroom
from radix.pinning import Resident
from radix.policies import Adoption, Chosen, Policies
from radix.retention import Lifetime, Plan
from radix.work import Rounds, Submitted, WorkCounts

GRID = 4
NAMESPACE = Namespace()
COST = (3,)


def policies(**chosen: object) -> Policies:
    return Policies(Chosen(**{"headroom": 0.0, **chosen}), grid=GRID, pools=(100,), pool_tokens=1000)


def adopt(joined: Policies, request: str, checkpoint: int | None, *, depth: int = GRID, resumes: bool = False):
    return joined.admitted(Adoption(request, resumes, depth, checkpoint), list(range(10)))


def test_without_a_policy_that_asks_no_prompt_is_read() -> None:
    joined = policies(lifetime=Lifetime.TRANSIENT)
    assert joined.arrived("a", NAMESPACE, list(range(10))) == Plan()
    assert len(joined.wanted) == 0
    assert not joined.names_needed


@pytest.mark.parametrize("asked", [{"lifetime": Lifetime.RETAINED}, {"pin_k": 1}, {"value_eviction": True}])
def test_a_policy_that_asks_has_every_boundary_of_a_prompt_counted(asked: dict[str, object]) -> None:
    """The last token is computed in any case, so a boundary behind it is not wanted."""
    joined = policies(**asked)
    joined.arrived("a", NAMESPACE, list(range(2 * GRID)))
    assert len(joined.wanted) == 1
    joined.arrived("b", NAMESPACE, list(range(2 * GRID + 1)))
    joined.arrived("b", NAMESPACE, list(range(99)))
    assert len(joined.wanted) == 2
    assert joined.counts.eligible_boundaries == 1


def test_salted_requests_are_no_requesters_of_each_others_boundaries() -> None:
    joined = policies(lifetime=Lifetime.RETAINED)
    for request, salt in (("a", None), ("b", "s"), ("c", "t")):
        joined.arrived(request, Namespace(None, salt), list(range(9)))
    assert joined.counts.eligible_boundaries == 0
    assert len(joined.wanted) == 6


def test_a_waiting_request_makes_the_boundary_of_a_running_one_retained() -> None:
    joined = policies(lifetime=Lifetime.RETAINED)
    joined.arrived("a", NAMESPACE, list(range(9)))
    assert joined.published("a", range(GRID), 1, COST) == Plan()
    assert joined.arrived("b", NAMESPACE, list(range(9))) == Plan(protect=(1,))
    assert (joined.counts.retained, joined.occupancy.retained_most) == (1, COST)
    assert adopt(joined, "b", 1) is None
    assert joined.counts.retained_requests == 1
    assert joined.ended("a") == Plan(unprotect=(1,))


def test_who_published_what_is_adopted() -> None:
    joined = policies()
    joined.published("a", range(GRID), 1, COST)
    adopt(joined, "b", 1)
    joined.ended("a")
    adopt(joined, "a", 1, resumes=True)
    adopt(joined, "c", 1)
    adopt(joined, "d", None, depth=0)
    counts = joined.counts
    assert (counts.adopted_own, counts.adopted_running, counts.adopted_ended) == (1, 1, 1)
    assert counts.resumed == 1
    joined.lost(1)
    adopt(joined, "a", 1, resumes=True)
    assert counts.adopted_own == 1


def test_users_are_the_publisher_and_those_whose_hit_ended_there_each_once() -> None:
    joined = policies(pin_k=2)
    for request in "abc":
        joined.arrived(request, NAMESPACE, list(range(9)))
    joined.published("a", range(GRID), 1, COST)
    assert joined.users(1) == 1
    for _ in range(3):
        adopt(joined, "b", 1)
    adopt(joined, "c", None, depth=0)
    assert joined.users(1) == 2
    assert joined.requesters(1) == 3
    joined.lost(1)
    assert (joined.users(1), joined.requesters(1)) == (0, 1)


def test_a_pin_is_counted_from_retraction_to_resumption() -> None:
    joined = policies(pin_k=1)
    joined.arrived("a", NAMESPACE, list(range(9)))
    pin = joined.retracted("a", [Resident(GRID, 11, 1, COST)])
    assert pin is not None
    assert (joined.pins.units, joined.occupancy.pinned_most) == (COST, COST)
    assert adopt(joined, "a", None, depth=GRID, resumes=True) == pin
    assert (joined.counts.resumed, joined.counts.resumed_at_pin) == (1, 1)
    assert joined.pins.units == ()
    joined.retracted("a", [Resident(GRID, 11, 1, COST)])
    assert joined.forget("a") == pin
    assert joined.budget.used == (0,)


def test_all_protection_yields_at_once() -> None:
    joined = policies(lifetime=Lifetime.RETAINED, retention_k=1, pin_k=1)
    for request in "ab":
        joined.arrived(request, NAMESPACE, list(range(9)))
    joined.published("a", range(GRID), 1, COST)
    joined.retracted("b", [Resident(GRID, 7, 1, COST)])
    plan, pins = joined.yielded()
    assert plan == Plan(unprotect=(1,))
    assert [pin.key for pin in pins] == [7]
    assert joined.yielded() == (Plan(), [])
    assert joined.counts.yielded == 1


def test_steps_that_wait_for_headroom_alone_lower_the_automatic_fraction() -> None:
    joined = policies(headroom=None)
    assert isinstance(joined.headroom, AutoHeadroom)
    before = joined.headroom.fraction
    joined.rounds.begin()
    joined.rounds.tried(admitted=False, held_back=True)
    joined.step(Submitted(normal_decode=3), waiting=True)
    joined.step(Submitted(normal_decode=3), waiting=False)
    assert joined.counts.headroom_waits == 1
    lowered = joined.headroom.fraction
    assert lowered < before
    joined.headroom.retracted(500)
    assert joined.headroom.fraction > lowered


def test_a_published_prefix_that_is_computed_again_raises_the_automatic_fraction() -> None:
    """Not one that nobody has published, nor a hit, nor what a retracted request computes again (that is counted)."""
    joined = policies(headroom=None)
    for request in "abc":
        joined.arrived(request, NAMESPACE, list(range(2 * GRID + 1)))
    start = joined.headroom.fraction
    adopt(joined, "a", None, depth=0)
    joined.published("a", range(2 * GRID), 1, COST)
    adopt(joined, "b", 1, depth=2 * GRID)
    adopt(joined, "a", None, depth=0, resumes=True)
    assert joined.headroom.fraction == start
    joined.lost(1)
    adopt(joined, "c", None, depth=GRID)
    assert joined.headroom.fraction == pytest.approx(start + 3 * 0.5 * GRID / 1000)


@pytest.mark.parametrize("cause", ["none", "released", "flushed"])
def test_only_what_was_evicted_counts_as_computed_again(cause: str) -> None:
    """A request that may not use the cache, a boundary whose lifetime is over, an emptied cache: no want of memory."""
    joined = policies(headroom=None)
    joined.arrived("a", NAMESPACE, list(range(2 * GRID + 1)))
    joined.published("a", range(2 * GRID), 1, COST)
    if cause == "released":
        joined.released(1)
        joined.lost(1)
    elif cause == "flushed":
        joined.flushed()
        joined.lost(1)
    joined.arrived("b", NAMESPACE, list(range(2 * GRID + 1)))
    adopt(joined, "b", None, depth=0)
    assert joined.headroom.fraction == 0.1


def test_a_boundary_that_is_published_again_is_lost_no_more() -> None:
    joined = policies(headroom=None)
    for request in "abc":
        joined.arrived(request, NAMESPACE, list(range(2 * GRID + 1)))
    joined.published("a", range(2 * GRID), 1, COST)
    joined.lost(1)
    adopt(joined, "b", None, depth=0)
    raised = joined.headroom.fraction
    joined.published("b", range(2 * GRID), 2, COST)
    adopt(joined, "c", None, depth=0)
    assert joined.headroom.fraction == raised > 0.1


def test_occupancy_is_summed_over_steps() -> None:
    joined = policies(lifetime=Lifetime.RETAINED, retention_k=1)
    joined.arrived("a", NAMESPACE, list(range(9)))
    joined.step(Submitted(initial=9), waiting=False)
    joined.published("a", range(GRID), 1, COST)
    for _ in range(2):
        joined.step(Submitted(normal_decode=1), waiting=False)
    joined.ended("a")
    joined.step(Submitted(normal_decode=1), waiting=False)
    seen = joined.occupancy
    assert (seen.steps, seen.retained_unit_steps, seen.retained_most) == (4, (6,), (3,))


def test_work_is_submitted_by_category_and_recorded_once() -> None:
    work = WorkCounts()
    work.submit(Submitted(initial=512, normal_decode=3))
    work.submit(Submitted(resume=100))
    work.submit(Submitted())
    work.end(input_tokens=512, output_tokens=20)
    assert (work.initial, work.resume, work.normal_decode, work.records) == (512, 100, 3, 2)
    assert work.recorded == work.input_once + work.output == 532


def test_a_round_is_empty_when_its_first_request_waits() -> None:
    work = WorkCounts()
    rounds = Rounds(work)
    for admitted in ([True, False], [False], []):
        rounds.begin()
        for answer in admitted:
            rounds.tried(admitted=answer, held_back=not answer)
        assert rounds.held_back is bool(admitted)
    assert (work.rounds, work.empty_rounds) == (2, 1)
