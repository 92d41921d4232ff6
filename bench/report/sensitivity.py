"""How far the answers depend on the window, on latency limits and on cells that were run again.

None of it replaces the full-run effects and their tests. Source: paper Tables E-13, E-14, E-17.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np

from bench.metrics.qualified import Qualified, qualified
from bench.outcome import CellOutcome, Condition, adopted
from bench.paper_values import LATENCY_QUALIFIED_PCT
from bench.records import RequestRecord
from bench.stats.adoption import rerun_sensitivity
from bench.stats.conditions import labels
from bench.stats.contrasts import OWN_PAIRS, arm_title, find

VIEWS = (
    "output_tokens_per_s",
    "central_output_tokens_per_s",
    "poller_output_tokens_per_s",
    "output_tokens_per_host_work",
)
"""Full run, central arrivals, full poller (source: appendix B.4); the full run at equal speed of the host."""
PAIRS = (*OWN_PAIRS, ("s2", "stock-tuned"), ("s2", "stock-unified"))

Records = Mapping[tuple[Condition, str, int], Sequence[RequestRecord]]
"""The request records of adopted cells by condition, arm and seed."""


class ViewLine(msgspec.Struct, frozen=True, kw_only=True):
    """Mean effect of one pair [%] in each of `VIEWS`; None where a view could not be formed."""

    case: str
    name: str
    where: str
    effects: list[float | None]


class QualifiedLine(msgspec.Struct, frozen=True, kw_only=True):
    """Means over seeds for one pair, as columns of Table E-13. paper: its last two columns, where it has the row."""

    case: str
    name: str
    where: str
    num_seeds: int
    e2e_p99_ratio: float | None
    tpot_p99_ratio: float | None
    comparator_pct: float | None
    union_pct: float | None
    paper: tuple[float, float] | None = None


class RerunLine(msgspec.Struct, frozen=True, kw_only=True):
    """How many tests of a family reject under one treatment of its repeated cells."""

    family: str
    scenario: str
    num_rejected: int
    family_size: int


class Sensitivity(msgspec.Struct, frozen=True, kw_only=True):
    """What a report says beside its effects."""

    views: list[ViewLine]
    qualified: list[QualifiedLine]
    reruns: list[RerunLine]


def sensitivity(outcomes: Sequence[CellOutcome], records: Records) -> Sensitivity:
    """Return the three tables; those without a basis are empty."""
    return Sensitivity(
        views=_views(outcomes),
        qualified=_qualified(outcomes, records),
        reruns=[
            RerunLine(
                family=family,
                scenario=scenario.name,
                num_rejected=scenario.num_rejected,
                family_size=len(scenario.decisions),
            )
            for family, scenarios in rerun_sensitivity(outcomes).items()
            for scenario in scenarios
        ],
    )


def _views(outcomes: Sequence[CellOutcome]) -> list[ViewLine]:
    views = [
        [contrast for contrast in find(outcomes, metric) if contrast.kind in ("arms", "rival")] for metric in VIEWS
    ]
    lines = []
    for same in zip(*views, strict=True):  # what is found depends on the cells, not on the metric
        effects = [_mean(contrast.effects.shown) for contrast in same]
        if any(effect is not None for effect in effects[1:]):
            lines.append(ViewLine(case=same[0].case, name=same[0].name, where=same[0].where, effects=effects))
    return lines


def _qualified(outcomes: Sequence[CellOutcome], records: Records) -> list[QualifiedLine]:
    held = adopted(outcomes)
    lines = []
    for condition, where in labels(outcome.condition for outcome in held).items():
        seeds = sorted({outcome.seed for outcome in held if outcome.condition == condition})
        for pair in PAIRS:
            keys = [[(condition, arm, seed) for arm in pair] for seed in seeds]
            runs = [[records[key] for key in both] for both in keys if all(key in records for key in both)]
            found = [result for both in runs if (result := qualified(*both)) is not None]
            if found:
                lines.append(_line(condition, pair, where, found))
    return lines


def _line(at: Condition, pair: tuple[str, str], where: str, found: Sequence[Qualified]) -> QualifiedLine:
    place = (at.budget, at.rate, at.cap, at.variant)
    has_row = pair == ("d0", "s2") and at.headroom == 0 and at.q == 1
    return QualifiedLine(
        case=at.case,
        name="/".join(map(arm_title, pair)),
        where=where,
        num_seeds=len(found),
        e2e_p99_ratio=_mean(result.e2e_p99_ratio for result in found),
        tpot_p99_ratio=_mean(result.tpot_p99_ratio for result in found),
        comparator_pct=_mean(result.comparator_pct for result in found),
        union_pct=_mean(result.union_pct for result in found),
        paper=LATENCY_QUALIFIED_PCT.get(place) if has_row else None,
    )


def _mean(values: Iterable[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return float(np.mean(present)) if present else None
