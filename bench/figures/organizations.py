"""Figures 2 to 4: what S1 and S2 bring over S0 (Q1), with which work (Q2), and what sharing makes of it (Q3)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench import paper_values
from bench.figures.series import THROUGHPUT, Series, mean_ratio_or_none
from bench.figures.style import (
    OURS,
    bars,
    colour,
    known_points,
    label,
    legend,
    new_figure,
    paper_marks,
    say_if_empty,
    spread_out,
)
from bench.outcome import CellOutcome
from bench.stats.contrasts import arm_title
from bench.stats.rows import shares_of_ceiling
from bench.stats.targets import is_main_load

SHARED = ("s0", "s1", "s2")
_MS_PER_S = 1_000.0


def figure_2(outcomes: Iterable[CellOutcome]) -> Figure:
    """Q1. (a) throughput over S0's within the seed, (b) E2E p99, both at the main load; (c), (d) low load."""
    outcomes = list(outcomes)
    main, low = Series(outcomes, "q1", "q4"), Series(outcomes, "q1-low", "low")
    figure, panels = new_figure(2, 2, name="Figure 2: Q1, main and low offered load")
    _main_throughput(panels[0], main)
    _main_latency(panels[1], main)
    for panel, letter, place in zip(panels[2:], "cd", (0, 1), strict=True):
        budgets = low.levels("budget") or list(paper_values.LOW_LOAD_TTFT_P99_S)
        _low_load(panel, letter, low, budgets[place] if place < len(budgets) else None)
    legend(figure)
    return figure


def _budgets(series: Series, printed: Iterable[str]) -> list[str]:
    return series.levels("budget") or list(printed)


def _main_throughput(panel: Axes, main: Series) -> None:
    budgets = _budgets(main, ("b63", "b83", "b108"))
    positions, width = spread_out(len(budgets), len(SHARED))
    for arm, at in zip(SHARED, positions, strict=True):
        index = [
            mean_ratio_or_none(main.by_seed(arm, budget=budget), main.by_seed("s0", budget=budget))
            for budget in budgets
        ]
        bars(panel, at, index, arm, width=width)
        paper_marks(panel, at, [_printed_index(arm, budget) for budget in budgets])
    absolute = [main.mean("s0", budget=budget) for budget in budgets]
    names = [
        budget if mean is None else f"{budget}\nS0: {mean:.0f} tokens/s"
        for budget, mean in zip(budgets, absolute, strict=True)
    ]
    panel.set_xticks(range(len(budgets)), names, fontsize=8)
    label(panel, "a", "Main throughput", y="throughput / S0 (within the seed)")
    say_if_empty(panel, bool(main))


def _printed_index(arm: str, budget: str) -> float | None:
    """Return the paper's index: exact for S0 and S1; for S2 the product of two mean steps, as no index is printed."""
    steps = {
        effect.name: 1 + effect.effect / 100
        for effect in paper_values.EFFECTS
        if (effect.case, effect.budget) == ("q1", budget)
    }
    if "S1/S0" not in steps:
        return None
    return {"s0": 1.0, "s1": steps["S1/S0"], "s2": steps["S1/S0"] * steps["S2/S1"]}[arm]


def _main_latency(panel: Axes, main: Series) -> None:
    budgets = _budgets(main, ("b63", "b83", "b108"))
    positions, width = spread_out(len(budgets), len(SHARED))
    for arm, at in zip(SHARED, positions, strict=True):
        bars(panel, at, [_seconds(main.mean(arm, "e2e_p99_ms", budget=budget)) for budget in budgets], arm, width=width)
    panel.set_xticks(range(len(budgets)), budgets)
    label(panel, "b", "Main E2E p99 (the paper prints no values)", y="seconds, mean of run p99")
    say_if_empty(panel, bool(main))


def _low_load(panel: Axes, letter: str, low: Series, budget: str | None) -> None:
    if budget is None:
        label(panel, letter, "Low load, second budget")
        say_if_empty(panel, False)
        return
    at = range(len(SHARED))
    for place, arm in zip(at, SHARED, strict=True):
        bars(panel, [place], [low.mean(arm, budget=budget)], arm, width=0.6)
    panel.set_xticks(at, [_waiting_text(low, arm, budget) for arm in SHARED], fontsize=7)
    label(panel, letter, f"Low load, {budget}", y="output tokens/s")
    right = panel.twinx()
    right.set_ylabel("seconds")
    for metric, marker, name in (("ttft_p99_ms", "d", "TTFT p99"), ("e2e_p99_ms", "o", "E2E p99")):
        values = [_seconds(low.mean(arm, metric, budget=budget)) for arm in SHARED]
        places, known = known_points(list(at), values)
        if places:
            right.plot(places, known, marker, color="#222222", markersize=5, label=f"{name}, {OURS}")
    printed = paper_values.LOW_LOAD_TTFT_P99_S.get(budget, {})
    paper_marks(right, list(at), [printed.get(arm) for arm in SHARED])
    right.set_ylim(bottom=0)
    say_if_empty(panel, bool(low))


def _waiting_text(low: Series, arm: str, budget: str) -> str:
    """Return the cell of the micro-table: largest sampled number of waiting requests, ours and the paper's."""
    ours = low.range(arm, "waiting_max", budget=budget)
    printed = paper_values.LOW_LOAD_WAITING_MAX.get(budget, {}).get(arm)
    lines = [arm_title(arm), f"waiting max: {_range_text(ours)}", f"paper: {_range_text(printed)}"]
    return "\n".join(lines)


