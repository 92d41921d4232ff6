"""The best share of recurrent memory for `stock-tuned`, per operating point, by a short run for each share.

It runs before what is measured, at the point of the cells but on a seed of its own, so the measured seeds do not choose
their rival's setting.

    calibration-BUDGET_rRATE_cCAP.json               what was found at a point (`Calibration`)
    calibration/KEY_shareS/attempt-N/outcome.json    what one share came to, kept as soon as its run has ended
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from bench.arms import TUNED_SHARES, arm_of
from bench.atomic import write_whole
from bench.cases import Point
from bench.cells import Cell
from bench.outcome import CellOutcome

SEED = 31000
NUM_REQUESTS = 60
QUICK_SHARE = 0.7
"""Share of a quick run, which has no time to look for one. First readings: best of 0.47 and 0.7 at b63."""


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """What a calibration at one point found: the best share, None if none serves.

    throughput: output tokens/s by share. failures: why a share has none. Neither has an entry if nothing was tried.
    rate, cap: the defaults are those of files that were written without them.
    """

    budget: str
    share: float | None
    rate: float = 3.0
    cap: int = 63
    throughput: dict[str, float] = {}
    failures: dict[str, str] = {}

    @property
    def point(self) -> Point:
        return Point(self.budget, self.rate, self.cap)

    @property
    def searched(self) -> bool:
        """Return whether shares were tried."""
        return bool(self.throughput or self.failures)

    def describe(self) -> str:
        """Return the finding in one line."""
        where = f"stock-tuned at {self.point.describe()}"
        if self.share is None:
            reasons = "; ".join(f"{share}: {reason}" for share, reason in self.failures.items())
            return f"{where}: no share for recurrent state serves ({reasons})"
        if not self.searched:
            return f"{where}: share {self.share:.2f} for recurrent state, not searched"
        tried = ", ".join(f"{share}: {found:.0f}" for share, found in self.throughput.items())
        return f"{where}: share {self.share:.2f} for recurrent state (tokens/s by share: {tried})"


def points_to_tune(cells: Sequence[Cell]) -> dict[Point, Cell]:
    """Return the points of the cells of tuned arms, and for each the cell that a calibration imitates."""
    first: dict[Point, Cell] = {}
    for cell in cells:
        if arm_of(cell.arm).tuned:
            first.setdefault(cell.point, cell)
    return first


def calibrate(like: Cell, measure: Callable[[Cell, float], CellOutcome]) -> Calibration:
    """Find the share with the highest throughput at the point of `like`.

    measure: runs a cell with a share and returns its outcome.
    """
    cell = msgspec.structs.replace(
        like, case="calibration", seed=SEED, q=1.0, headroom=0.0, variant="", num_requests=NUM_REQUESTS
    )
    throughput, failures = {}, {}
    for share in TUNED_SHARES:
        outcome = measure(cell, share)
        if outcome.status == "ok":
            throughput[share] = outcome.metrics["output_tokens_per_s"]
        else:
            failures[share] = outcome.reason or outcome.status
    return Calibration(
        budget=like.budget,
        share=max(throughput, key=lambda share: throughput[share], default=None),
        rate=like.rate,
        cap=like.cap,
        throughput={f"{share:.2f}": found for share, found in throughput.items()},
        failures={f"{share:.2f}": reason for share, reason in failures.items()},
    )


class Trials:
    """Runs of one share each, in the folder of a campaign. A run that has ended is not made again."""

    def __init__(
        self, folder: Path, run: Callable[[Cell, float, int, Path], CellOutcome], *, retry_failed: bool
    ) -> None:
        """run: make an attempt at a cell with a share in a folder. retry_failed: make another where none was `ok`."""
        self._folder, self._run, self._retry_failed = folder / "calibration", run, retry_failed

    def measure(self, cell: Cell, share: float) -> CellOutcome:
        """Return what a cell with a share came to, now or in an earlier invocation."""
        folder = self._folder / f"{cell.key}_share{share:.2f}"
        outcomes = [msgspec.json.decode(path.read_bytes(), type=CellOutcome) for path in _outcomes(folder)]
        kept = next((outcome for outcome in outcomes if outcome.status == "ok"), None)
        if kept is None and outcomes and not self._retry_failed:
            kept = outcomes[-1]
        if kept is not None:
            return kept
        attempt = 1 + len(list(folder.glob("attempt-*")))
        folder = folder / f"attempt-{attempt}"
        folder.mkdir(parents=True)
        outcome = self._run(cell, share, attempt, folder)
        write_whole(folder / "outcome.json", msgspec.json.encode(outcome) + b"\n")
        return outcome


def _outcomes(folder: Path) -> list[Path]:
    """Return the files of a share's finished attempts, the oldest first."""
    return sorted(
        folder.glob("attempt-*/outcome.json"), key=lambda path: int(path.parent.name.removeprefix("attempt-"))
    )


def read_calibrations(folder: Path) -> dict[Point, Calibration]:
    """Return what earlier invocations found, by point; where a point has several, the one that was searched."""
    decoder = msgspec.json.Decoder(Calibration)
    found = [decoder.decode(path.read_bytes()) for path in sorted(folder.glob("calibration-*.json"))]
    return {one.point: one for one in sorted(found, key=lambda one: one.searched)}


def write_calibration(folder: Path, found: Calibration) -> None:
    """Keep a finding for later invocations and the report."""
    name = f"calibration-{found.budget}_r{found.rate:g}_c{found.cap}.json"
    write_whole(folder / name, msgspec.json.encode(found) + b"\n")
