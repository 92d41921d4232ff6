"""The pace of a load: the paper's two ratios from its own table, ours from measured times, arrivals stretched."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from bench.arm_plan import Serving
from bench.arrivals import OnOff, Poisson
from bench.campaign.cell import Conditions
from bench.pace import (
    BATCHES,
    PAPER_PREFILL_TOKENS_PER_S,
    PAPER_STEP_MS,
    Pace,
    measure_pace,
    pace_table,
    paper_prompt_in_steps,
)
from bench.server import ServerError
from bench.variants import variant_of
from sgl_hybrid.errors import SettingError
from tests.unit.campaigns import StandIn, write_shapes


def test_the_papers_prices_solve_its_table() -> None:
    """Table E-6, S2 at L and M: submitted tokens less 72,608 decode tokens, forwards, event seconds."""
    with (Path(__file__).parents[1] / "data" / "paper" / "e6_traced_work_time.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["organization"] == "S2" and row["point"] in "LM"]
    keys = ("submitted_tok_per_run", "token_bearing_forwards_per_run", "event_s_per_run")
    tokens, forwards, seconds = (np.array([float(row[key]) for row in rows]) for key in keys)
    system = np.stack([tokens - 72_608, forwards], axis=1)
    token_s, step_s = np.linalg.solve(system, seconds)
    assert 1 / token_s == pytest.approx(PAPER_PREFILL_TOKENS_PER_S, rel=1e-3)
    assert 1000 * step_s == pytest.approx(PAPER_STEP_MS, rel=2e-3)
    assert paper_prompt_in_steps() == pytest.approx(13.4, abs=0.05)


def test_ratios_by_hand() -> None:
    found = Pace(prefill_s=0.25, step_ms={1: 6.0, 8: 10.0, 16: 20.0, 32: 30.0}, ceiling_tokens_per_s=354.1)
    assert found.prefill_tokens_per_s == 3332 / 0.25
    assert found.prompt_in_steps == 12.5
    assert found.pace == pytest.approx(0.5)
    console = Console(file=io.StringIO(), width=100)
    console.print(pace_table(found))
    assert "12.5" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_pace_stretches_arrivals_and_keeps_their_pattern() -> None:
    assert variant_of("").arrivals(3.0, pace=0.5) == Poisson(1.5)
    assert variant_of("onoff").arrivals(1.7, pace=0.5) == OnOff(0.85, on_s=10.0, off_s=30.0)
    plain, slow = (variant_of("onoff").arrivals(1.7, pace=pace).offsets_ns(50, seed=3) for pace in (1.0, 0.5))
    assert slow == pytest.approx([2 * offset for offset in plain], abs=2)


def test_a_server_is_measured_from_its_prompts_batches_and_saturated_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in that takes 4 ms a token whatever the batch."""
    monkeypatch.setattr("bench.pace.STEPS", 8)
    monkeypatch.setattr("bench.pace.SATURATED_REQUESTS", 6)
    said: list[str] = []
    found = measure_pace(
        Serving(model=write_shapes(tmp_path / "model")),
        StandIn(ceiling="--token-s 0.004"),
        tmp_path / "pace",
        command=("test",),
        say=said.append,
    )
    assert set(found.step_ms) == set(BATCHES)
    assert all(step_ms > 2 for step_ms in found.step_ms.values())  # a client late for the first token sees less
    assert found.prefill_s > 0
    assert 0 < found.ceiling_tokens_per_s < 6 * 250
    assert said[0] == "measuring warm-up"
    assert (tmp_path / "pace" / "batch-16" / "requests.jsonl").is_file()


def test_a_server_that_dies_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="expected 5 answers while prefill was measured"):
        measure_pace(
            Serving(model=write_shapes(tmp_path / "model")),
            StandIn(ceiling="--die-after 4"),
            tmp_path / "pace",
            command=("test",),
            say=lambda text: None,
        )


@pytest.mark.parametrize("pace", [0.0, -1.0, float("inf"), float("nan")])
def test_a_pace_must_be_above_zero(pace: float) -> None:
    with pytest.raises(SettingError, match="--pace: expected a pace above 0, got"):
        Conditions(serving=Serving(model=Path("m")), pace=pace)
