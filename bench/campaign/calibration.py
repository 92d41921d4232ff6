"""The best share of recurrent memory for `stock-tuned`, per budget, by a short run for each share.

It runs before what is measured, with the main load on a seed of its own, so the measured seeds do not choose their
rival's setting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from bench.arms import TUNED_SHARES, arm_of
from bench.cells import Cell
from bench.outcome import CellOutcome
from sgl_hybrid.errors import SettingError

SEED = 31000
NUM_REQUESTS = 60
QUICK_SHARE = 0.7
"""Share of a quick run, which has no time to look for one. First readings: best of 0.47 and 0.7 at b63."""


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """What a calibration at one budget found. throughput: output tokens/s by share; a share that failed has none."""

    budget: str
    share: float
    throughput: dict[str, float] = {}
    failures: dict[str, str] = {}

    def describe(self) -> str:
        """Return the finding in one line."""
        if not self.throughput:
            return f"stock-tuned at {self.budget}: share {self.share:.2f} for recurrent state, not searched"
        tried = ", ".join(f"{share}: {found:.0f}" for share, found in self.throughput.items())
        return f"stock-tuned at {self.budget}: share {self.share:.2f} for recurrent state (tokens/s by share: {tried})"


def budgets_to_tune(cells: Sequence[Cell]) -> list[Cell]:
    """Return one cell per budget among those of tuned arms: the one that a calibration imitates."""
    first: dict[str, Cell] = {}
    for cell in cells:
        if arm_of(cell.arm).tuned:
            first.setdefault(cell.budget, cell)
    return list(first.values())


def calibrate(like: Cell, measure: Callable[[Cell, float], CellOutcome]) -> Calibration:
    """Find the share with the highest throughput at the budget of `like`.

    measure: runs a cell with a share and returns its outcome. Raises: SettingError if no share could be measured.
    """
    cell = msgspec.structs.replace(
        like, case="calibration", seed=SEED, q=1.0, headroom=0.0, variant="", num_requests=NUM_REQUESTS
    )
    throughput, failures = {}, {}
    for share in TUNED_SHARES:
        outcome = measure(cell, share)
        if outcome.status == "ok":
            throughput[f"{share:.2f}"] = outcome.metrics["output_tokens_per_s"]
        else:
            failures[f"{share:.2f}"] = outcome.reason or outcome.status
    if not throughput:
        raise SettingError(f"expected a share for {like.arm} at {like.budget} that serves, got: {failures}")
    best = max(throughput, key=lambda share: throughput[share])
    share = next(share for share in TUNED_SHARES if f"{share:.2f}" == best)
    return Calibration(budget=like.budget, share=share, throughput=throughput, failures=failures)


def read_calibration(folder: Path, budget: str) -> Calibration | None:
    """Return what an earlier invocation found for a budget, or None."""
    try:
        return msgspec.json.decode((folder / f"calibration-{budget}.json").read_bytes(), type=Calibration)
    except FileNotFoundError:
        return None


def write_calibration(folder: Path, found: Calibration) -> None:
    """Keep a finding for later invocations and the report."""
    (folder / f"calibration-{found.budget}.json").write_bytes(msgspec.json.encode(found) + b"\n")
