"""Two campaigns beside each other: what changed for each arm at each condition, paired by seed.

For the same case at two commits, on two machines or with two models; equal cells are compared and nothing else.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from rich.table import Table

from bench.metrics import METRICS
from bench.outcome import Condition, adopted
from bench.registry import registered
from bench.report.gather import campaign_folders, read_outcomes
from bench.stats.conditions import labels
from bench.stats.contrasts import arm_title
from bench.stats.decisions import sign_flip
from bench.stats.effects import relative
from bench.stats.intervals import Interval, paired_t_percent
from sgl_hybrid.errors import SettingError


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One arm at one condition: mean of the changes by seed from A to B in percent, its interval and its test."""

    case: str
    where: str
    arm: str
    num_seeds: int
    before: float
    after: float
    effect_pct: float
    interval: Interval | None
    p: float


def compare(before: Path, after: Path, metric: str) -> list[Change]:
    """Return the change of every arm and condition that both campaigns measured with a common seed.

    Raises: SettingError for an unknown metric, a folder without a campaign, campaigns with nothing in common, or as
        `read_outcomes`.
    """
    registered(METRICS, metric, "a metric")
    sides = [_measured(folder, metric) for folder in (before, after)]
    common = [key for key in sides[0] if key in sides[1]]
    names = labels(condition for condition, _ in common)
    changes = []
    for condition, arm in common:
        ours = [side[condition, arm] for side in sides]
        effects = relative(ours[1], ours[0])
        if not effects.seeds:
            continue
        means = [sum(values[seed] for seed in effects.seeds) / len(effects.seeds) for values in ours]
        changes.append(
            Change(
                case=condition.case,
                where=names[condition],
                arm=arm,
                num_seeds=len(effects.seeds),
                before=means[0],
                after=means[1],
                effect_pct=sum(effects.shown) / len(effects.shown),
                interval=paired_t_percent(effects.logs) if len(effects.seeds) > 1 else None,
                p=sign_flip(effects.logs),
            )
        )
    if not changes:
        raise SettingError(f"expected two campaigns with a cell in common, got {before} and {after} with none")
    return changes


def _measured(folder: Path, metric: str) -> dict[tuple[Condition, str], dict[int, float]]:
    found: dict[tuple[Condition, str], dict[int, float]] = {}
    for outcome in adopted(read_outcomes(campaign_folders(folder))):
        value = outcome.metrics.get(metric, 0.0) if outcome.status == "ok" else 0.0
        if value > 0:
            found.setdefault((outcome.condition, outcome.arm), {})[outcome.seed] = value
    return found


def changes_table(changes: list[Change], metric: str) -> Table:
    """Return the changes as a table for the terminal."""
    unit = METRICS[metric].unit
    table = Table("case", "where", "arm", "seeds", title=f"{metric} [{unit}]", title_justify="left")
    for name in ("A", "B", "change", "95 % interval", "p"):
        table.add_column(name, justify="right")
    for change in changes:
        held = change.interval
        table.add_row(
            change.case,
            change.where,
            arm_title(change.arm),
            str(change.num_seeds),
            f"{change.before:,.2f}",
            f"{change.after:,.2f}",
            f"{change.effect_pct:+.1f} %",
            "one seed" if held is None else f"{held.low:+.1f} to {held.high:+.1f}",
            f"{change.p:.3g}",
        )
    return table
