"""Budgets become whole units exactly as in the paper (Tables B-2, B-3 and the splits of E-12), and sizes round down."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from sgl_hybrid.errors import SettingError
from sgl_hybrid.memory import Budget, Units, layout_for, minimum_budget, parse_budget, plan_units
from sgl_hybrid.memory.budget import pages_for
from sgl_hybrid.memory.presets import model_geometry
from sgl_hybrid.memory.split import PAPER_FRACTIONS

PAPER = Path(__file__).parents[1] / "data" / "paper"
FALCON = model_geometry("falcon-h1-7b")
GRANITE = model_geometry("granite-4.0-h-micro")
GIB = 1 << 30


def rows(table: str) -> list[dict[str, str]]:
    with (PAPER / f"{table}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def falcon_units(org: str, budget: str, fraction: float | str | None = None) -> Units:
    return plan_units(layout_for(org, FALCON), parse_budget(budget, FALCON), attention_fraction=fraction)


@pytest.mark.parametrize("row", rows("b2_budgets"), ids=lambda row: row["budget"])
def test_table_b2(row: dict[str, str]) -> None:
    s0, s1, s2, d0 = (falcon_units(org, row["budget"]) for org in ("s0", "s1", "s2", "d0"))
    computed = {
        "budget": d0.budget.text,
        "nominal_bytes": str(d0.budget.plane_bytes),
        "override_d0_units": str(d0.budget.plane_bytes // FALCON.budget_unit_bytes),
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
    assert s1.plane_bytes == s2.plane_bytes
    for units in (s0, s1, s2, d0):
        assert units.total_bytes == 44 * units.plane_bytes


@pytest.mark.parametrize(
    ("budget", "attention_pages", "checkpoints"), [("b63", 3256, 29), ("b83", 4289, 39), ("b108", 5581, 51)]
)
def test_d0_units_of_the_papers_budgets(budget: str, attention_pages: int, checkpoints: int) -> None:
    units = falcon_units("d0", budget)
    assert (units.num_attention_pages, units.num_checkpoints, units.num_pages) == (attention_pages, checkpoints, 0)


@pytest.mark.parametrize(
    "row", rows("derived_budget_units"), ids=lambda r: f"{r['budget']}-{r['organization']}-{r['split']}"
)
def test_split_sweep_of_table_e12(row: dict[str, str]) -> None:
    fraction = row["attention_fraction"] or None
    units = falcon_units(row["organization"].lower(), row["budget"], fraction)
    dual = not units.layout.shared
    assert {
        "d0_attention_units": str(units.num_attention_pages) if dual else "",
        "d0_recurrent_units": str(units.num_checkpoints) if dual else "",
        "shared_pages": "" if dual else str(units.num_pages),
        "attention_bytes": str(units.attention_layer_bytes) if dual else "",
        "recurrent_bytes": str(units.recurrent_layer_bytes) if dual else "",
        "total_bytes": str(units.plane_bytes),
    } == {key: row[key] for key in row if key not in ("budget", "organization", "split", "attention_fraction")}


@pytest.mark.parametrize("row", rows("b3_split"), ids=lambda row: row["model"])
def test_table_b3(row: dict[str, str]) -> None:
    geometry = {"Falcon": FALCON, "Granite": GRANITE}[row["model"]]
    fraction, layout = PAPER_FRACTIONS[geometry.family], layout_for("d0", geometry)
    assert {
        "model": row["model"],
        "attention_fraction": f"{float(fraction):.6f}",
        "recurrent_fraction": f"{float(1 - fraction):.6f}",
        "attention_page_bytes": str(layout.attention_page_bytes),
        "recurrent_page_bytes": str(layout.recurrent_page_bytes),
    } == row
    assert falcon_units("d0", "b63").attention_fraction == 0.527383


def test_granite_b160_is_stated_per_plane_and_buys_whole_checkpoints() -> None:
    budget = parse_budget("b160", GRANITE)
    assert (budget.plane_bytes, budget.total_bytes) == (173_015_040, 4 * 173_015_040)
    d0 = plan_units(layout_for("d0", GRANITE), budget)
    # Per plane the paper's rule buys 1,054 attention pages and 128 one-layer composites; nine make a checkpoint.
    assert (d0.num_attention_pages, d0.num_checkpoints) == (1054, 128 // 9)
    assert d0.total_bytes == 4 * 1054 * 32_768 + 36 * 14 * 1_074_688 <= budget.total_bytes
    pages = {org: plan_units(layout_for(org, GRANITE), budget).num_pages for org in ("s0", "s1", "s2")}
    assert pages == {"s0": 161, "s1": 165, "s2": 165}


def test_b63_planner_difference_of_d0_and_s2() -> None:
    d0, s2 = falcon_units("d0", "b63").plane_bytes, falcon_units("s2", "b63").plane_bytes
    assert round(100 * (d0 - s2) / s2, 4) == -1.5858


@pytest.mark.parametrize(
    ("text", "total_bytes", "nearest"),
    [
        ("4GiB", 4 * GIB, False),
        ("512 MiB", GIB // 2, False),
        ("1.5gib", 3 * GIB // 2, False),
        ("2GB", 2 * 10**9, False),
        ("4294967296", 4 * GIB, False),
        ("100MiB/layer", 44 * 100 * 2**20, False),
        ("b63", 44 * 101_154_816, True),
    ],
)
def test_a_budget_is_read(text: str, total_bytes: int, nearest: bool) -> None:
    budget = parse_budget(text, FALCON)
    assert budget == Budget(text=text, total_bytes=total_bytes, planes=44, nearest=nearest)


@pytest.mark.parametrize(
    "text", ["", "-4GiB", "4QiB", "four", "0", "0.2", "b0", "b-3", "b6.3", "GiB", "1e9", "4GiB/plane"]
)
def test_a_budget_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(
        SettingError, match="expected a budget like 4GiB, 512MiB, 100MiB/layer, a number of bytes or b63"
    ):
        parse_budget(text, FALCON)


def test_a_named_budget_rounds_to_the_nearest_page_and_a_size_down() -> None:
    named = parse_budget("b83", FALCON)
    size = parse_budget(str(named.total_bytes), FALCON)
    layout = layout_for("s0", FALCON)
    assert (plan_units(layout, named).num_pages, plan_units(layout, size).num_pages) == (84, 83)
    assert plan_units(layout, size).total_bytes <= size.total_bytes < plan_units(layout, named).total_bytes


@pytest.mark.parametrize("org", ["s0", "s1", "s2", "d0"])
def test_a_budget_below_one_unit_is_refused_with_the_smallest_that_works(org: str) -> None:
    layout = layout_for(org, FALCON)
    with pytest.raises(SettingError, match=r"expected a budget that buys one unit .* smallest: (\d+) B") as error:
        plan_units(layout, parse_budget("10KiB", FALCON))
    smallest = str(error.value).split("smallest: ")[1].removesuffix(" B")
    assert plan_units(layout, parse_budget(smallest, FALCON))
    with pytest.raises(SettingError, match="expected a budget that buys one unit"):
        plan_units(layout, parse_budget(str(int(smallest) - 1), FALCON))


@pytest.mark.parametrize("org", ["s0", "s1", "s2", "d0"])
@pytest.mark.parametrize("model", ["falcon-h1-7b", "granite-4.0-h-micro", "nemotron-3-nano-30b-a3b"])
def test_the_minimum_budget_holds_one_request_and_one_byte_less_does_not(org: str, model: str) -> None:
    layout = layout_for(org, model_geometry(model))

    def holds(units: Units) -> bool:
        blocks = -(-5000 // layout.page_tokens)
        if layout.shared:
            return units.num_pages >= pages_for(layout, blocks, 2, slabs=2)
        return units.num_attention_pages >= blocks and units.num_checkpoints >= 2

    units = minimum_budget(layout, context_tokens=5000)
    assert holds(units)
    less = Budget(text="less", total_bytes=units.budget.total_bytes - 1, planes=units.budget.planes)
    assert not holds(plan_units(layout, less))


def test_minimum_budget_refuses_counts_below_one() -> None:
    with pytest.raises(SettingError, match="expected context_tokens and checkpoints_per_request >= 1, got 0, 2"):
        minimum_budget(layout_for("s2", FALCON), context_tokens=0)
