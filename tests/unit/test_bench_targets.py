"""Goals at the main load: which arm, over which seeds, met or missed, and what the counters show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from bench.outcome import CellOutcome
from bench.stats.contrasts import find
from bench.stats.targets import Goal, reached
from tests.unit.outcomes import METRIC, cells


def test_goals_name_the_best_arm_and_what_the_counters_show() -> None:
    outcomes = [
        CellOutcome(
            case="q1",
            arm=arm,
            budget=budget,
            seed=1,
            q=1.0,
            rate=3.0,
            cap=63,
            metrics={METRIC: tokens, "running_mean": running, "cached_share": 0.5},
        )
        for budget in ("b63", "b108")
        for arm, tokens, running in (("s1", 130.0, 8.0), ("s2", 140.0, 9.0), ("ceiling", 200.0, 14.0))
    ]
    goals = (Goal("s2", "s1", 5.0), Goal("best", "ceiling", -15.0, ("b63",)), Goal("best", "stock-tuned", 35.0))
    found = reached(outcomes, goals)
    assert [(goal.arm, goal.other, goal.where, goal.met) for goal in found] == [
        ("s2", "s1", "b63", True),
        ("s2", "ceiling", "b63", False),
        ("s2", "s1", "b108", True),
    ]
    assert found[1].effect_pct == pytest.approx(-30.0)
    assert found[1].limits == "running 9.0 beside 14.0, prompt tokens found in the cache 50% beside 50%"
    assert found[0].limits is None
    assert reached([]) == []


@pytest.mark.parametrize("other", [{"rate": 0.8}, {"q": 0.0}, {"cap": 109}, {"headroom": 0.1}, {"variant": "onoff"}])
def test_goals_are_of_the_main_load_and_of_no_other(other: Mapping[str, Any]) -> None:
    outcomes = cells("q1", {"s0": [100.0], "s1": [120.0]}) + cells("q1", {"s0": [100.0], "s1": [130.0]}, **other)
    [goal] = reached(outcomes)
    assert (goal.arm, goal.where, goal.effect_pct, goal.met) == ("s1", "b63", pytest.approx(20.0), False)


def test_the_best_arm_is_found_on_the_seeds_that_all_have() -> None:
    """The mean of S2-auto is above that of S2, because S2 alone ran the slow seed 2; at seed 1 S2 is ahead."""
    arms = {"s2": [500.0, 300.0], "s2-auto": [450.0], "stock-tuned": [400.0, 200.0]}
    [goal] = reached(cells("q1", arms), (Goal("best", "stock-tuned", 35.0),))
    assert (goal.arm, goal.effect_pct, goal.num_seeds, goal.met) == ("s2", pytest.approx(37.5), 2, True)


def test_an_arm_as_a_user_gets_it_may_be_the_best_and_is_in_no_family_of_the_paper() -> None:
    outcomes = cells(
        "q1", {"s1": [100.0], "s2": [110.0], "s2-auto": [150.0], "s1-auto": [120.0], "stock-tuned": [100.0]}
    )
    [goal] = reached(outcomes, (Goal("best", "stock-tuned", 35.0),))
    assert (goal.arm, goal.effect_pct, goal.met) == ("s2-auto", pytest.approx(50.0), True)
    families = {contrast.name: contrast.family for contrast in find(outcomes, METRIC)}
    assert families["S2/S1"] == "q1"
    assert families["S2-auto/S1-auto"] is None
    assert families["S2-auto/S2"] is None
    assert families["S2-auto/stock-tuned"] == families["S2/stock-tuned"] == "q1, against other servers"


def test_another_engine_is_met_in_tokens_and_as_a_share_of_its_own_ceiling() -> None:
    arms = {"s2": [90.0], "ceiling": [100.0], "vllm": [100.0], "vllm-ceiling": [200.0]}
    goals = (Goal("best", "vllm", 0.0), Goal("best", "vllm", 0.0, of_ceiling=True))
    tokens, shares = reached(cells("q1", arms), goals)
    assert (tokens.effect_pct, tokens.met, tokens.of_ceiling) == (pytest.approx(-10.0), False, False)
    assert (shares.effect_pct, shares.met, shares.of_ceiling) == (pytest.approx(80.0), True, True)  # 0.9 over 0.5
    del arms["vllm-ceiling"]
    assert [goal.of_ceiling for goal in reached(cells("q1", arms), goals)] == [False]
