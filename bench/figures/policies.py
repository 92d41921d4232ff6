"""Figures 5 to 7: offered load (Q5), admission headroom (Q6), depth and retention of checkpoints (Q7 to Q9)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench import paper_values
from bench.figures.series import Series, mean_ratio_or_none
from bench.figures.style import (
    OURS,
    PAPER,
    bars,
    colour,
    known_points,
    label,
    legend,
    new_figure,
    paper_marks,
    say_if_empty,
    spread_out,
    title,
)
from bench.outcome import CellOutcome
from bench.stats.contrasts import PRESELECTED_HEADROOM, arm_title
from bench.stats.effects import geometric_mean

_PAIR = ("d0", "s2")
_DEPTH = "adopted_tokens_per_request"


def figure_5(outcomes: Iterable[CellOutcome]) -> Figure:
    """Q5. Above, throughput of D0 and S2 by offered load at each budget; below, the gap D0/S2 within the seed.

    A curve is the mean over the seeds that all of its points have, as the highest loads have more; gaps use every pair.
    """
    series = Series(outcomes, "q5", over=("rate",))
    budgets = series.levels("budget") or ["b63", "b108"]
    figure, panels = new_figure(2, len(budgets), name="Figure 5: Q5, offered load")
    for place, budget in enumerate(budgets):
        rates = sorted(series.levels("rate", budget=budget))
        above, below = panels[place], panels[len(budgets) + place]
        cells = {(arm, rate): series.by_seed(arm, budget=budget, rate=rate) for arm in _PAIR for rate in rates}
        common = set.intersection(*map(set, cells.values())) if cells else set()
        for arm in _PAIR:
            curve = [float(np.mean([cells[arm, rate][seed] for seed in sorted(common)])) for rate in rates if common]
            _line(above, rates if common else [], curve, arm)
        label(above, "ab"[place] if place < 2 else "", budget, y="output tokens/s")
        say_if_empty(above, bool(common))
        gaps = [mean_ratio_or_none(cells["d0", rate], cells["s2", rate]) for rate in rates]
        _line(below, rates, [None if gap is None else 100 * (gap - 1) for gap in gaps], "d0/s2")
        printed = [e for e in paper_values.EFFECTS if (e.case, e.budget) == ("q5", budget)]
        paper_marks(below, [e.rate for e in printed], [e.effect for e in printed])
        below.axhline(0, color="#444444", linewidth=0.6)
        label(below, "cd"[place] if place < 2 else "", f"{budget}, gap", x="arrival rate [requests/s]", y="D0/S2 [%]")
        say_if_empty(below, any(gap is not None for gap in gaps))
    legend(figure)
    return figure


def _line(panel: Axes, x: Sequence[float], values: Sequence[float | None], name: str) -> None:
    places, known = known_points(x, values)
    if places:
        panel.plot(places, known, "-o", color=colour(name), markersize=4, label=f"{title(name)}, {OURS}")


def figure_6(outcomes: Iterable[CellOutcome]) -> Figure:
    """Q6. Throughput by headroom over that of S2 without headroom; rings mark headroom chosen before.

    The paper's throughputs are drawn and not printed. Its request rates are printed and stand in their place: the
    output of a seed is the same in every cell, so both have the same ratios.
    """
    series = Series(outcomes, "q6", over=("headroom",))
    budgets = series.levels("budget") or list(paper_values.HEADROOM_REQUESTS_PER_S)
    figure, panels = new_figure(1, len(budgets), name="Figure 6: Q6, admission headroom")
    for place, (panel, budget) in enumerate(zip(panels, budgets, strict=True)):
        levels = sorted(series.levels("headroom", budget=budget))
        base = series.by_seed("s2", budget=budget, headroom=0.0)
        for arm in _PAIR:
            values = [mean_ratio_or_none(series.by_seed(arm, budget=budget, headroom=f), base) for f in levels]
            _line(panel, levels, values, arm)
            chosen = PRESELECTED_HEADROOM.get(budget, {}).get(arm)
            places, known = known_points(
                levels, [v if f == chosen else None for f, v in zip(levels, values, strict=True)]
            )
            if places:
                panel.plot(places, known, "o", markersize=11, markerfacecolor="none", color=colour(arm))
            _printed_headroom(panel, budget, arm)
        label(panel, "abc"[place] if place < 3 else "", budget, x="headroom f", y="throughput / S2 at f = 0")
        say_if_empty(panel, bool(levels))
    legend(figure)
    return figure


def _printed_headroom(panel: Axes, budget: str, arm: str) -> None:
    printed = paper_values.HEADROOM_REQUESTS_PER_S.get(budget)
    if printed is not None:
        index = [rate / printed["s2"][0] for rate in printed[arm]]
        [line] = panel.plot(paper_values.HEADROOMS, index, "--D", color=colour(arm), markersize=4, linewidth=0.8)
        line.set_markerfacecolor("white")
        line.set_label(f"{arm_title(arm)}, {PAPER}")


def figure_7(outcomes: Iterable[CellOutcome]) -> Figure:
    """Q7 to Q9. (a) adopted depth of S2 by headroom, (b) by retention, (c) throughput of retention by reuse mode."""
    outcomes = list(outcomes)
    figure, panels = new_figure(1, 3, name="Figure 7: Q7 to Q9, checkpoint depth and retention")
    depth, lifetime = Series(outcomes, "q6", over=("headroom",)), Series(outcomes, "q8")
    reuse = Series(outcomes, "q9", over=("variant",))
    at_b83 = depth.budget("b83")
    ours = {f"f = {f:g}": _depths(depth, "s2", budget=at_b83, headroom=f) for f in paper_values.HEADROOM_DEPTH_TOKENS}
    printed = {f"f = {f:g}": seeds for f, seeds in paper_values.HEADROOM_DEPTH_TOKENS.items()}
    _depth_panel(panels[0], "a", f"S2 by headroom, {at_b83}", ours, printed)
    names = {arm: arm_title(arm) for arm in paper_values.RETENTION_DEPTH_TOKENS}
    ours = {name: _depths(lifetime, arm, budget=lifetime.budget("b83")) for arm, name in names.items()}
    printed = {names[arm]: seeds for arm, seeds in paper_values.RETENTION_DEPTH_TOKENS.items()}
    _depth_panel(panels[1], "b", "Producer retention", ours, printed)
    _retention_throughput(panels[2], reuse)
    legend(figure)
    return figure


def _depths(series: Series, arm: str, **fixed: object) -> list[float]:
    found = series.by_seed(arm, _DEPTH, **fixed)
    return [found[seed] for seed in sorted(found)]


def _depth_panel(
    panel: Axes, letter: str, what: str, ours: Mapping[str, Sequence[float]], printed: Mapping[str, Sequence[float]]
) -> None:
    """Draw one column for each group: our seeds as dots, the paper's three as diamonds."""
    for place, name in enumerate(printed):
        values = ours.get(name, [])
        panel.plot([place - 0.1] * len(values), values, "o", color=colour("s2"), label=OURS if values else None)
        paper_marks(panel, [place + 0.1] * len(printed[name]), printed[name])
    panel.set_xticks(range(len(printed)), list(printed))
    panel.set_xlim(-0.6, len(printed) - 0.4)
    panel.set_ylim(bottom=0)
    label(panel, letter, what, y="adopted depth [tokens/request]")
    say_if_empty(panel, any(ours.values()))


