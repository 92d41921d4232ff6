"""What the figures are drawn from: measurements by seed, picked out of the outcomes of a campaign.

A figure shows some fields of the condition. Of the others each budget has one combination, so that no number mixes two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from bench.cases import case_of
from bench.cells import Changes, cells_of
from bench.outcome import CellIdentity, CellOutcome, Condition, adopted
from bench.stats.conditions import measured, place
from bench.stats.effects import mean_ratio

THROUGHPUT = "output_tokens_per_s"


class Series:
    """The adopted outcomes of one case, asked for by arm and condition."""

    def __init__(self, outcomes: Iterable[CellOutcome], *cases: str, over: Sequence[str] = ()) -> None:
        """Take the outcomes of the first of the cases that has any, in order of their conditions.

        over: what a figure shows beside the budget. The other fields have at each budget the combination that the case
        is registered with, or else that with the most cells.
        """
        held = sorted(adopted(outcomes), key=lambda outcome: place(outcome.condition))
        present = [case for case in cases if any(outcome.case == case for outcome in held)]
        held = [outcome for outcome in held if present and outcome.case == present[0]]
        counts: dict[str, Counter[Condition]] = {}
        for outcome in held:
            counts.setdefault(outcome.budget, Counter())[_fixed(outcome, over)] += 1
        own = {_fixed(cell, over) for case in present[:1] for cell in cells_of(case_of(case), Changes())}
        ranked = [sorted(count, key=lambda at: (at in own, counts[at.budget][at])) for count in counts.values()]
        chosen = {ascending[-1] for ascending in ranked}
        self._outcomes = [outcome for outcome in held if _fixed(outcome, over) in chosen]

    def __bool__(self) -> bool:
        return any(outcome.status == "ok" for outcome in self._outcomes)

    def budget(self, wanted: str) -> str:
        """Return this budget if it was measured or nothing was, else the smallest that was."""
        found = self.levels("budget")
        return wanted if wanted in found or not found else str(found[0])

    def levels(self, field: str, **fixed: object) -> list[Any]:
        """Return the values that a field takes, in the order of the conditions."""
        return list(dict.fromkeys(getattr(outcome, field) for outcome in self._picked(fixed)))

    def by_seed(self, arm: str, metric: str = THROUGHPUT, **fixed: object) -> dict[int, float]:
        """Return the measurements of an arm above zero.

        Raises: ValueError if what is not fixed leaves more than one condition.
        """
        found = self._picked({**fixed, "arm": arm})
        if len({outcome.condition for outcome in found}) > 1:
            raise ValueError(f"expected one condition, got several of {arm} at {fixed}")
        return measured({outcome.seed: outcome.metrics.get(metric) for outcome in found})

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


def _fixed(cell: CellIdentity, over: Sequence[str]) -> Condition:
    """Return the condition of an outcome or a cell, with what a figure shows left out."""
    shown: dict[str, Any] = dict.fromkeys(over)
    return cell.condition._replace(**shown)


def mean_ratio_or_none(numerator: Mapping[int, float], denominator: Mapping[int, float]) -> float | None:
    """Return the mean over common seeds of the ratio within the seed, or None without a common seed."""
    return mean_ratio(numerator, denominator) if numerator.keys() & denominator.keys() else None
