"""Windows, empirical latency limits and reruns beside the effects of a report."""

from __future__ import annotations

from typing import Any

import pytest

from bench.outcome import CellOutcome
from bench.records import RequestRecord
from bench.report.sensitivity import RerunLine, ViewLine, sensitivity

S = 1_000_000_000


def cell(arm: str, seed: int, full: float, **changes: Any) -> CellOutcome:
    """A cell whose central window has the square of its throughput, and whose poller did not run."""
    metrics = {"output_tokens_per_s": full, "central_output_tokens_per_s": full**2}
    values: dict[str, Any] = {"case": "q1", "budget": "b63", "q": 1.0, "rate": 3.0, "metrics": metrics, **changes}
    return CellOutcome(arm=arm, seed=seed, **values)


def request(seconds: int) -> RequestRecord:
    return RequestRecord(
        index=0,
        context_id=0,
        salt=None,
        status="ok",
        planned_ns=0,
        prompt_tokens=10,
        target_tokens=5,
        output_tokens=5,
        sent_ns=0,
        first_token_ns=0,
        last_token_ns=seconds * S,
    )


TWO = [cell("s0", 1, 10.0), cell("s1", 1, 15.0), cell("s0", 2, 10.0), cell("s1", 2, 11.0)]


def test_views_stand_beside_each_other() -> None:
    [line] = sensitivity(TWO, {}).views
    assert (line.case, line.name, line.where) == ("q1", "S1/S0", "b63")
    # +50 and +10 over the full run; squared in the window: +125 and +21.
    assert line.effects == [pytest.approx(30.0), pytest.approx(73.0), None, None]


def test_without_another_view_there_is_no_table() -> None:
    bare = [cell(outcome.arm, outcome.seed, 1.0, metrics={"output_tokens_per_s": 1.0}) for outcome in TWO]
    found = sensitivity(bare, {})
    assert (found.views, found.qualified, found.reruns) == ([], [], [])


def test_qualified_effects_are_means_over_the_seeds_that_have_records() -> None:
    records = {
        (outcome.condition, outcome.arm, outcome.seed): [request(at) for at in times]
        for outcome, times in zip(TWO, ((2, 3), (1, 4), (2, 3), (2, 3)), strict=True)
    }
    [line] = sensitivity(TWO, records).qualified
    assert (line.name, line.where, line.num_seeds) == ("S1/S0", "b63", 2)
    assert line.e2e_p99_ratio == pytest.approx((3.97 / 2.99 + 1) / 2)
    assert line.comparator_pct == pytest.approx(-12.5)  # -25 and 0
    assert line.union_pct == pytest.approx(100 * (5 / 4 / (10 / 3) - 1) / 2)
    lost = cell("s0", 1, 0.0, q=0.0, status="failed", metrics={}, reason="lost")
    assert sensitivity([*TWO, lost], records).qualified[0].where == "b63, q 1"  # as the effects call it
    del records[TWO[1].condition, "s1", 1]
    [left] = sensitivity(TWO, records).qualified
    assert (left.num_seeds, left.comparator_pct) == (1, pytest.approx(0.0))


def test_reruns_are_told_with_their_three_treatments() -> None:
    outcomes = [cell(arm, seed, value + seed) for seed in range(7) for arm, value in (("s0", 10.0), ("s1", 20.0))]
    lost = cell("s1", 3, 0.0, status="failed", metrics={}, reason="lost")
    again = [cell("s1", 3, 23.0, attempt=2) if (o.arm, o.seed) == ("s1", 3) else o for o in outcomes]
    found = sensitivity([lost, *again], {}).reruns
    assert found == [
        RerunLine(family="q1", scenario="A: adopt the later attempt", num_rejected=1, family_size=1),
        RerunLine(family="q1", scenario="B: leave the seed out", num_rejected=1, family_size=1),
        RerunLine(family="q1", scenario="C: affected contrasts not estimable", num_rejected=0, family_size=1),
    ]
    assert isinstance(sensitivity(again, {}).views[0], ViewLine)
