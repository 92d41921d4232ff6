"""Intervals of the mean effect over seeds.

The paired-t interval is formed on the log scale and turned into percent at the end (G3, G4); it is the interval of
verdicts. The bootstrap interval resamples seeds and is for display only: with a handful of seeds it is too narrow, and
it is neither a Holm decision nor a simultaneous bound. Source: paper appendices B.12, C-3 and G.4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from scipy import stats

BOOTSTRAP_RESAMPLES = 10_000
CONTAINMENT_MARGIN = 3.0
"""Largest |100 ln ratio| that counts as no difference. Source: paper section 4.5, Table C-3."""


class Interval(msgspec.Struct, frozen=True):
    """An estimate and the interval around it, in one unit."""

    estimate: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


def paired_t(values: Sequence[float], *, level: float = 0.95) -> Interval:
    """Return mean and t interval of differences paired by seed. Raises: ValueError for fewer than two."""
    if len(values) < 2:
        raise ValueError(f"expected at least 2 seeds for an interval, got {len(values)}")
    array = np.asarray(values, dtype=np.float64)
    mean, error = float(array.mean()), float(stats.sem(array))
    half_width = float(stats.t.ppf((1 + level) / 2, df=array.size - 1)) * error
    return Interval(mean, mean - half_width, mean + half_width)


def paired_t_percent(logs: Sequence[float], *, level: float = 0.95) -> Interval:
    """Return the interval of log ratios in percent, 100 (exp(z) - 1). Raises: ValueError as `paired_t`."""
    found = paired_t(logs, level=level)
    return Interval(*(100 * math.expm1(value) for value in (found.estimate, found.low, found.high)))


def bootstrap(values: Sequence[float], *, level: float = 0.95, seed: int = 0) -> Interval:
    """Return mean and percentile interval over `BOOTSTRAP_RESAMPLES` resamples of seeds; the same seed gives the same.

    Raises: ValueError for fewer than two values.
    """
    if len(values) < 2:
        raise ValueError(f"expected at least 2 seeds to resample, got {len(values)}")
    array = np.asarray(values, dtype=np.float64)
    found = stats.bootstrap(
        (array,),
        np.mean,
        n_resamples=BOOTSTRAP_RESAMPLES,
        confidence_level=level,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Interval(float(array.mean()), float(found.low), float(found.high))


class Containment(msgspec.Struct, frozen=True):
    """Interval of 100 ln(ratio) and whether all of it lies within the margin."""

    interval: Interval
    contained: bool


def containment(logs: Sequence[float], *, margin: float = CONTAINMENT_MARGIN, level: float = 0.90) -> Containment:
    """Test that two sides differ by no more than a margin: the t interval of 100 ln(ratio) lies in [-margin, margin].

    An interval that is not contained shows no difference by itself. Raises: ValueError as `paired_t`.
    """
    found = paired_t([100 * log for log in logs], level=level)
    return Containment(found, -margin <= found.low and found.high <= margin)
