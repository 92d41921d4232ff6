"""How the figures look, and how one becomes a piece of a page.

Our measurements are filled and coloured by arm; what the paper printed is a hollow black diamond. A panel without a
measurement of ours says so. Figures are made without pyplot: no state is kept between them.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.stats.contrasts import arm_title

COLOURS = {
    "s0": "#9aa5b1",
    "s1": "#5b8dd6",
    "s2": "#1f4e9c",
    "d0": "#d9822b",
    "s2-retained": "#2e7d4f",
    "s1/s0": "#5b8dd6",
    "s2/s1": "#1f4e9c",
    "d0/s2": "#d9822b",
}
OURS, PAPER = "measured here", "printed in the paper"
_OTHER = "#777777"


def colour(name: str) -> str:
    """Return the colour of an arm or a pair; grey for one that has none of its own."""
    return COLOURS.get(name, _OTHER)


def new_figure(num_rows: int, num_columns: int, *, name: str) -> tuple[Figure, list[Axes]]:
    """Return an empty figure and its panels, row by row."""
    figure = Figure(figsize=(4.2 * num_columns, 3.3 * num_rows), layout="constrained")
    figure.suptitle(name, fontsize=11)
    panels = figure.subplots(num_rows, num_columns, squeeze=False)
    for panel in panels.flat:
        panel.spines[["top", "right"]].set_visible(False)
    return figure, list(panels.flat)


def label(panel: Axes, letter: str, what: str, *, x: str = "", y: str = "") -> None:
    """Give a panel its letter, title and axis labels."""
    panel.set_title(f"({letter}) {what}", fontsize=10, loc="left")
    panel.set_xlabel(x)
    panel.set_ylabel(y)


def bars(panel: Axes, positions: Sequence[float], values: Sequence[float | None], name: str, *, width: float) -> None:
    """Draw our values as bars with their number inside; None draws nothing."""
    at, heights = known_points(positions, values)
    if at:
        drawn = panel.bar(at, heights, width=width, color=colour(name), label=title(name))
        panel.bar_label(drawn, fmt=_short, fontsize=7, label_type="center", color="white")


def paper_marks(panel: Axes, positions: Sequence[float], values: Sequence[float | None]) -> None:
    """Draw what the paper printed as hollow diamonds; None draws nothing."""
    at, heights = known_points(positions, values)
    if at:
        panel.plot(at, heights, "D", color="black", markerfacecolor="white", markersize=6, label=PAPER, zorder=5)


def known_points(positions: Sequence[float], values: Sequence[float | None]) -> tuple[list[float], list[float]]:
    """Return positions and values without those that are None."""
    known = [(position, value) for position, value in zip(positions, values, strict=True) if value is not None]
    return [position for position, _ in known], [value for _, value in known]


def say_if_empty(panel: Axes, measured: bool) -> None:
    """Write into a panel that nothing of it was measured here."""
    if not measured:
        panel.text(0.5, 0.5, "not measured here", transform=panel.transAxes, ha="center", color="#a33", fontsize=9)


def legend(figure: Figure) -> None:
    """Put one entry for each label of any panel below the figure."""
    entries: dict[str, Artist] = {}
    for panel in figure.axes:
        handles, names = panel.get_legend_handles_labels()
        entries |= dict(zip(names, handles, strict=True))
    if entries:
        figure.legend(
            list(entries.values()), list(entries), loc="outside lower center", ncols=4, fontsize=8, frameon=False
        )


def title(name: str) -> str:
    """Return an arm or a pair of arms as it is printed; other names stay as they are."""
    return "/".join(map(arm_title, name.split("/")))


def spread_out(num_groups: int, num_bars: int) -> tuple[np.ndarray, float]:
    """Return positions [num_bars, num_groups] of grouped bars around 0, 1, 2, ..., and the width of one."""
    width = 0.8 / num_bars
    offsets = (np.arange(num_bars) - (num_bars - 1) / 2) * width
    return np.arange(num_groups)[None, :] + offsets[:, None], width


def to_svg(figure: Figure, name: str) -> str:
    """Return the figure as an `<svg>` element: text stays text, ids depend on `name`, nothing on the time."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
