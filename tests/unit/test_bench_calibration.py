"""The share of `stock-tuned`: found on a seed of its own, the best of those that serve, kept for later invocations."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.arm_plan import Serving, shares_with_room
from bench.arms import TUNED_SHARES, arm_of
from bench.campaign.calibration import (
    NUM_REQUESTS,
    SEED,
    Calibration,
    Trials,
    calibrate,
    points_to_tune,
    read_calibrations,
    write_calibration,
)
from bench.campaign.folder import outcome_of, read_rows
from bench.campaign.run import CampaignResult
from bench.cases import MAIN_SEEDS, Point, case_of
from bench.cells import Cell, Changes, cells_of
from bench.outcome import CellOutcome
from sgl_hybrid.errors import SettingError
from tests.unit.campaigns import StandIn, campaign, write_shapes

CELLS = cells_of(case_of("q1"), Changes(num_seeds=2, shared_fractions=(0.0,)))
POINTS = points_to_tune(CELLS)
B83 = Point("b83", 3.0, 63)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shapes(tmp_path_factory.mktemp("model") / "falcon-h1-nano")


@pytest.fixture(autouse=True)
def _stand_ins_come_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.server.POLL_S", 0.05)


def test_one_calibration_for_each_point_of_a_tuned_arm() -> None:
    assert list(POINTS) == [Point(budget, 3.0, 63) for budget in ("b63", "b83", "b108")]
    assert {cell.arm for cell in POINTS.values()} == {"stock-tuned"}
    assert points_to_tune([cell for cell in CELLS if cell.arm == "s2"]) == {}
    curve = cells_of(case_of("q5"), Changes(arms=("stock-tuned",)))
    assert [point.rate for point in points_to_tune(curve) if point.budget == "b63"] == [0.8, 1.3, 1.7, 2.2, 3.0]


def test_the_best_share_that_serves_is_chosen_on_a_seed_that_is_not_measured() -> None:
    tried: list[tuple[Cell, float]] = []

    def measure(cell: Cell, share: float) -> CellOutcome:
        tried.append((cell, share))
        if share == 0.9:
            return outcome_of(cell, 1, "failed", "too few tokens")
        return outcome_of(cell, 1, "ok", metrics={"output_tokens_per_s": 100 - 100 * abs(share - 0.7)})

    found = calibrate(POINTS[B83], measure)
    assert found.share == 0.7
    assert found.point == B83
    assert found.failures == {"0.90": "too few tokens"}
    assert set(found.throughput) == {"0.47", "0.60", "0.70", "0.80"}
    assert [share for _, share in tried] == list(TUNED_SHARES)
    cells = {cell for cell, _ in tried}
    [cell] = cells
    assert (cell.seed, cell.q, cell.num_requests, cell.case) == (SEED, 1.0, NUM_REQUESTS, "calibration")
    assert SEED not in MAIN_SEEDS
    assert found.describe().startswith(
        "stock-tuned at b83, 3 requests/s, cap 63: share 0.70 for recurrent state (tokens/s by share: 0.47: 77"
    )


def test_no_share_that_serves_is_a_finding_with_its_reasons() -> None:
    found = calibrate(POINTS[B83], lambda cell, share: outcome_of(cell, 1, "failed", f"no room at {share:.1f}"))
    assert (found.share, found.searched) == (None, True)
    assert found.describe() == (
        "stock-tuned at b83, 3 requests/s, cap 63: no share for recurrent state serves (0.47: no room at 0.5; "
        "0.60: no room at 0.6; 0.70: no room at 0.7; 0.80: no room at 0.8; 0.90: no room at 0.9)"
    )


def test_findings_are_kept_for_their_point(tmp_path: Path) -> None:
    assert read_calibrations(tmp_path) == {}
    quick = Calibration(budget="b83", share=0.7)
    write_calibration(tmp_path, quick)
    write_calibration(tmp_path, Calibration(budget="b83", share=0.6, rate=4.5, cap=109))
    found = read_calibrations(tmp_path)
    assert found[B83] == quick
    assert found[Point("b83", 4.5, 109)].share == 0.6
    assert quick.describe() == "stock-tuned at b83, 3 requests/s, cap 63: share 0.70 for recurrent state, not searched"
    assert not quick.searched


def test_a_file_without_rate_and_cap_is_of_the_main_load(tmp_path: Path) -> None:
    (tmp_path / "calibration-b83.json").write_text(
        '{"budget":"b83","share":0.6,"throughput":{"0.60":419.0,"0.70":352.0},"failures":{}}'
    )
    found = read_calibrations(tmp_path)
    assert found[B83].share == 0.6
    assert found[B83].searched
    write_calibration(tmp_path, Calibration(budget="b83", share=0.7))  # not searched: the searched one counts
    assert read_calibrations(tmp_path) == found


def test_a_share_whose_run_has_ended_is_not_run_again(tmp_path: Path) -> None:
    """Ctrl-C in the third run: the first two are kept. A failed one is made again only when asked to."""
    tried: list[float] = []

    def run(cell: Cell, share: float, attempt: int, folder: Path) -> CellOutcome:
        tried.append(share)
        if len(tried) == 3:
            raise KeyboardInterrupt
        status = "failed" if share == 0.6 else "ok"
        return outcome_of(cell, attempt, status, metrics={"output_tokens_per_s": share})

    with pytest.raises(KeyboardInterrupt):
        calibrate(POINTS[B83], Trials(tmp_path, run, retry_failed=False).measure)
    found = calibrate(POINTS[B83], Trials(tmp_path, run, retry_failed=False).measure)
    assert [f"{share:.2f}" for share in tried] == ["0.47", "0.60", "0.70", "0.70", "0.80", "0.90"]
    assert (found.share, list(found.failures)) == (0.9, ["0.60"])
    calibrate(POINTS[B83], Trials(tmp_path, run, retry_failed=True).measure)
    assert tried[6:] == [0.6]
    assert len(list(tmp_path.glob("calibration/*_share0.60/attempt-*/outcome.json"))) == 2
    assert len(list(tmp_path.glob("calibration/*_share0.70/attempt-*"))) == 2


def test_shares_that_a_budget_has_room_for(model: Path) -> None:
    """A token takes 512 B, a state 796,672 B. At 0.9, 8,192 tokens need 8,192 * 512 / 0.1 = 41,943,040 B, and 52 states
    are 41,426,944 B. The least is at 0.9 / 1.9: 8,192 * 512 * 1.9 = 7,969,178 B, and 10 states are 7,966,720 B."""
    serving = Serving(model=model)
    assert shares_with_room(arm_of("stock-tuned"), "b52", serving) == list(TUNED_SHARES[:4])
    assert shares_with_room(arm_of("stock-tuned"), "b53", serving) == list(TUNED_SHARES)
    with pytest.raises(SettingError, match=r"one request in arm stock-tuned, got b9 .*; smallest: 7969178 B"):
        shares_with_room(arm_of("stock-tuned"), "b9", serving)


def test_a_share_without_room_leaves_the_others(model: Path, tmp_path: Path) -> None:
    launch = StandIn()
    assert campaign(model, tmp_path, launch, arms="stock-tuned", budget="b52", quick=False) == CampaignResult(
        1, 0, 0, False
    )
    found = read_calibrations(tmp_path)[Point("b52", 200.0, 63)]
    assert list(found.failures) == ["0.90"]
    assert found.failures["0.90"].startswith("expected a budget that holds one request in arm stock-tuned, got b52 ")
    assert set(found.throughput) == {"0.47", "0.60", "0.70", "0.80"}
    [row] = read_rows(tmp_path)
    assert row.outcome.counters["mamba_share"] == found.share
    assert len(launch.started) == 4 + 1
    campaign(model, tmp_path, launch, arms="stock-tuned", budget="b52", quick=False, seeds=2)
    assert len(launch.started) == 5 + 1  # the second seed has the same share


def test_a_tuned_arm_that_no_share_serves_has_a_row_with_the_reason(model: Path, tmp_path: Path) -> None:
    launch = StandIn(**{"stock-tuned": "--fail"})
    ended = campaign(model, tmp_path, launch, arms="stock-tuned", budget="b15", quick=False)
    assert ended == CampaignResult(0, 1, 0, False)
    [row] = read_rows(tmp_path)
    assert row.outcome.status == "refused"
    assert row.outcome.reason is not None
    assert row.outcome.reason.startswith(
        "stock-tuned at b15, 200 requests/s, cap 63: no share for recurrent state serves (0.47: expected a running "
    )
    served = campaign(model, tmp_path, StandIn(), arms="stock-tuned", budget="b15", quick=False, retry_failed=True)
    assert served == CampaignResult(1, 0, 0, False)


def test_a_quick_share_is_searched_when_there_is_time(model: Path, tmp_path: Path) -> None:
    """A budget of 15 states has no room for a share of 0.7; a quick run takes the nearest that has."""
    launch = StandIn()
    campaign(model, tmp_path, launch, arms="stock-tuned", budget="b15")
    assert read_calibrations(tmp_path)[Point("b15", 200.0, 63)].share == 0.6
    assert len(launch.started) == 1
    campaign(model, tmp_path, launch, arms="stock-tuned", budget="b15", quick=False, seeds=2)
    assert read_calibrations(tmp_path)[Point("b15", 200.0, 63)].searched
    assert len(launch.started) == 1 + 2 + 1
