"""The share of `stock-tuned`: found on a seed of its own, the best of those that serve, kept for later invocations."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.arms import TUNED_SHARES
from bench.campaign.calibration import (
    NUM_REQUESTS,
    SEED,
    Calibration,
    budgets_to_tune,
    calibrate,
    read_calibration,
    write_calibration,
)
from bench.campaign.folder import outcome_of
from bench.cases import MAIN_SEEDS, case_of
from bench.cells import Cell, Changes, cells_of
from bench.outcome import CellOutcome
from sgl_hybrid.errors import SettingError

CELLS = cells_of(case_of("q1"), Changes(num_seeds=2, shared_fractions=(0.0,)))


def test_one_calibration_for_each_budget_of_a_tuned_arm() -> None:
    found = budgets_to_tune(CELLS)
    assert [(cell.arm, cell.budget) for cell in found] == [("stock-tuned", b) for b in ("b63", "b83", "b108")]
    assert budgets_to_tune([cell for cell in CELLS if cell.arm == "s2"]) == []


def test_the_best_share_that_serves_is_chosen_on_a_seed_that_is_not_measured() -> None:
    tried: list[tuple[Cell, float]] = []

    def measure(cell: Cell, share: float) -> CellOutcome:
        tried.append((cell, share))
        if share == 0.9:
            return outcome_of(cell, 1, "failed", "too few tokens")
        return outcome_of(cell, 1, "ok", metrics={"output_tokens_per_s": 100 - 100 * abs(share - 0.7)})

    found = calibrate(budgets_to_tune(CELLS)[1], measure)
    assert found.share == 0.7
    assert found.budget == "b83"
    assert found.failures == {"0.90": "too few tokens"}
    assert set(found.throughput) == {"0.47", "0.60", "0.70", "0.80"}
    assert [share for _, share in tried] == list(TUNED_SHARES)
    cells = {cell for cell, _ in tried}
    [cell] = cells
    assert (cell.seed, cell.q, cell.num_requests, cell.case) == (SEED, 1.0, NUM_REQUESTS, "calibration")
    assert SEED not in MAIN_SEEDS
    assert found.describe().startswith(
        "stock-tuned at b83: share 0.70 for recurrent state (tokens/s by share: 0.47: 77"
    )


def test_no_share_that_serves_is_a_mistake() -> None:
    with pytest.raises(SettingError, match=r"expected a share for stock-tuned at b63 that serves, got: .*no room"):
        calibrate(budgets_to_tune(CELLS)[0], lambda cell, share: outcome_of(cell, 1, "failed", "no room"))


def test_a_finding_is_kept(tmp_path: Path) -> None:
    assert read_calibration(tmp_path, "b63") is None
    write_calibration(tmp_path, Calibration(budget="b63", share=0.7))
    found = read_calibration(tmp_path, "b63")
    assert found == Calibration(budget="b63", share=0.7)
    assert found.describe() == "stock-tuned at b63: share 0.70 for recurrent state, not searched"
