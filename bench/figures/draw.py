"""The figures by name, their captions, and drawing them all."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from matplotlib.figure import Figure

from bench.figures.organizations import figure_2, figure_3, figure_4, figure_arms
from bench.figures.policies import figure_5, figure_6, figure_7
from bench.outcome import CellOutcome
from bench.paper_values import HARDWARE

FIGURES: dict[str, Callable[[Iterable[CellOutcome]], Figure]] = {
    "figure-2": figure_2,
    "figure-3": figure_3,
    "figure-4": figure_4,
    "figure-5": figure_5,
    "figure-6": figure_6,
    "figure-7": figure_7,
    "figure-arms": figure_arms,
}

CASES = {
    "figure-2": ("q1", "q1-low", "q4", "low"),
    "figure-3": ("q2",),
    "figure-4": ("q3",),
    "figure-5": ("q5",),
    "figure-6": ("q6",),
    "figure-7": ("q6", "q8", "q9"),
    "figure-arms": ("q1",),
}
"""The cases of which a figure has panels."""

_MARKS = f"Bars, lines and dots are measured here, diamonds are printed in the paper ({HARDWARE})."
CAPTIONS = {
    "figure-2": "Q1. Main load: throughput over S0's, formed within the seed, and mean of run-level E2E p99. Low load: "
    "throughput (bars), TTFT and E2E p99 (right axis), and over runs the range of the largest sampled number of "
    "waiting requests. The paper's seconds are an A100's; its S2 is the product of its two mean steps. " + _MARKS,
    "figure-3": "Q2. Recorded input C_once and throughput at full sharing; with nothing shared, throughput over S0's "
    "beside work over S0's. " + _MARKS,
    "figure-4": "Q3. Mean effect within the seed by the fraction of the context that is shared. " + _MARKS,
    "figure-5": "Q5. Arithmetic mean throughput by offered load, and the gap D0/S2 within the seed. Of the paper's "
    "curves only the gaps at the highest loads are printed. " + _MARKS,
    "figure-6": "Q6. Throughput by admission headroom over that of S2 without; rings mark the headroom that was "
    "chosen before. The paper's diamonds are its request rates (Table B-8). " + _MARKS,
    "figure-7": "Q7 to Q9. Depth of the adopted prefix by headroom and by retention, one mark for each seed; ledger "
    "throughput over that of S2 in isolation, geometric mean over seeds. " + _MARKS,
    "figure-arms": "Every arm at the main load, mean over seeds of its throughput over that of its own engine with "
    "memory to spare: no organization of memory can pass 1 but by chance. Not in the paper.",
}


def draw(outcomes: Iterable[CellOutcome]) -> dict[str, Figure]:
    """Return by name every figure of which something was measured.

    Its panels without a measurement say so and keep the paper's values.
    """
    held = list(outcomes)
    measured = {outcome.case for outcome in held if outcome.status == "ok"}
    return {name: make(held) for name, make in FIGURES.items() if measured.intersection(CASES[name])}
