"""What the figures are drawn from: measurements by seed, picked out of the outcomes of a campaign."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from bench.outcome import CellOutcome, adopted
from bench.stats.conditions import measured
from bench.stats.effects import mean_ratio

THROUGHPUT = "output_tokens_per_s"


class Series:
    """The adopted outcomes of one case, asked for by arm and condition."""

    def __init__(self, outcomes: Iterable[CellOutcome], *cases: str) -> None:
        """Take the outcomes of the first of the cases that has any."""
        held = adopted(outcomes)
        present = [case for case in cases if any(outcome.case == case for outcome in held)]
        self._outcomes = [outcome for outcome in held if present and outcome.case == present[0]]

    def __bool__(self) -> bool:
        return any(outcome.status == "ok" for outcome in self._outcomes)

    def levels(self, field: str, **fixed: object) -> list[Any]:
        """Return the values that a field takes, in order of appearance."""
        return list(dict.fromkeys(getattr(outcome, field) for outcome in self._picked(fixed)))

    def by_seed(self, arm: str, metric: str = THROUGHPUT, **fixed: object) -> dict[int, float]:
        """Return the measurements of an arm above zero. Fields not fixed may take any value; the first one counts."""
        values: dict[int, float | None] = {}
        for outcome in self._picked({**fixed, "arm": arm}):
            values.setdefault(outcome.seed, outcome.metrics.get(metric))
        return measured(values)

    def mean(self, arm: str, metric: str = THROUGHPUT, **fixed: object) -> float | None:
        """Return the arithmetic mean over seeds, zeros included, or None without a measurement."""
        values = [
            outcome.metrics[metric] for outcome in self._picked({**fixed, "arm": arm}) if metric in outcome.metrics
        ]
        return float(np.mean(values)) if values else None

    def range(self, arm: str, metric: str, **fixed: object) -> tuple[float, float] | None:
        """Return smallest and largest over seeds, or None without a measurement."""
        values = [
            outcome.metrics[metric] for outcome in self._picked({**fixed, "arm": arm}) if metric in outcome.metrics
        ]
        return (min(values), max(values)) if values else None

    def _picked(self, fixed: Mapping[str, object]) -> Sequence[CellOutcome]:
        return [
            outcome
            for outcome in self._outcomes
            if outcome.status == "ok" and all(getattr(outcome, field) == value for field, value in fixed.items())
        ]


def mean_ratio_or_none(numerator: Mapping[int, float], denominator: Mapping[int, float]) -> float | None:
    """Return the mean over common seeds of the ratio within the seed, or None without a common seed."""
    return mean_ratio(numerator, denominator) if numerator.keys() & denominator.keys() else None
