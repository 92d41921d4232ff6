"""Goodput under limits that come from the requests themselves: how a gap depends on what counts as good.

For a pair of arms the limits on E2E latency and TPOT are the 99th percentiles of the comparator's requests, or of both
arms' requests, by seed; both arms are then counted within them. Such limits are no service objective. The user's limits
(`bench run --ttft-ms`, ...) are in the metrics of every run. Source: paper appendix B.4, Table E-13.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from bench.campaign.folder import Row, read_rows
from bench.metrics.latency import empirical_limits, goodput
from bench.outcome import Condition, adopted
from bench.records import RequestRecord, read_records
from bench.stats.contrasts import labels

PAIRS = (("d0", "s2"), ("s2", "stock-tuned"))
"""An arm and its comparator: the paper's pair, and this project's against SGLang's."""
PAPER_EFFECTS = {
    ("b63", 3.0, 63, ""): (3.57, 5.08),
    ("b108", 4.5, 109, ""): (-27.63, -17.43),
    ("b63", 1.7, 8, ""): (-58.93, -29.33),
    ("b63", 1.7, 63, "onoff"): (-17.45, -8.48),
}
"""D0 beside S2 in percent, limits of S2 and of the union, by budget, rate, cap and variant. Source: Table E-13."""


class GoodputLine(msgspec.Struct, frozen=True, kw_only=True):
    """One pair at one condition: mean change of goodput in percent within either kind of limits."""

    case: str
    where: str
    arm: str
    comparator: str
    num_seeds: int
    comparator_limits_pct: float
    union_limits_pct: float
    paper: tuple[float, float] | None


def goodput_lines(folders: Iterable[Path]) -> list[GoodputLine]:
    """Return a line for every pair and condition that has a seed with the records of both arms."""
    found: dict[Condition, dict[str, dict[int, Path]]] = {}
    for folder in folders:
        rows = read_rows(folder)
        kept = {id(outcome) for outcome in adopted(row.outcome for row in rows) if outcome.status == "ok"}
        for row in rows:
            records = _records_folder(folder, row)
            if id(row.outcome) in kept and (records / "requests.jsonl").is_file():
                arms = found.setdefault(row.outcome.condition, {})
                arms.setdefault(row.outcome.arm, {})[row.outcome.seed] = records
    lines = []
    for case in dict.fromkeys(condition.case for condition in found):
        names = labels([condition for condition in found if condition.case == case])
        for condition, where in names.items():
            for pair in PAIRS:
                lines += _line(condition, where, pair, found[condition])
    return lines


def _records_folder(folder: Path, row: Row) -> Path:
    return folder / "cells" / row.key / f"attempt-{row.outcome.attempt}" / "load"


def _line(
    condition: Condition, where: str, pair: tuple[str, str], arms: Mapping[str, Mapping[int, Path]]
) -> list[GoodputLine]:
    ours, theirs = (arms.get(arm, {}) for arm in pair)
    effects = [_effects(read_records(ours[seed]), read_records(theirs[seed])) for seed in sorted(ours.keys() & theirs)]
    known = [effect for effect in effects if effect is not None]
    if not known:
        return []
    place = (condition.budget, condition.rate, condition.cap or 0, condition.variant)
    return [
        GoodputLine(
            case=condition.case,
            where=where,
            arm=pair[0],
            comparator=pair[1],
            num_seeds=len(known),
            comparator_limits_pct=float(np.mean([effect[0] for effect in known])),
            union_limits_pct=float(np.mean([effect[1] for effect in known])),
            paper=PAPER_EFFECTS.get(place) if pair == ("d0", "s2") and condition.headroom == 0 else None,
        )
    ]


def _effects(ours: Sequence[RequestRecord], theirs: Sequence[RequestRecord]) -> tuple[float, float] | None:
    """Return the change of goodput in percent within the comparator's limits and within those of the union."""
    changes = []
    for limits in (empirical_limits(theirs), empirical_limits([*ours, *theirs])):
        good = goodput(ours, limits), goodput(theirs, limits)
        if good[0] is None or good[1] is None or good[1].output_tokens_per_s == 0:
            return None
        changes.append(100 * (good[0].output_tokens_per_s / good[1].output_tokens_per_s - 1))
    return changes[0], changes[1]
