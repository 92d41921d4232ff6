"""D0's counters: what a check found, whose shortage it was, and stranded bytes per step."""

from __future__ import annotations

import pytest

from sgl_hybrid.errors import InvariantError
from sgl_hybrid.memory.dual_pool import DualPoolLedger, Outcome, Pool

A, R = Pool.ATTENTION, Pool.RECURRENT


def make_ledger() -> DualPoolLedger:
    return DualPoolLedger(units={A: 100, R: 10}, unit_bytes={A: 4, R: 60})


@pytest.mark.parametrize(
    ("need", "free", "kind"),
    [
        (3, 5, "granted"),
        (5, 5, "granted"),
        (0, 0, "granted_with_none_free"),
        (6, 5, "short"),
        (1, 0, "exhausted"),
    ],
)
def test_a_check_is_counted_once_by_what_it_found(need: int, free: int, kind: str) -> None:
    ledger = make_ledger()
    ledger.record_check(R, need=need, free=free, outcome=Outcome.DEFERRED)
    counts = {name: getattr(ledger.counts[R], name) for name in ledger.counts[R].__struct_fields__}
    failed = need > free
    assert counts == {**dict.fromkeys(counts, 0), kind: 1, "deferred": int(failed)}


def test_an_outcome_belongs_to_the_pool_that_was_short() -> None:
    ledger = make_ledger()
    ledger.record_check(A, need=1, free=9, outcome=Outcome.DEFERRED)
    ledger.record_check(R, need=1, free=0, outcome=Outcome.DEFERRED)
    ledger.record_check(A, need=2, free=1, outcome=Outcome.PREEMPTED)
    assert (ledger.counts[A].deferred, ledger.counts[R].deferred) == (0, 1)
    assert (ledger.counts[A].preempted, ledger.counts[R].preempted) == (1, 0)


def test_stranded_fraction_by_hand() -> None:
    """Capacity 100 * 4 + 10 * 60 = 1,000 bytes. Steps: nothing stranded; 3 slots (180 B) behind a full attention pool;
    25 pages (100 B) behind an empty recurrent pool; both full. (180 + 100) / (4 * 1,000) = 0.07."""
    ledger = make_ledger()
    assert ledger.stranded_fraction == 0.0
    for free in ({A: 7, R: 2}, {A: 0, R: 3}, {A: 25, R: 0}, {A: 0, R: 0}):
        ledger.record_step(free)
    assert ledger.stranded_fraction == pytest.approx(0.07)


def test_check_balances_each_pool_on_its_own() -> None:
    ledger = make_ledger()
    ledger.check(free={A: 50, R: 1}, held={A: 30, R: 8}, cached={A: 20, R: 1})
    with pytest.raises(InvariantError, match="recurrent"):
        ledger.check(free={A: 50, R: 2}, held={A: 30, R: 8}, cached={A: 20, R: 1})


def test_negative_units_are_refused() -> None:
    with pytest.raises(ValueError, match="from 0 on"):
        make_ledger().record_check(A, need=-1, free=0, outcome=Outcome.GRANTED)
