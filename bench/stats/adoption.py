"""How much the decisions of a campaign rest on cells that had to be run again.

Source: paper appendices B.5 and E.14, Tables B-6 and E-17.
"""

from __future__ import annotations

from collections.abc import Iterable

from bench.outcome import CellOutcome, adopted
from bench.stats.decisions import Scenario, adoption_scenarios
from bench.stats.rows import Row, analyse


def rerun_sensitivity(
    outcomes: Iterable[CellOutcome], metric: str = "output_tokens_per_s"
) -> dict[str, list[Scenario]]:
    """Return the scenarios A, B and C for every family with a contrast that a later attempt feeds; empty if none does.

    B leaves the seed of such an attempt out of the contrasts it is part of and of no others.
    """
    kept = adopted(outcomes)
    if all(outcome.attempt == 1 or outcome.status != "ok" for outcome in kept):
        return {}
    with_reruns = _by_family(analyse(kept, metric))
    without_reruns = _by_family(analyse([outcome for outcome in kept if outcome.attempt == 1], metric))
    found = {}
    for family, rows in with_reruns.items():
        bare = without_reruns.get(family, {})
        affected = {key for key, row in rows.items() if key not in bare or bare[key].num_seeds < row.num_seeds}
        if affected:
            found[family] = adoption_scenarios(
                {key: _p(row) for key, row in rows.items()},
                {key: _p(bare[key]) if key in bare else 1.0 for key in affected},
            )
    return found


def _by_family(rows: Iterable[Row]) -> dict[str, dict[str, Row]]:
    families: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row.family is not None:
            families.setdefault(row.family, {})[f"{row.name} at {row.where}"] = row
    return families


def _p(row: Row) -> float:
    return 1.0 if row.p is None else row.p
