"""Effects by seed: what one side of a comparison has over the other, formed within each seed and then averaged.

Each effect has two scales. `shown` is what tables print: the relative change in percent, or for an interaction the
difference of two such changes in percentage points. `logs` is what is tested: the log ratio, or the difference of two.
An interaction on the log scale is no difference of the printed percentages.
Source: paper section 4.1, appendices B.5, G.1 and G.4 (G1, G2).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TypeVar

import msgspec
import numpy as np

Key = TypeVar("Key")


class Effects(msgspec.Struct, frozen=True, kw_only=True):
    """One effect per seed. `unit`: `%`, or `pp` for an interaction."""

    seeds: tuple[int, ...]
    shown: tuple[float, ...]
    logs: tuple[float, ...]
    unit: str = "%"


def relative(numerator: Mapping[int, float], denominator: Mapping[int, float]) -> Effects:
    """Return the change from denominator to numerator for every seed that both have, in the order of the seeds.

    numerator, denominator: one measurement for each seed.

    Raises: ValueError if a measurement of a common seed is not above zero: it has no ratio.
    """
    seeds = tuple(sorted(numerator.keys() & denominator.keys()))
    for seed in seeds:
        if not (numerator[seed] > 0 and denominator[seed] > 0):
            got = f"{numerator[seed]:g} and {denominator[seed]:g}"
            raise ValueError(f"expected measurements above zero to form a ratio, got {got} at seed {seed}")
    ratios = [numerator[seed] / denominator[seed] for seed in seeds]
    return Effects(
        seeds=seeds,
        shown=tuple(100 * (ratio - 1) for ratio in ratios),
        logs=tuple(math.log(ratio) for ratio in ratios),
    )


def interaction(effects: Effects, baseline: Effects) -> Effects:
    """Return how much larger `effects` is than `baseline` for every seed that both have."""
    here, there = ({seed: index for index, seed in enumerate(side.seeds)} for side in (effects, baseline))
    seeds = tuple(sorted(here.keys() & there.keys()))
    return Effects(
        seeds=seeds,
        shown=tuple(effects.shown[here[seed]] - baseline.shown[there[seed]] for seed in seeds),
        logs=tuple(effects.logs[here[seed]] - baseline.logs[there[seed]] for seed in seeds),
        unit="pp",
    )


def mean_ratio(numerator: Mapping[int, float], denominator: Mapping[int, float]) -> float:
    """Return the mean over common seeds of the ratio within the seed: a normalized index, or a share of a ceiling.

    Raises: ValueError if there is no common seed, or as `relative`.
    """
    effects = relative(numerator, denominator)
    if not effects.seeds:
        raise ValueError("expected a seed that both sides have, got none")
    return 1 + float(np.mean(effects.shown)) / 100


def highest(measurements: Mapping[Key, Mapping[int, float]]) -> Key | None:
    """Return the key with the highest mean over the seeds that all keys have, or None if nothing was measured.

    While there is no such seed, the key with the fewest seeds, of several the last, is left out.
    """
    held = sorted(measurements, key=lambda key: len(measurements[key]), reverse=True)
    while held and not (seeds := set.intersection(*(set(measurements[key]) for key in held))):
        held.pop()
    return max(held, key=lambda key: sum(measurements[key][seed] for seed in seeds)) if held else None


def geometric_mean(values: Iterable[float]) -> float:
    """Return exp of the mean logarithm. Source: (G1)."""
    return float(np.exp(np.mean(np.log(np.asarray(list(values), dtype=np.float64)))))
