"""Tests and the correction of their families.

A sign-flip test assumes independent seeds and effects that are symmetric about zero when there is none. With n seeds it
cannot find a p below 2 / 2^n, whatever the effect: three seeds reach 0.25. Rejections in two families together keep no
common error rate. Source: paper appendix B.5 (sign-flip, B1, Holm).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from scipy import stats
from statsmodels.stats.multitest import multipletests

from bench.cases import MOST_SEEDS

LEVEL = 0.05
_ROUNDING = 1e-12


def sign_flip(effects: Sequence[float]) -> float:
    """Return the share of all 2^n sign assignments whose |mean| is at least the observed one: exact and two-sided.

    Raises: ValueError for no effect, or more than `MOST_SEEDS`.
    """
    values = np.asarray(effects, dtype=np.float64)
    if not 1 <= values.size <= MOST_SEEDS:
        raise ValueError(f"expected 1 to {MOST_SEEDS} effects to enumerate, got {values.size}")
    if values.size == 1:
        return 1.0
    found = stats.permutation_test(
        (values,), _absolute_mean, permutation_type="samples", n_resamples=np.inf, alternative="greater"
    )
    # Counted here because scipy's allowance for rounding is relative to the observed mean, and too small when effects
    # cancel to nothing: (0.3, -0.1, -0.6, ...) that sum to zero must give 1.
    allowed = _ROUNDING * np.abs(values).mean()
    return float(np.mean(found.null_distribution >= _absolute_mean(values) - allowed))


def _absolute_mean(values: np.ndarray, axis: int = -1) -> np.ndarray:
    means: np.ndarray = np.abs(np.mean(values, axis=axis))
    return means


def least_p(num_seeds: int) -> float:
    """Return the smallest p that a sign-flip test of so many seeds can give."""
    return min(1.0, 2.0 ** (1 - num_seeds))


def two_look(first_p: float, second_p: float | None = None) -> float:
    """Return the p of a contrast that was or could have been looked at twice: min(1, 2 min(first, second)).

    second_p: None if the second look was not made; it then counts as 1. Source: (B1), six and nine seeds.
    """
    return min(1.0, 2 * min(first_p, 1.0 if second_p is None else second_p))


class Decision(msgspec.Struct, frozen=True):
    """One test of a family: its own p, the p adjusted for the family, and whether it is rejected at `LEVEL`."""

    p: float
    adjusted_p: float
    rejected: bool


def holm(p_values: Mapping[str, float]) -> dict[str, Decision]:
    """Correct one family by Holm's step-down rule. Names and order are kept."""
    if not p_values:
        return {}
    rejected, adjusted, _, _ = multipletests(list(p_values.values()), alpha=LEVEL, method="holm")
    triples = zip(p_values.items(), adjusted, rejected, strict=True)
    return {name: Decision(p, float(adjusted_p), bool(is_rejected)) for (name, p), adjusted_p, is_rejected in triples}


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """One way to treat a doubtful run, with the whole family corrected again."""

    name: str
    decisions: dict[str, Decision]

    @property
    def num_rejected(self) -> int:
        return sum(decision.rejected for decision in self.decisions.values())


def adoption_scenarios(p_values: Mapping[str, float], without: Mapping[str, float]) -> list[Scenario]:
    """Return the family under three treatments of a run that was replaced by a later attempt.

    A adopts the later attempt. B leaves its seed out of the affected contrasts. C takes those contrasts as not
    estimable: p = 1, and they stay in the family. p_values: the family with the attempt adopted. without: the affected
    contrasts with the seed left out. Source: Tables B-6 and E-17.

    Raises: ValueError if an affected contrast is not in the family.
    """
    if unknown := without.keys() - p_values.keys():
        raise ValueError(f"expected affected contrasts out of the family, got {', '.join(sorted(unknown))}")
    return [
        Scenario(name="A: adopt the later attempt", decisions=holm(p_values)),
        Scenario(name="B: leave the seed out", decisions=holm({**p_values, **without})),
        Scenario(
            name="C: affected contrasts not estimable", decisions=holm({**p_values, **dict.fromkeys(without, 1.0)})
        ),
    ]
