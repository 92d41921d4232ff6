"""The planner reproduces the paper's budgets (Tables B-2, B-3 and the sweep of E-12) from the model's config alone."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from sgl_hybrid.memory import StateGeometry, Units, layout_for, parse_budget, plan_units

PAPER = Path(__file__).parents[1] / "data" / "paper"

FALCON_7B = {
    "model_type": "falcon_h1",
    "num_hidden_layers": 44,
    "hidden_size": 3072,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_d_ssm": 3072,
    "mamba_n_heads": 24,
    "mamba_d_head": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
}


def rows(table: str) -> list[dict[str, str]]:
    with (PAPER / f"{table}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def units(org: str, budget: str, fraction: float | None = None) -> Units:
    geometry = StateGeometry.from_config(FALCON_7B)
    return plan_units(layout_for(org, geometry), parse_budget(budget, geometry), attention_fraction=fraction)


@pytest.mark.parametrize("row", rows("b2_budgets"), ids=lambda row: row["budget"])
def test_b2_budget(row: dict[str, str]) -> None:
    s0, s1, s2, d0 = (units(org, row["budget"]) for org in ("s0", "s1", "s2", "d0"))
    computed = {
        "budget": d0.budget.text,
        "nominal_bytes": str(d0.budget.plane_bytes),
        "override_d0_units": str(d0.budget.plane_bytes // d0.layout.geometry.budget_unit_bytes),
        "override_s0_pages": str(s0.num_pages),
        "override_s1_pages": str(s1.num_pages),
        "override_s2_pages": str(s2.num_pages),
        "d0_attention_bytes": str(d0.attention_layer_bytes),
        "d0_recurrent_bytes": str(d0.recurrent_layer_bytes),
        "d0_total_bytes": str(d0.plane_bytes),
        "s0_bytes": str(s0.plane_bytes),
        "s1_s2_bytes": str(s2.plane_bytes),
    }
    assert computed == row
    assert s1.total_bytes == s2.total_bytes == 44 * int(row["s1_s2_bytes"])
