"""The rows of a campaign: what pairs with what, and which attempt counts."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from bench.metrics import METRICS
from bench.outcome import CellOutcome, adopted


def cell(**changes: Any) -> CellOutcome:
    values: dict[str, Any] = {
        "case": "q1",
        "arm": "s2",
        "budget": "b63",
        "seed": 42000,
        "q": 1.0,
        "rate": 3.0,
        "cap": 63,
    }
    return CellOutcome(**{**values, **changes})


def test_the_condition_holds_all_but_arm_seed_and_attempt() -> None:
    assert cell().condition == cell(arm="d0", seed=1, attempt=2, status="failed").condition
    for change in ({"case": "q3"}, {"budget": "b83"}, {"q": 0.5}, {"rate": 0.8}, {"cap": 109}, {"headroom": 0.19}):
        assert cell(**change).condition != cell().condition
    assert cell(variant="isolate").condition != cell().condition


@pytest.mark.parametrize(
    ("attempts", "number"),
    [
        ([("ok", 1)], 1),
        ([("failed", 1), ("ok", 2)], 2),
        ([("ok", 2), ("failed", 1)], 2),
        ([("ok", 1), ("ok", 2)], 1),  # a second good attempt does not replace the first
        ([("ok", 2), ("ok", 1)], 1),
        ([("failed", 1), ("failed", 3), ("failed", 2)], 3),
        ([("refused", 1), ("failed", 2)], 2),
    ],
)
def test_the_first_good_attempt_counts_and_else_the_last(attempts: list[tuple[str, int]], number: int) -> None:
    outcomes = [cell(status=status, attempt=attempt) for status, attempt in attempts]
    assert [outcome.attempt for outcome in adopted(outcomes)] == [number]


def test_every_cell_is_kept_once_in_the_order_of_its_first_attempt() -> None:
    outcomes = [cell(seed=2), cell(seed=1), cell(seed=2, attempt=2), cell(arm="s0", seed=2)]
    assert [(outcome.arm, outcome.seed) for outcome in adopted(outcomes)] == [("s2", 2), ("s2", 1), ("s0", 2)]


def test_an_outcome_survives_json() -> None:
    outcome = cell(
        metrics={"output_tokens_per_s": 521.25}, counters={"slabs": 3.0}, status="failed", reason="no server"
    )
    assert msgspec.json.decode(msgspec.json.encode(outcome), type=CellOutcome) == outcome


def test_every_metric_is_listed_under_its_own_name_with_a_unit() -> None:
    assert all(name == metric.name and metric.unit and metric.meaning for name, metric in METRICS.items())
    assert METRICS["output_tokens_per_s"].higher_is_better is True
    assert METRICS["ttft_p99_ms"].higher_is_better is False