def _range_text(found: tuple[float, float] | None) -> str:
    if found is None:
        return "-"
    low, high = found
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def figure_3(outcomes: Iterable[CellOutcome]) -> Figure:
    """Q2. (a) recorded input and throughput at the anchors; (b) throughput over S0's without sharing."""
    series = Series(outcomes, "q2", over=("q",))
    figure, panels = new_figure(1, 2, name="Figure 3: Q2, recorded work and the no-sharing control")
    _recorded_input(panels[0], series)
    _no_sharing(panels[1], series)
    legend(figure)
    return figure


def _recorded_input(panel: Axes, series: Series) -> None:
    budgets = series.levels("budget", q=1.0) or list(paper_values.C_ONCE_TOKENS)
    positions, width = spread_out(len(budgets), len(SHARED))
    right = panel.twinx()
    right.set_ylabel("output tokens/s")
    for arm, at in zip(SHARED, positions, strict=True):
        inputs = [series.mean(arm, "c_once_tokens", budget=budget, q=1.0) for budget in budgets]
        bars(panel, at, [None if tokens is None else tokens / 1e3 for tokens in inputs], arm, width=width)
        printed = [paper_values.C_ONCE_TOKENS.get(budget, {}).get(arm) for budget in budgets]
        paper_marks(panel, at, [None if tokens is None else tokens / 1e3 for tokens in printed])
        rates = [series.mean(arm, THROUGHPUT, budget=budget, q=1.0) for budget in budgets]
        places, known = known_points(at, rates)
        if places:
            right.plot(places, known, "^", color="#222222", markerfacecolor="none", label=f"throughput, {OURS}")
    panel.set_xticks(range(len(budgets)), budgets)
    label(panel, "a", "Recorded input work", y="C_once [1,000 tokens a run]")
    right.set_ylim(bottom=0)
    say_if_empty(panel, bool(series.levels("budget", q=1.0)))


def _no_sharing(panel: Axes, series: Series) -> None:
    found = series.levels("budget", q=0.0)
    budget = found[0] if found else "b83"
    at = list(range(len(SHARED)))
    base = series.by_seed("s0", "c_once_tokens", budget=budget, q=0.0)
    work = [mean_ratio_or_none(series.by_seed(arm, "c_once_tokens", budget=budget, q=0.0), base) for arm in SHARED]
    bars(panel, at, work, "C_once over S0", width=0.5)
    plain = series.by_seed("s0", budget=budget, q=0.0)
    index = [mean_ratio_or_none(series.by_seed(arm, budget=budget, q=0.0), plain) for arm in SHARED]
    places, known = known_points(at, index)
    if places:
        panel.plot(places, known, "-o", color=colour("s2"), label=f"throughput over S0, {OURS}")
    if budget == "b83":
        paper_marks(panel, at, [paper_values.NO_SHARING_INDEX[arm] for arm in SHARED])
    panel.set_xticks(at, [arm_title(arm) for arm in SHARED])
    label(panel, "b", f"Nothing shared (q = 0), {budget}", y="over S0, within the seed")
    say_if_empty(panel, bool(found))


def figure_arms(outcomes: Iterable[CellOutcome]) -> Figure:
    """Every arm at the main load as a share of its engine's ceiling, by budget. Not in the paper."""
    shares = shares_of_ceiling(o for o in outcomes if o.case == "q1" and is_main_load(o.condition))
    figure, (panel,) = new_figure(1, 1, name="All arms at the main load")
    figure.set_size_inches(9, 3.6)
    arms, places = (list(dict.fromkeys(getattr(share, field) for share in shares)) for field in ("arm", "where"))
    positions, width = spread_out(len(arms), max(1, len(places)))
    for place, at in zip(places, positions, strict=False):
        found = {share.arm: share.share for share in shares if share.where == place}
        panel.bar(*known_points(list(at), [found.get(arm) for arm in arms]), width=0.9 * width, label=place)
    panel.axhline(1, color="#444444", linewidth=0.6)
    panel.set_xticks(range(len(arms)), [arm_title(arm) for arm in arms], fontsize=8)
    label(panel, "a", "Share of the ceiling (the same engine with memory to spare)", y="throughput / ceiling")
    say_if_empty(panel, bool(shares))
    legend(figure)
    return figure


_PAIRS = (("s1", "s0"), ("s2", "s1"))


def figure_4(outcomes: Iterable[CellOutcome]) -> Figure:
    """Q3. What S1 has over S0 and S2 over S1 by the common-prefix fraction."""
    series = Series(outcomes, "q3", over=("q",))
    figure, (panel,) = new_figure(1, 1, name="Figure 4: Q3, effect of a shared context")
    levels = sorted(series.levels("q")) or [0.0, 1.0]
    budget = series.budget("b83")
    positions, width = spread_out(len(levels), len(_PAIRS))
    for pair, at in zip(_PAIRS, positions, strict=True):
        bars(panel, at, _pair_effects(series, pair, budget, levels), "/".join(pair), width=width)
        name = "/".join(map(arm_title, pair))
        printed = {
            effect.q: effect.effect
            for effect in paper_values.EFFECTS
            if (effect.case, effect.name, effect.budget) == ("q3", name, budget)
        }
        paper_marks(panel, at, [printed.get(q) for q in levels])
    panel.axhline(0, color="#444444", linewidth=0.6)
    panel.set_xticks(range(len(levels)), [f"q = {q:g}" for q in levels])
    label(panel, "a", budget, x="shared-context fraction", y="throughput effect [%]")
    say_if_empty(panel, bool(series))
    legend(figure)
    return figure


def _pair_effects(series: Series, pair: tuple[str, str], budget: str, levels: Sequence[float]) -> list[float | None]:
    ratios = [mean_ratio_or_none(*(series.by_seed(arm, budget=budget, q=q) for arm in pair)) for q in levels]
    return [None if ratio is None else 100 * (ratio - 1) for ratio in ratios]


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / _MS_PER_S
