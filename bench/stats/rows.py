"""One row for each contrast: its effect, its interval, its test, corrected within its family."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from bench.arms import ceiling_of
from bench.outcome import CellOutcome, Condition, adopted
from bench.stats.conditions import labels, measured, measurements_of
from bench.stats.contrasts import Contrast, Kind, find
from bench.stats.decisions import Decision, holm, sign_flip, two_look
from bench.stats.effects import mean_ratio
from bench.stats.intervals import Interval, bootstrap, containment, paired_t, paired_t_percent


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One contrast in numbers.

    at, where: as in `Contrast`. effect: mean over seeds in `unit`, None where no seed has both sides; 100 (exp(z) - 1)
    of the mean log where the contrast is geometric. lowest, highest: of the seeds, no interval. interval: 95 %, paired
    t; in log space unless the unit is points. display: 95 % bootstrap interval of the mean. p: exact sign-flip of log
    ratios; p_relative: of the shown effects; both by the two-look rule where num_looks is 2. contained: the 90 %
    interval of 100 ln(ratio) lies within `CONTAINMENT_MARGIN`; None for points and for one seed. decision: corrected
    in `family`; None for a descriptive contrast. A contrast of a family that could not be measured counts in it with
    p = 1.
    """

    case: str
    kind: Kind
    name: str
    at: Condition
    where: str
    unit: str
    num_seeds: int
    num_planned: int
    num_looks: int = 1
    effect: float | None = None
    lowest: float | None = None
    highest: float | None = None
    num_positive: int = 0
    num_negative: int = 0
    interval: Interval | None = None
    display: Interval | None = None
    p: float | None = None
    p_relative: float | None = None
    contained: bool | None = None
    family: str | None = None
    family_size: int = 0
    decision: Decision | None = None


def analyse(outcomes: Iterable[CellOutcome], metric: str = "output_tokens_per_s") -> list[Row]:
    """Return a row for every contrast in the outcomes, in the order of `find`.

    metric: a key of `bench.metrics.METRICS` whose values are above zero; cells without it have no pair.
    """
    contrasts = find(outcomes, metric)
    rows = [_row(contrast) for contrast in contrasts]
    families: dict[str, list[int]] = {}
    for index, contrast in enumerate(contrasts):
        if contrast.family is not None:
            families.setdefault(contrast.family, []).append(index)
    for family, members in families.items():
        decisions = holm({str(index): _or_one(rows[index].p) for index in members})
        for index in members:
            rows[index] = msgspec.structs.replace(
                rows[index], family=family, family_size=len(members), decision=decisions[str(index)]
            )
    return rows


def _or_one(p: float | None) -> float:
    return 1.0 if p is None else p


def _row(contrast: Contrast) -> Row:
    effects = contrast.effects
    row = Row(
        case=contrast.case,
        kind=contrast.kind,
        name=contrast.name,
        at=contrast.at,
        where=contrast.where,
        unit="%" if contrast.geometric else effects.unit,
        num_seeds=len(effects.seeds),
        num_planned=len(contrast.planned),
        num_looks=1 if contrast.first_look is None else 2,
    )
    if not effects.seeds:
        return row
    many = len(effects.seeds) > 1
    in_logs = contrast.geometric or effects.unit == "%"
    interval = (paired_t_percent(effects.logs) if in_logs else paired_t(effects.shown)) if many else None
    percents = [float(100 * np.expm1(log)) for log in effects.logs]
    shown = percents if contrast.geometric else effects.shown
    mean = float(100 * np.expm1(np.mean(effects.logs)) if contrast.geometric else np.mean(shown))
    return msgspec.structs.replace(
        row,
        effect=mean,
        lowest=min(shown),
        highest=max(shown),
        num_positive=sum(value > 0 for value in shown),
        num_negative=sum(value < 0 for value in shown),
        interval=interval,
        display=bootstrap(shown) if many else None,
        p=_p(contrast, effects.logs),
        p_relative=_p(contrast, effects.shown),
        contained=containment(effects.logs).contained if many and in_logs else None,
    )


def _p(contrast: Contrast, effects: Sequence[float]) -> float:
    """Return the sign-flip p of the effects by seed, by the two-look rule where their case had a first look."""
    if contrast.first_look is None:
        return sign_flip(effects)
    seeds = contrast.planned[: contrast.first_look]
    first = [effect for seed, effect in zip(contrast.effects.seeds, effects, strict=True) if seed in seeds]
    return two_look(sign_flip(first) if first else 1.0, sign_flip(effects) if len(effects) > len(first) else None)


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """What an arm reaches of its engine's ceiling (memory to spare), as a mean of ratios within the seed; 1 is all."""

    case: str
    where: str
    arm: str
    ceiling: str
    num_seeds: int
    share: float


def shares_of_ceiling(outcomes: Iterable[CellOutcome], metric: str = "output_tokens_per_s") -> list[Share]:
    """Return the share for every arm that has a common seed with its ceiling at the same condition."""
    held = adopted(outcomes)
    shares = []
    for case in dict.fromkeys(outcome.case for outcome in held):
        cells = measurements_of([outcome for outcome in held if outcome.case == case], metric)
        names = labels(cells)
        for condition, arms in cells.items():
            for arm, seeds in arms.items():
                ceiling = ceiling_of(arm)
                ours, limit = measured(seeds), measured(arms.get(ceiling, {}))
                common = ours.keys() & limit.keys()
                if arm != ceiling and common:
                    shares.append(
                        Share(
                            case=case,
                            where=names[condition],
                            arm=arm,
                            ceiling=ceiling,
                            num_seeds=len(common),
                            share=mean_ratio(ours, limit),
                        )
                    )
    return shares
