"""Planned arrival times: seeded, at the offered rate, silent where they should be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.arrivals import NS_PER_S, ArrivalProcess, AtOnce, OnOff, Poisson, make_arrivals
from sgl_hybrid.errors import SettingError


@pytest.mark.parametrize("process", [Poisson(3.0), OnOff(1.7), AtOnce()])
def test_same_seed_same_plan_and_a_longer_plan_begins_with_the_shorter(process: ArrivalProcess) -> None:
    plan = process.offsets_ns(300, seed=42000)
    assert process.offsets_ns(300, seed=42000) == plan
    assert process.offsets_ns(40, seed=42000) == plan[:40]
    assert plan == sorted(plan)
    assert len(plan) == 300
    assert isinstance(process, AtOnce) or process.offsets_ns(300, seed=42001) != plan


def test_poisson_gaps_are_exponential() -> None:
    gaps_s = np.diff(Poisson(4.0).offsets_ns(40_001, seed=1)) / NS_PER_S
    assert gaps_s.mean() == pytest.approx(1 / 4.0, rel=0.02)
    assert gaps_s.std() == pytest.approx(1 / 4.0, rel=0.03)  # an exponential's deviation is its mean
    assert np.quantile(gaps_s, 0.5) == pytest.approx(np.log(2) / 4.0, rel=0.03)


def test_rate_only_stretches_the_plan() -> None:
    slow, fast = (np.array(Poisson(rate).offsets_ns(100, seed=5)) for rate in (1.0, 4.0))
    assert np.allclose(slow, 4 * fast, atol=4)  # ns of rounding


def test_bursts_keep_the_mean_rate_and_the_silence() -> None:
    process = OnOff(rate_per_s=1.7, on_s=5, off_s=15)
    offsets_s = np.array(process.offsets_ns(20_000, seed=3)) / NS_PER_S
    phase_s = offsets_s % 20
    assert phase_s.max() <= 5
    assert len(offsets_s) / offsets_s[-1] == pytest.approx(1.7, rel=0.02)
    inside = np.diff(offsets_s)[np.floor(offsets_s[1:] / 20) == np.floor(offsets_s[:-1] / 20)]
    assert 1 / inside.mean() == pytest.approx(6.8, rel=0.05)  # the paper's rate within a burst


@given(on_s=st.floats(0.1, 50), off_s=st.floats(0, 50), rate=st.floats(0.05, 100), seed=st.integers(0, 2**31))
def test_no_burst_length_breaks_order_or_silence(on_s: float, off_s: float, rate: float, seed: int) -> None:
    offsets = OnOff(rate, on_s, off_s).offsets_ns(50, seed)
    period_ns = (on_s + off_s) * NS_PER_S
    assert offsets == sorted(offsets)
    assert all(
        offset % period_ns <= on_s * NS_PER_S + 1_000 or period_ns - offset % period_ns < 1_000 for offset in offsets
    )


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("uniform", {"rate_per_s": 3.0}, "expected arrivals of poisson, onoff or at-once, got 'uniform'"),
        ("poisson", {"rate_per_s": 0.0}, "expected a rate above 0 requests/s, got 0.0 requests/s"),
        ("poisson", {"rate_per_s": float("nan")}, "expected a rate above 0 requests/s, got nan"),
        ("poisson", {"rate_per_s": float("inf")}, "expected a rate above 0 requests/s, got inf"),
        ("onoff", {"rate_per_s": -1.0}, "expected a mean rate above 0 requests/s, got -1.0"),
        ("onoff", {"rate_per_s": 1.0, "on_s": 0.0}, "expected a burst length above 0 s, got 0.0 s"),
        ("onoff", {"rate_per_s": 1.0, "off_s": -2.0}, "expected a pause of at least 0 s, got -2.0 s"),
    ],
)
def test_bad_settings_say_what_was_expected(name: str, options: dict[str, float], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        make_arrivals(name, **options)


def test_names_give_the_processes() -> None:
    assert make_arrivals("poisson", rate_per_s=3.0) == Poisson(3.0)
    assert make_arrivals("onoff", rate_per_s=1.7) == OnOff(1.7, 5.0, 15.0)
    assert make_arrivals("at-once", rate_per_s=3.0) == AtOnce()
