"""What the figures show: our values where we measured, the paper's beside, and a word where nothing was measured."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench import paper_values
from bench.cases import CASES as REGISTERED
from bench.figures import CAPTIONS, FIGURES, draw, to_svg
from bench.figures.draw import CASES
from bench.figures.series import Series
from bench.figures.style import OURS, PAPER
from bench.outcome import CellOutcome
from tests.unit import outcomes


def cells(case: str, throughputs: Mapping[str, Sequence[float]], **changes: Any) -> list[CellOutcome]:
    """One cell for each arm and seed 1, 2, ...; latencies and counters follow from the throughput."""
    return [
        msgspec.structs.replace(
            cell,
            metrics={
                "output_tokens_per_s": tokens,
                "ledger_output_tokens_per_s": tokens / 2,
                "e2e_p99_ms": 1_000 * tokens,
                "ttft_p99_ms": 100 * tokens,
                "waiting_max": float(cell.seed - 1),
                "c_once_tokens": 1_000 * tokens,
                "adopted_tokens_per_request": 10 * tokens,
            },
        )
        for cell in outcomes.cells(case, throughputs, **changes)
        for tokens in cell.metrics.values()
    ]


def heights(panel: Axes) -> list[list[float]]:
    """The bars of a panel, series by series."""
    return [[bar.get_height() for bar in group] for group in panel.containers]


def points(panel: Axes, name: str) -> list[tuple[float, float]]:
    """All points that carry this label, in order."""
    return [
        (float(x), float(y))
        for line in panel.get_lines()
        if line.get_label() == name
        for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)
    ]


def texts(figure: Figure) -> str:
    words = [text.get_text() for panel in figure.axes for text in panel.texts]
    return " | ".join([*words, *(tick.get_text() for panel in figure.axes for tick in panel.get_xticklabels())])


def legend_of(figure: Figure) -> set[str]:
    return {text.get_text() for legend in figure.legends for text in legend.get_texts()}


THREE = {"s0": [100.0, 200.0], "s1": [150.0, 280.0], "s2": [165.0, 330.0]}


def test_figure_2_main_load() -> None:
    figure = FIGURES["figure-2"](cells("q1", THREE) + cells("q1", THREE, budget="b83"))
    throughput, latency, *_ = figure.axes
    assert heights(throughput) == [pytest.approx(row) for row in ([1.0, 1.0], [1.45, 1.45], [1.65, 1.65])]
    assert heights(latency) == [pytest.approx(row) for row in ([150, 150], [215, 215], [247.5, 247.5])]
    printed = sorted(y for _, y in points(throughput, PAPER))
    assert printed == pytest.approx([1, 1, 1.47568, 1.51784, 1.51784 * 1.08929, 1.47568 * 1.12628], abs=1e-9)
    assert "S0: 150 tokens/s" in texts(figure)
    assert {"S0", "S1", "S2", PAPER} <= legend_of(figure)
    assert texts(figure).count("not measured here") == 2  # the two panels of the low load


def test_figure_2_low_load() -> None:
    figure = FIGURES["figure-2"](cells("q1-low", THREE, rate=0.8))
    panel, right = figure.axes[2], figure.axes[4]
    assert heights(panel) == [[150.0], [215.0], [247.5]]
    assert [y for _, y in points(right, f"TTFT p99, {OURS}")] == pytest.approx([15, 21.5, 24.75])
    assert [y for _, y in points(right, f"E2E p99, {OURS}")] == pytest.approx([150, 215, 247.5])
    assert [y for _, y in points(right, PAPER)] == [3.687, 0.578, 0.686]
    assert "S0\nwaiting max: 0 to 1\npaper: 3 to 5" in texts(figure)


def test_figure_3() -> None:
    shared = cells("q2", THREE) + cells("q2", THREE, budget="b108", rate=4.5)
    alone = cells("q2", {"s0": [100.0], "s1": [140.0], "s2": [140.0]}, budget="b83", q=0.0)
    figure = FIGURES["figure-3"](shared + alone)
    recorded, control, right = figure.axes
    assert heights(recorded) == [[150.0, 150.0], [215.0, 215.0], [247.5, 247.5]]
    assert [y for _, y in points(recorded, PAPER)] == pytest.approx(
        [766.2523, 697.815, 702.7643, 498.4763, 612.4817, 430.039]
    )
    assert [y for _, y in points(right, f"throughput, {OURS}")] == [150.0, 150.0, 215.0, 215.0, 247.5, 247.5]
    assert heights(control) == [pytest.approx([1.0, 1.4, 1.4])]
    assert [y for _, y in points(control, f"throughput over S0, {OURS}")] == pytest.approx([1.0, 1.4, 1.4])
    assert [y for _, y in points(control, PAPER)] == [1.0, 1.379451456, 1.415129435]


def test_figure_4() -> None:
    outcomes = cells("q3", THREE, budget="b83", q=1.0) + cells(
        "q3", {"s0": [100.0], "s1": [130.0], "s2": [143.0]}, budget="b83", q=0.0
    )
    [panel] = FIGURES["figure-4"](outcomes).axes
    assert heights(panel) == [pytest.approx([30.0, 45.0]), pytest.approx([10.0, 100 * (1.1 + 330 / 280) / 2 - 100])]
    assert [y for _, y in points(panel, PAPER)] == [37.945, 47.568, 2.586, 12.628]


def test_figure_5_draws_curves_over_common_seeds_and_gaps_over_all_pairs() -> None:
    outcomes = [
        *cells("q5", {"d0": [80.0], "s2": [100.0]}, rate=0.8),
        *cells("q5", {"d0": [180.0, 400.0], "s2": [200.0, 400.0]}, rate=3.0),
    ]
    above, below = FIGURES["figure-5"](outcomes).axes
    assert points(above, f"D0, {OURS}") == [(0.8, 80.0), (3.0, 180.0)]
    assert points(above, f"S2, {OURS}") == [(0.8, 100.0), (3.0, 200.0)]
    assert points(below, f"D0/S2, {OURS}") == [(0.8, pytest.approx(-20.0)), (3.0, pytest.approx(-5.0))]
    assert points(below, PAPER) == [(3.0, 3.64)]


def test_figure_6_marks_the_headroom_chosen_before() -> None:
    outcomes = [
        outcome
        for f, s2 in ((0.0, 100.0), (0.27, 120.0))
        for outcome in cells("q6", {"d0": [90.0, 95.0], "s2": [s2, s2]}, headroom=f)
    ]
    [panel] = FIGURES["figure-6"](outcomes).axes
    assert points(panel, f"S2, {OURS}") == [(0.0, 1.0), (0.27, pytest.approx(1.2))]
    assert points(panel, f"D0, {OURS}") == [(0.0, pytest.approx(0.925)), (0.27, pytest.approx(0.925))]
    rings = [tuple(map(float, line.get_xdata())) for line in panel.get_lines() if line.get_markersize() == 11]
    assert rings == [(0.0,), (0.27,)]  # D0 at 0, S2 at 0.27
    assert points(panel, f"S2, {PAPER}")[-1] == (0.35, pytest.approx(2.0430 / 1.8381))
    assert points(panel, f"D0, {PAPER}")[0] == (0.0, pytest.approx(1.9182 / 1.8381))


def test_figure_7() -> None:
    outcomes = [
        *cells("q6", {"s2": [100.0, 120.0]}, budget="b83", headroom=0.0),
        *cells("q6", {"s2": [200.0, 220.0]}, budget="b83", headroom=0.19),
        *cells("q8", {"s2": [100.0], "s2-retained": [200.0]}, budget="b83", variant="share"),
        *cells("q9", {"s2": [200.0, 200.0], "s2-retained": [200.0, 400.0]}, budget="b83", variant="share"),
        *cells("q9", {"s2": [50.0, 200.0], "s2-retained": [100.0, 100.0]}, budget="b83", variant="isolate"),
    ]
    depth, lifetime, reuse = FIGURES["figure-7"](outcomes).axes
    assert [y for _, y in points(depth, OURS)] == [1_000.0, 1_200.0, 2_000.0, 2_200.0]
    assert [y for _, y in points(depth, PAPER)] == [1_338.0, 1_583.8, 1_705.0, 2_123.1, 2_234.0, 2_259.6]
    assert [y for _, y in points(lifetime, OURS)] == [1_000.0, 2_000.0]
    # Geometric means over S2 in isolation (100): 1, 1 and 2, 2.828.
    assert heights(reuse) == [pytest.approx([1.0, 2.0]), pytest.approx([1.0, 8**0.5])]
    assert [y for _, y in points(reuse, PAPER)] == pytest.approx(
        [1.0, 513.70 / 371.42, 374.52 / 371.42, 592.07 / 371.42]
    )


def test_the_figure_of_all_arms_shows_shares_of_the_ceiling() -> None:
    arms = {"s2": [80.0, 90.0], "stock-tuned": [50.0, 60.0], "ceiling": [100.0, 100.0]}
    figure = FIGURES["figure-arms"](cells("q1", arms) + cells("q1", arms, budget="b83"))
    [panel] = figure.axes
    assert heights(panel) == [pytest.approx([0.85, 0.55])] * 2
    assert [tick.get_text() for tick in panel.get_xticklabels()] == ["S2", "stock-tuned"]
    assert legend_of(figure) == {"b63", "b83"}


def test_without_outcomes_every_panel_says_so_and_the_paper_stays() -> None:
    assert FIGURES.keys() == CAPTIONS.keys() == CASES.keys()
    assert {case for drawn in CASES.values() for case in drawn} <= REGISTERED.keys()
    figures = {name: make([]) for name, make in FIGURES.items()}
    num_panels = {"figure-2": 4, "figure-3": 2, "figure-4": 1, "figure-5": 4, "figure-6": 3, "figure-7": 3}
    for name, count in {**num_panels, "figure-arms": 1}.items():
        assert texts(figures[name]).count("not measured here") == count, name
    assert points(figures["figure-2"].axes[0], PAPER)
    assert points(figures["figure-7"].axes[0], PAPER)


def test_only_figures_with_a_measurement_are_drawn() -> None:
    assert draw([]).keys() == set()
    assert draw(cells("q1", THREE)).keys() == {"figure-2", "figure-arms"}
    assert draw(cells("q3", THREE) + cells("q9", THREE)).keys() == {"figure-4", "figure-7"}
    lost = CellOutcome(case="q5", arm="s2", budget="b63", seed=1, q=1.0, rate=3.0, status="failed", reason="lost")
    assert draw([lost]).keys() == set()


def test_failed_cells_and_budgets_of_the_users_are_drawn_as_what_they_are() -> None:
    outcomes = [
        *cells("q1", {"s0": [100.0], "s1": [150.0]}, budget="512MiB"),
        CellOutcome(
            case="q1", arm="s2", budget="512MiB", seed=1, q=1.0, rate=3.0, cap=63, status="failed", reason="lost"
        ),
    ]
    panel = FIGURES["figure-2"](outcomes).axes[0]
    assert heights(panel) == [[1.0], [1.5]]
    assert points(panel, PAPER) == []


@pytest.mark.parametrize("name", ["figure-2", "figure-4", "figure-arms"])
def test_a_figure_is_one_svg_element_that_can_stand_in_a_page(name: str) -> None:
    outcomes = cells("q1", THREE) + cells("q3", THREE, budget="b83")
    svg = to_svg(FIGURES[name](outcomes), name)
    root = ElementTree.fromstring(svg)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert f">{FIGURES[name](outcomes).get_suptitle()}<" in svg  # text is text
    assert svg == to_svg(FIGURES[name](outcomes), name)
    assert not re.search(r"(?:src|href)=\"(?!#)", svg)  # nothing from elsewhere


def test_two_figures_in_a_page_share_no_id_of_their_own() -> None:
    ids = [
        set(re.findall(r"<clipPath id=\"(\w+)\"", to_svg(FIGURES[name](cells("q1", THREE)), name)))
        for name in ("figure-2", "figure-4")
    ]
    assert ids[0]
    assert not ids[0] & ids[1]


def test_the_marks_of_the_paper_are_those_of_its_table() -> None:
    assert np.allclose(
        [effect.effect for effect in paper_values.EFFECTS if (effect.case, effect.name) == ("q1", "S1/S0")],
        [51.784, 47.568, 56.235],
    )


def test_figures_never_mix_two_conditions_in_a_number() -> None:
    """S0 has 100 at q = 0 and 300 at q = 1; S1, which failed at q = 0, has 400 at q = 1: the ratio is 4/3 and not 4."""
    outcomes = [
        *cells("q1", {"s0": [100.0]}, q=0.0),
        *cells("q1", {"s0": [300.0], "s1": [400.0]}),
        *cells("q1", {"s0": [50.0, 50.0], "s1": [70.0, 70.0]}, rate=0.8),
    ]
    throughput = FIGURES["figure-2"](outcomes).axes[0]
    assert heights(throughput)[:2] == [pytest.approx([1.0]), pytest.approx([4 / 3])]
    elsewhere = FIGURES["figure-2"](outcomes[3:]).axes[0]  # nothing at the main load: what there is
    assert heights(elsewhere)[:2] == [pytest.approx([1.0]), pytest.approx([1.4])]


def test_budgets_stand_in_order_of_size_and_apart() -> None:
    retained = {"s2": [100.0], "s2-retained": [120.0]}
    outcomes = [
        cell
        for budget, factor in (("b108", 2.0), ("b83", 1.0))
        for arm, [tokens] in retained.items()
        for cell in cells("q8", {arm: [factor * tokens]}, budget=budget, variant="share")
    ]
    panel = FIGURES["figure-7"](outcomes).axes[1]
    assert [y for _, y in points(panel, OURS)] == [1_000.0, 1_200.0]  # of b83
    throughput = FIGURES["figure-2"](cells("q1", THREE, budget="b108") + cells("q1", THREE)).axes[0]
    assert [tick.get_text().partition("\n")[0] for tick in throughput.get_xticklabels()] == ["b63", "b108"]


def test_a_series_refuses_what_leaves_several_conditions() -> None:
    series = Series(cells("q1", THREE) + cells("q1", THREE, budget="b83"), "q1")
    with pytest.raises(ValueError, match="expected one condition, got several of s1"):
        series.by_seed("s1")
