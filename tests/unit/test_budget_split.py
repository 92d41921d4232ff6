"""The automatic D0 split: the minimax of stranded bytes, and its distance from the paper's fractions."""

from __future__ import annotations

from fractions import Fraction

import pytest

from sgl_hybrid.errors import SettingError
from sgl_hybrid.memory import StateGeometry
from sgl_hybrid.memory.presets import PRESETS, model_geometry
from sgl_hybrid.memory.split import (
    PAPER_FRACTIONS,
    attention_share,
    auto_fraction,
    mix_range,
    resolve_fraction,
    stranded_share,
    worst_stranded_share,
)

FALCON, GRANITE = model_geometry("falcon-h1-7b"), model_geometry("granite-4.0-h-micro")


@pytest.mark.parametrize(
    ("geometry", "auto", "distance"),
    [(FALCON, 0.523429, -0.003954), (GRANITE, 0.209718, 0.010019)],
    ids=["falcon", "granite"],
)
def test_auto_is_close_to_the_papers_screened_fractions(geometry: StateGeometry, auto: float, distance: float) -> None:
    fraction = auto_fraction(geometry)
    assert float(fraction) == pytest.approx(auto, abs=1e-6)
    assert float(fraction - PAPER_FRACTIONS[geometry.family]) == pytest.approx(distance, abs=1e-6)


def test_the_range_is_half_to_twice_the_balance_point() -> None:
    assert mix_range(FALCON) == (896, 3584)
    assert mix_range(GRANITE) == (384, 1536)


def test_attention_share_counts_the_layers_that_have_it() -> None:
    assert attention_share(FALCON, 1557) == Fraction(1, 2)
    assert attention_share(GRANITE, 0) == 0
    assert attention_share(GRANITE, 512) == Fraction(512 * 2048 * 4, 512 * 2048 * 4 + 36 * 1_074_688)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_no_other_fraction_has_a_smaller_worst_case(name: str) -> None:
    geometry = model_geometry(name)
    auto = auto_fraction(geometry)
    best = worst_stranded_share(geometry, auto)
    assert all(worst_stranded_share(geometry, Fraction(i, 500)) >= best for i in range(1, 500))
    # Inside the range nothing is worse than at its ends.
    low, high = mix_range(geometry)
    inside = (low + (high - low) * Fraction(i, 50) for i in range(51))
    assert max(stranded_share(auto, attention_share(geometry, tokens)) for tokens in inside) == best


def test_a_mix_of_one_kind_strands_the_other_pool() -> None:
    fraction = Fraction(3, 5)
    assert stranded_share(fraction, Fraction(1)) == 1 - fraction
    assert stranded_share(fraction, Fraction(0)) == fraction
    assert stranded_share(fraction, fraction) == 0


def test_a_range_of_the_caller_is_used_and_checked() -> None:
    point = (Fraction(1557), Fraction(1557))
    assert auto_fraction(FALCON, point) == Fraction(1, 2)
    for bad in ((Fraction(0), Fraction(1)), (Fraction(2), Fraction(1))):
        with pytest.raises(SettingError, match="expected a range 0 < low <= high of tokens per checkpoint"):
            auto_fraction(FALCON, bad)


def test_a_setting_means_what_was_written() -> None:
    nemotron = model_geometry("nemotron-h-8b")
    assert resolve_fraction(FALCON, None) == resolve_fraction(FALCON, "paper") == Fraction(527383, 10**6)
    assert resolve_fraction(nemotron, None) == auto_fraction(nemotron)
    assert resolve_fraction(FALCON, "auto") == auto_fraction(FALCON)
    assert resolve_fraction(FALCON, 0.1) == resolve_fraction(FALCON, "0.1") == Fraction(1, 10)
    with pytest.raises(SettingError, match=r"for the paper's split, got nemotron_h; nearest: auto"):
        resolve_fraction(nemotron, "paper")


@pytest.mark.parametrize("setting", [0, 1, -0.5, 1.5, "half", "", "1/0", float("nan"), float("inf")])
def test_a_fraction_outside_zero_and_one_is_refused(setting: float | str) -> None:
    with pytest.raises(SettingError, match="expected an attention fraction above 0 and below 1, auto or paper, got"):
        resolve_fraction(FALCON, setting)
