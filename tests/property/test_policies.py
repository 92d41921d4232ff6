"""No policy starves or dead-locks: any settings, any budget, any arrivals, in a model of the scheduler.

Every step of the model asserts progress (a block made or a request done while there is work), that pages and budgets
add up, and that nothing protected is evicted (`tests/oracles/scheduler.py`).
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from radix.headroom import AutoHeadroom, FixedHeadroom
from radix.retention import Lifetime
from tests.oracles.scheduler import STATE_PAGES, Policies, Scheduler, Work

headrooms = st.one_of(
    st.builds(FixedHeadroom, st.sampled_from([0.0, 0.1, 0.35, 0.6, 0.99])),
    st.builds(AutoHeadroom, st.just(40), start=st.sampled_from([0.0, 0.2, 0.35])),
)
policies = st.builds(
    Policies,
    headrooms,
    st.sampled_from(Lifetime),
    st.integers(1, 3),
    st.sampled_from([None, 3, 2, 1]),
    st.sampled_from([0.0, 0.25, 1.0]),
    st.booleans(),
    st.booleans(),
)


@st.composite
def arrivals(draw: st.DrawFn) -> tuple[int, list[tuple[int, Work]]]:
    """Draw a pool and requests with the step they arrive in; each fits alone, most share one of three contexts."""
    num_pages = draw(st.integers(12, 40))
    works = []
    for serial in range(draw(st.integers(1, 12))):
        room = num_pages - 3 * STATE_PAGES
        output = draw(st.integers(1, min(8, room - 1)))
        length = draw(st.integers(1, room - output))
        shared = draw(st.integers(0, length))
        context = draw(st.integers(1, 3))
        prompt = tuple(1000 * context + index for index in range(shared))
        own = tuple(10_000 + 100 * serial + index for index in range(length - shared))
        works.append((draw(st.integers(0, 6)), Work(f"r{serial}", prompt + own, output)))
    return num_pages, sorted(works, key=lambda item: item[0])


@settings(max_examples=150, deadline=None)
@given(arrivals(), policies)
def test_every_request_that_fits_completes(drawn: tuple[int, list[tuple[int, Work]]], chosen: Policies) -> None:
    num_pages, works = drawn
    scheduler = Scheduler(num_pages, chosen)
    pending = list(works)
    longest = sum(work.output for _, work in works) + works[-1][0] + 1
    for step in range(longest):
        while pending and pending[0][0] <= step:
            scheduler.submit(pending.pop(0)[1])
        scheduler.step()
        if not pending and not scheduler.waiting and not scheduler.running:
            break
    assert sorted(scheduler.done) == sorted(work.name for _, work in works)
    assert scheduler.pins.held == {}
    assert scheduler.budget.used == (0,)


def storm(chosen: Policies) -> Scheduler:
    """Ten requests of one context that outgrow the pool, all at once."""
    scheduler = Scheduler(40, chosen)
    prompt = tuple(range(6))
    for serial in range(10):
        scheduler.submit(Work(f"r{serial}", (*prompt, 100 + serial), 8))
    while scheduler.waiting or scheduler.running:
        scheduler.step()
    return scheduler


def test_headroom_spares_retractions_in_a_storm() -> None:
    """The model retracts as the paper's scheduler does, and headroom does what it is for."""
    bare, kept = storm(Policies(FixedHeadroom(0.0))), storm(Policies(FixedHeadroom(0.35)))
    assert bare.retracted > kept.retracted
    assert len(bare.done) == len(kept.done) == 10


def test_pins_and_retention_take_effect_in_a_storm() -> None:
    scheduler = storm(Policies(FixedHeadroom(0.0), Lifetime.RETAINED, pin_k=1, protection=0.5))
    assert scheduler.pins.counts.pinned > 0
    assert scheduler.pins.counts.most_at_once > 0


def test_the_last_request_takes_what_is_protected() -> None:
    """Its own retained boundaries fill the pool before it has made its last block."""
    chosen = Policies(FixedHeadroom(0.0), Lifetime.RETAINED, retention_k=1, protection=1.0, every_boundary=True)
    scheduler = Scheduler(14, chosen)
    scheduler.submit(Work("r0", (0, 1, 2, 3, 4), 3))
    scheduler.step()
    assert scheduler.budget.used[0] > 0
    while scheduler.running:
        scheduler.step()
    assert scheduler.done == ["r0"]
    assert scheduler.budget.used == (0,)
