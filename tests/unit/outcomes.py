"""Outcomes made by hand for tests of the statistics: throughputs by arm and seed at one condition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.outcome import CellOutcome
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
