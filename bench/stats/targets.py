"""The goals of this project at the main load, what was reached, and what the counters say where one was missed.

The best of the own arms is chosen by its mean over the seeds that all of them share with the other side, so its lead
carries a choice among those measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from bench.arms import ceiling_of
from bench.cases import MAIN
from bench.outcome import CellOutcome, Condition, adopted
from bench.stats.conditions import labels, measured, measurements_of
from bench.stats.contrasts import AUTO_ARMS, OWN_ARMS
from bench.stats.effects import highest, relative

METRIC = "output_tokens_per_s"


class Goal(NamedTuple):
    """`arm` (`best`: of the own arms) must lead `other` by `least_pct` percent; budgets None: at every one.

    of_ceiling: each side is taken as a share of what its own engine reaches with memory to spare.
    """

    arm: str
    other: str
    least_pct: float
    budgets: tuple[str, ...] | None = None
    of_ceiling: bool = False


GOALS = (
    Goal("s1", "s0", 30.0),
    Goal("s2", "s1", 5.0),
    Goal("best", "stock-tuned", 35.0),
    Goal("best", "stock-unified", 70.0),
    Goal("best", "ceiling", -15.0, ("b63", "b83")),
    Goal("best", "vllm", 0.0),
    Goal("best", "vllm", 0.0, of_ceiling=True),
)
"""Mean of paired effects at the paper's main load (case q1). -15 % of the ceiling is 85 % of it."""


class Reached(msgspec.Struct, frozen=True, kw_only=True):
    """One goal at one condition. `limits`: what the counters show beside the other arm, where the goal was missed."""

    arm: str
    other: str
    where: str
    least_pct: float
    effect_pct: float
    num_seeds: int
    met: bool
    of_ceiling: bool = False
    limits: str | None = None


def is_main_load(condition: Condition) -> bool:
    """Return whether a condition is the paper's main load, at whatever budget. Source: paper section 4.2."""
    return condition == Condition(condition.case, condition.budget, 1.0, MAIN[0].rate, MAIN[0].cap, 0.0, "")


def reached(outcomes: Iterable[CellOutcome], goals: Sequence[Goal] = GOALS, *, case: str = "q1") -> list[Reached]:
    """Return every goal at the main load, at each budget where both of its sides were measured on a common seed."""
    held = [outcome for outcome in adopted(outcomes) if outcome.case == case and is_main_load(outcome.condition)]
    cells = measurements_of(held, METRIC)
    names = labels(cells)
    found = []
    for condition, arms in cells.items():
        values = {arm: measured(seeds) for arm, seeds in arms.items()}
        for goal in goals:
            if goal.budgets is not None and condition.budget not in goal.budgets:
                continue
            other = _side(values, goal.other, of_ceiling=goal.of_ceiling)
            own = (*OWN_ARMS, *AUTO_ARMS) if goal.arm == "best" else (goal.arm,)
            sides = {arm: _side(values, arm, of_ceiling=goal.of_ceiling) for arm in own}
            arm = highest({arm: {seed: side[seed] for seed in side.keys() & other} for arm, side in sides.items()})
            if arm is not None:
                effects = relative(sides[arm], other).shown
                mean = float(np.mean(effects))
                met = mean >= goal.least_pct
                found.append(
                    Reached(
                        arm=arm,
                        other=goal.other,
                        where=names[condition],
                        least_pct=goal.least_pct,
                        effect_pct=mean,
                        num_seeds=len(effects),
                        met=met,
                        of_ceiling=goal.of_ceiling,
                        limits=None if met else counters_beside(held, condition, arm, goal.other),
                    )
                )
    return found


def _side(values: Mapping[str, Mapping[int, float]], arm: str, *, of_ceiling: bool) -> Mapping[int, float]:
    own = values.get(arm, {})
    if not of_ceiling:
        return own
    ceiling = values.get(ceiling_of(arm), {})
    return {seed: own[seed] / ceiling[seed] for seed in own.keys() & ceiling.keys()}


_COUNTERS = {
    "running_mean": ("running", "{:.1f}"),
    "waiting_mean": ("waiting", "{:.1f}"),
    "cached_share": ("prompt tokens found in the cache", "{:.0%}"),
    "preemptions": ("preemptions a run", "{:.1f}"),
    "recorded_tokens_per_step": ("tokens a forward pass", "{:.1f}"),
    "tpot_p50_ms": ("ms between tokens", "{:.1f}"),
}


def counters_beside(outcomes: Iterable[CellOutcome], condition: Condition, arm: str, other: str) -> str | None:
    """Return the means over runs of what both arms counted, such as `running 6.2 beside 14.0`; None if nothing was."""
    runs = {
        name: [o.metrics for o in outcomes if (o.condition, o.arm, o.status) == (condition, name, "ok")]
        for name in (arm, other)
    }
    parts = []
    for metric, (label, form) in _COUNTERS.items():
        means = [_mean(run.get(metric) for run in runs[name]) for name in (arm, other)]
        if None not in means:
            parts.append(f"{label} {form.format(means[0])} beside {form.format(means[1])}")
    return ", ".join(parts) or None


def _mean(values: Iterable[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return float(np.mean(present)) if present else None
