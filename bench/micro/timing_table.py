"""The table of times: samples of every arm, their ratio to the contiguous kernel, and what that says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

BASELINE = "contiguous"
EARLY = "paged, early start"


class Measurement(NamedTuple):
    """One arm of one case.

    samples_us: microseconds per launch, one per round. total_bytes: modelled, per launch. absent: why there are none.
    """

    arm: str
    state: str
    batch: int
    order: str
    samples_us: list[float]
    total_bytes: int
    absent: str = ""


def timing_table(measurements: Sequence[Measurement], copy_rate: float) -> str:
    """Return the table of times and, below it, what the numbers say about the goals.

    copy_rate: bytes read and written per second by a device copy of the same run.
    """
    baselines = {(m.state, m.batch, m.order): m.samples_us for m in measurements if m.arm == BASELINE}
    lines = [
        "## Times",
        "",
        f"Copy bandwidth of this run: {copy_rate / 1e9:.0f} GB/s, read and written. One launch is one layer, on states",
        "that are in no cache. Time: median (lowest to highest) of the rounds. Ratio: the time over the contiguous",
        "kernel's in the same round, median over the rounds.",
        "",
        "| state | batch | pages | arm | us per launch | MB | share of copy bandwidth | ratio to contiguous |",
        "|---|--:|---|---|--:|--:|--:|--:|",
    ]
    for m in measurements:
        case = f"| {m.state} | {m.batch} | {m.order} | {m.arm} "
        if not m.samples_us:
            lines.append(f"{case}| absent: {m.absent} | | | |")
            continue
        time_us = median(m.samples_us)
        spread = f"{time_us:.2f} ({min(m.samples_us):.2f} to {max(m.samples_us):.2f})"
        ratio = ratio_to(m.samples_us, baselines[m.state, m.batch, m.order])
        lines.append(f"{case}| {spread} | {m.total_bytes / 1e6:.2f} | {_share(m, copy_rate):.1%} | {ratio:.3f} |")
    return "\n".join([*lines, "", "## Goals", "", *_goals(measurements, copy_rate, baselines)]) + "\n"


def ratio_to(samples: Sequence[float], baseline: Sequence[float]) -> float:
    """Return the median ratio of paired samples."""
    return median(sample / base for sample, base in zip(samples, baseline, strict=True))


def _share(measurement: Measurement, copy_rate: float) -> float:
    return measurement.total_bytes / (median(measurement.samples_us) * 1e-6) / copy_rate


def _goals(
    measurements: Sequence[Measurement], copy_rate: float, baselines: dict[tuple[str, int, str], list[float]]
) -> list[str]:
    paged = {(m.state, m.batch, m.order): m for m in measurements if m.arm == "paged"}
    stock = {(m.state, m.batch, m.order): m for m in measurements if m.arm == "stock" and m.samples_us}
    large = [ratio_to(m.samples_us, baselines[case]) for case, m in paged.items() if case[1] >= 8]
    shares = [_share(m, copy_rate) for case, m in paged.items() if case[1] == 64]
    early = {(m.state, m.batch, m.order): m for m in measurements if m.arm == EARLY and m.samples_us}
    slower = [ratio_to(paged[case].samples_us, m.samples_us) for case, m in stock.items()]
    slower_early = [ratio_to(early[case].samples_us, m.samples_us) for case, m in stock.items() if case in early]
    return [
        _goal("paged within 2 % of contiguous from batch 8 on", large, lambda worst: worst <= 1.02, max, "{:.3f}"),
        _goal("85 % of the copy bandwidth at batch 64", shares, lambda worst: worst >= 0.85, min, "{:.1%}"),
        _goal("not slower than stock anywhere", slower, lambda worst: worst <= 1.0, max, "{:.3f}"),
        _goal("the same with the early start", slower_early, lambda worst: worst <= 1.0, max, "{:.3f}"),
    ]


def _goal(
    text: str,
    values: list[float],
    holds: Callable[[float], bool],
    worst_of: Callable[[list[float]], float],
    layout: str,
) -> str:
    if not values:
        return f"- {text}: not measured"
    worst = worst_of(values)
    return f"- {text}: {'met' if holds(worst) else 'NOT met'} (worst {layout.format(worst)})"
