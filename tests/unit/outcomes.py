"""Outcomes made by hand for tests of the statistics: throughputs by arm and seed at one condition."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from bench.outcome import CellOutcome
from bench.stats.effects import Effects
from bench.stats.rows import Row

METRIC = "output_tokens_per_s"


def cells(case: str, throughputs: Mapping[str, Sequence[float | None]], **changes: Any) -> list[CellOutcome]:
    """One cell for each arm and seed 1, 2, ...; None is a failed one."""
    values: dict[str, Any] = {"budget": "b63", "q": 1.0, "rate": 3.0, "cap": 63, **changes}
    return [
        CellOutcome(
            case=case,
            arm=arm,
            seed=seed,
            status="failed" if value is None else "ok",
            metrics={} if value is None else {METRIC: value},
            **values,
        )
        for arm, row in throughputs.items()
        for seed, value in enumerate(row, 1)
    ]


def row_of(rows: Sequence[Row], name: str, where: str = "b63") -> Row:
    [row] = [row for row in rows if (row.name, row.where) == (name, where)]
    return row


def from_percent(seeds: Sequence[int], percents: Sequence[float]) -> Effects:
    """Effects given as relative changes in percent, each above -100."""
    logs = tuple(math.log1p(percent / 100) for percent in percents)
    return Effects(seeds=tuple(seeds), shown=tuple(percents), logs=logs)


def without(effects: Effects, seed: int) -> Effects:
    """The effects of the other seeds."""
    kept = [place for place, held in enumerate(effects.seeds) if held != seed]
    return from_percent([effects.seeds[place] for place in kept], [effects.shown[place] for place in kept])
