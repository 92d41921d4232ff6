"""How long a campaign will take: a first guess, replaced by what finished cells took."""

from __future__ import annotations

from collections.abc import Iterable

from bench.cells import Cell

START_S = 45.0
"""Start, gate and stop of a server on two cores."""
REQUEST_S = 1.0
"""One request of the paper's workload on two cores at saturation; 446 s for 300 on a busy machine, measured."""


class Estimator:
    """Seconds per cell: those of finished cells of the same arm, else of all finished ones, else the first guess."""

    def __init__(self) -> None:
        self._seconds_per_request: dict[str, list[float]] = {}

    def observe(self, arm: str, num_requests: int, seconds: float) -> None:
        """Note that a cell of `arm` took this long from the start of its server to its stop."""
        self._seconds_per_request.setdefault(arm, []).append(max(0.0, seconds - START_S) / num_requests)

    def seconds(self, cells: Iterable[Cell]) -> float:
        """Return how long these cells should take, one after the other [s]."""
        return sum(START_S + cell.num_requests * self._rate(cell.arm) for cell in cells)

    def _rate(self, arm: str) -> float:
        known = self._seconds_per_request.get(arm) or [s for found in self._seconds_per_request.values() for s in found]
        return sum(known) / len(known) if known else REQUEST_S


def duration(seconds: float) -> str:
    """Return a duration as people say it: `45 s`, `12 min`, `3 h 05 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"
