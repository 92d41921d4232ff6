"""What to pick and why, for a reader who runs a server and not this benchmark: a few sentences per load.

The choice is among all servers of the same engine that were measured, SGLang's own settings included: the fastest over
their common seeds is named, whoever's it is. A lead counts only where its interval excludes zero; with one seed it is
called an example.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from bench.arms import ARMS
from bench.outcome import CellOutcome, Condition, adopted
from bench.report.gather import ArmLine, Report
from bench.stats.contrasts import arm_title
from bench.stats.effects import Effects, highest, relative
from bench.stats.intervals import CONTAINMENT_MARGIN, containment, paired_t_percent
from bench.stats.targets import METRIC, counters_beside


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """What to start at one condition. flags: of the server. leads: what it has over others. why: from the counters."""

    where: str
    arm: str
    flags: str
    throughput: float
    ttft_p99_s: float | None
    leads: list[str]
    why: str | None
    sure: bool


def choices(report: Report) -> list[Choice]:
    """Return one choice for each condition at which at least two arms of SGLang were measured."""
    held = [outcome for outcome in adopted(report.outcomes) if outcome.status == "ok"]
    lines: dict[Condition, dict[str, ArmLine]] = {}
    for line in report.arms:
        lines.setdefault(line.at, {})[line.arm] = line
    found = [_choice(condition, arms, held) for condition, arms in lines.items()]
    return [choice for choice in found if choice is not None]


def _choice(condition: Condition, lines: Mapping[str, ArmLine], outcomes: Sequence[CellOutcome]) -> Choice | None:
    runs: dict[str, dict[int, CellOutcome]] = {}
    for outcome in outcomes:
        if outcome.condition == condition and outcome.metrics.get(METRIC, 0) > 0 and not ARMS[outcome.arm].spare:
            runs.setdefault(outcome.arm, {})[outcome.seed] = outcome
    speeds = {arm: {seed: run.metrics[METRIC] for seed, run in held.items()} for arm, held in runs.items()}
    candidates = {arm: held for arm, held in speeds.items() if ARMS[arm].engine == "sglang"}
    best = highest(candidates)
    if best is None or len(candidates) < 2:
        return None
    effects = {arm: relative(speeds[best], speeds[arm]) for arm in runs if arm != best}
    others = sorted((arm for arm, found in effects.items() if found.seeds), key=lambda arm: _mean(effects[arm]))
    tails = [run.metrics["ttft_p99_ms"] for run in runs[best].values() if "ttft_p99_ms" in run.metrics]
    return Choice(
        where=f"{condition.case}: {lines[best].where}",
        arm=best,
        flags=lines[best].flags,
        throughput=sum(speeds[best].values()) / len(speeds[best]),
        ttft_p99_s=sum(tails) / len(tails) / 1000 if tails else None,
        leads=[_lead(arm, effects[arm]) for arm in others],
        why=_why(condition, best, others[0], outcomes) if others else None,
        sure=all(_is_ahead(found) for arm, found in effects.items() if arm in candidates),
    )


def _lead(arm: str, effects: Effects) -> str:
    title = arm_title(arm)
    mean = _mean(effects)
    if len(effects.seeds) == 1:
        return f"{mean:+.0f} % over {title} (one seed: an example)"
    interval = paired_t_percent(effects.logs)
    bounds = f"{interval.low:+.0f} to {interval.high:+.0f}"
    if interval.excludes_zero:
        return f"{mean:+.0f} % over {title} ({bounds})"
    told = f"within {CONTAINMENT_MARGIN:g} %" if containment(effects.logs).contained else "not told apart"
    return f"{mean:+.0f} % over {title} ({bounds}): {told}"


def _mean(effects: Effects) -> float:
    return sum(effects.shown) / len(effects.shown)


def _is_ahead(effects: Effects) -> bool:
    return len(effects.seeds) > 1 and paired_t_percent(effects.logs).low > 0


def _why(condition: Condition, best: str, second: str, outcomes: Sequence[CellOutcome]) -> str | None:
    found = counters_beside(outcomes, condition, best, second)
    return None if found is None else f"{arm_title(best)} beside {arm_title(second)}: {found}"