def _retention_throughput(panel: Axes, reuse: Series) -> None:
    """Draw geometric means over that of S2 in isolation, and our seeds as dots."""
    metric, modes = "ledger_output_tokens_per_s", list(paper_values.RETENTION_GEOMEANS)
    arms = ("s2", "s2-retained")
    budget = reuse.budget("b83")
    base = reuse.by_seed("s2", metric, budget=budget, variant="isolate")
    unit = geometric_mean(base.values()) if base else None
    paper_unit = paper_values.RETENTION_GEOMEANS["isolate"]["s2"]
    positions, width = spread_out(len(modes), len(arms))
    for arm, at in zip(arms, positions, strict=True):
        seeds = [list(reuse.by_seed(arm, metric, budget=budget, variant=mode).values()) for mode in modes]
        if unit is not None:
            bars(panel, at, [geometric_mean(row) / unit if row else None for row in seeds], arm, width=width)
            for place, row in zip(at, seeds, strict=True):
                panel.plot([place] * len(row), np.asarray(row) / unit, ".", color="#222222", markersize=4)
        paper_marks(panel, at, [paper_values.RETENTION_GEOMEANS[mode][arm] / paper_unit for mode in modes])
    panel.set_xticks(range(len(modes)), modes)
    label(panel, "c", "Ledger throughput, geometric mean", x="reuse mode", y="over S2, isolated")
    say_if_empty(panel, unit is not None)
