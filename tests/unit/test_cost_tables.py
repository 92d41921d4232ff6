"""Cost and capacity against the paper's Appendix A, section E.1 and equations (1) to (4)."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest

from sgl_hybrid.errors import SettingError
from sgl_hybrid.memory import Units, layout_for, parse_budget, plan_units
from sgl_hybrid.memory.cost import (
    Mix,
    capacity,
    conv_saving_bytes,
    cost,
    fits,
    parse_mix,
    payload_bytes,
    pool_fits,
    saving_bytes,
)
from sgl_hybrid.memory.presets import model_geometry

PAPER = Path(__file__).parents[1] / "data" / "paper"
KIB, MIB = 1 << 10, 1 << 20
FALCON = model_geometry("falcon-h1-7b")
S0, S1, S2, D0 = (layout_for(org, FALCON) for org in ("s0", "s1", "s2", "d0"))


def rows(table: str) -> list[dict[str, str]]:
    with (PAPER / f"{table}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def falcon_units(org: str, budget: str, fraction: float | None = None) -> Units:
    return plan_units(layout_for(org, FALCON), parse_budget(budget, FALCON), attention_fraction=fraction)


@pytest.mark.parametrize("row", rows("a1_storage_examples"), ids=lambda row: "+".join(list(row.values())[:2]))
def test_table_a1(row: dict[str, str]) -> None:
    mix = Mix(attention=int(row["attention_objects"]), checkpoints=int(row["recurrent_objects"]))
    computed = {
        "attention_objects": str(mix.attention),
        "recurrent_objects": str(mix.checkpoints),
        "ideal_s2_slabs": str(cost(S2, mix).conv_bytes // S2.planes // S2.page_bytes),
        **{f"{layout.organization}_mib": f"{cost(layout, mix).plane_bytes / MIB:.6f}" for layout in (S0, S1, S2)},
    }
    assert computed == row


def test_a1_capacity_example() -> None:
    (row,) = rows("a1_capacity_example")
    mix = Mix(attention=int(row["a_attention"]), checkpoints=int(row["a_recurrent"]))
    budget = f"{row['budget_mib']}MiB/layer"
    computed = {org: str(capacity(falcon_units(org, budget), mix)) for org in ("s0", "s1", "s2")}
    assert computed == {"s0": row["s0_mix_units"], "s1": row["s1_mix_units"], "s2": row["s2_ideal_mix_units"]}


def test_table_a2() -> None:
    mix = Mix(attention=120, checkpoints=16)
    d0, s2 = falcon_units("d0", "100MiB/layer", 0.5), falcon_units("s2", "100MiB/layer")
    d0_cost, s2_cost = cost(D0, mix), cost(S2, mix)
    d0_pools, (s2_pool,) = pool_fits(d0, mix), pool_fits(s2, mix)
    binding = max(d0_pools, key=lambda pool: pool.needed_bytes / pool.available_bytes)
    planes = FALCON.planes

    def mib(num_bytes: float) -> str:
        return f"{num_bytes / MIB:g}" if num_bytes / MIB * 10 % 1 == 0 else f"{num_bytes / MIB:.6f}"

    computed = {
        "budget_attention": (mib(d0.budget.plane_bytes * 0.5), ""),
        "budget_recurrent": (mib(d0.budget.plane_bytes * 0.5), ""),
        "budget_shared": ("", mib(s2.budget.plane_bytes)),
        "attention_objects": (str(mix.blocks(D0.page_tokens)), str(mix.blocks(S2.page_tokens))),
        "recurrent_checkpoints": (str(mix.checkpoints), str(mix.checkpoints)),
        "conv_slabs": ("", str(s2_cost.conv_bytes // planes // S2.page_bytes)),
        "attention_allocation": (mib(d0_cost.attention_bytes / planes), mib(s2_cost.attention_bytes / planes)),
        "recurrent_and_conv_allocation": (
            mib((d0_cost.recurrent_bytes + d0_cost.conv_bytes) / planes),
            mib((s2_cost.recurrent_bytes + s2_cost.conv_bytes) / planes),
        ),
        "total_allocation": (mib(d0_cost.plane_bytes), mib(s2_cost.plane_bytes)),
        "model_feasible": (str(fits(d0, mix)).lower(), str(fits(s2, mix)).lower()),
        "binding_limit_lhs": (mib(binding.needed_bytes), mib(s2_pool.needed_bytes)),
        "binding_limit_rhs": (mib(binding.available_bytes), mib(s2_pool.available_bytes)),
    }
    assert binding.pool == "attention"
    assert computed == {row["quantity"]: (row["d0_value"], row["s2_value"]) for row in rows("a2_state_set")}


@pytest.mark.parametrize("row", rows("a4_packing_examples"), ids=lambda row: row["recurrent_objects"])
def test_a4_packing_cost_against_d0(row: dict[str, str]) -> None:
    mix = Mix(attention=0, checkpoints=int(row["recurrent_objects"]))
    d0, s2 = cost(D0, mix).plane_bytes, cost(S2, mix).plane_bytes
    assert s2 - d0 == int(row["s2_minus_d0_kib"]) * KIB == -saving_bytes(D0, S2, mix)
    assert cost(S2, mix).conv_bytes // S2.planes // S2.page_bytes == int(row["slabs"])
    if row["d0_kib"]:
        assert (d0, s2) == (int(row["d0_kib"]) * KIB, int(row["s2_kib"]) * KIB)
    if row["per_occupied_slot_kib"]:
        assert s2 - d0 == mix.checkpoints * int(row["per_occupied_slot_kib"]) * KIB


@pytest.mark.parametrize(
    ("attention", "checkpoints"), [(0, 0), (1, 0), (0, 1), (7, 3), (120, 16), (120, 17), (999, 500)]
)
def test_equations_1_to_4(attention: int, checkpoints: int) -> None:
    mix, slabs = Mix(attention=attention, checkpoints=checkpoints), math.ceil(checkpoints / 16)
    in_kib = {layout.organization: cost(layout, mix).plane_bytes // KIB for layout in (S0, S1, S2, D0)}
    assert in_kib == {
        "s0": 1557 * (attention + checkpoints),
        "s1": 512 * attention + 2048 * checkpoints,
        "s2": 512 * attention + 1536 * checkpoints + 512 * slabs,
        "d0": 16 * 32 * attention + 1557 * checkpoints,
    }
    assert saving_bytes(S0, S1, mix) == (1045 * attention - 491 * checkpoints) * KIB
    assert saving_bytes(S1, S2, mix) == 512 * (checkpoints - slabs) * KIB
    assert saving_bytes(S1, S2, mix, slabs=slabs + 2) == 512 * (checkpoints - slabs - 2) * KIB


@pytest.mark.parametrize(("live", "slabs", "saved_mib"), [(43, 3, 20.0), (69, 5, 32.0)])
def test_e1_same_dump_convolution(live: int, slabs: int, saved_mib: float) -> None:
    assert conv_saving_bytes(S2, live=live, slabs=slabs) == saved_mib * MIB
    assert cost(S1, Mix(attention=0, checkpoints=live)).conv_bytes == live * S1.page_bytes * S1.planes


def test_d2_is_the_smaller_of_the_two_pools_and_zero_demand_sets_no_limit() -> None:
    units = falcon_units("d0", "100MiB/layer", 0.5)
    assert (units.num_attention_pages, units.num_checkpoints) == (3200, 32)
    assert capacity(units, Mix(attention=1, checkpoints=1)) == min(3200 // 32, 32)
    assert capacity(units, Mix(attention=10, checkpoints=1)) == 3200 // 320
    assert capacity(units, Mix(attention=10, checkpoints=0)) == 3200 // 320
    assert capacity(units, Mix(attention=0, checkpoints=3)) == 32 // 3
    assert capacity(units, Mix(attention=120, checkpoints=16)) == 0
    with pytest.raises(SettingError, match="at least one object, got an empty mix"):
        capacity(units, Mix(attention=0, checkpoints=0))


def test_a_slab_is_counted_once_and_never_too_few() -> None:
    mix = Mix(attention=0, checkpoints=17)
    assert cost(S2, mix).conv_bytes == 2 * S2.page_bytes * S2.planes
    assert cost(S2, mix, slabs=5).conv_bytes == 5 * S2.page_bytes * S2.planes
    with pytest.raises(SettingError, match="expected at least 2 slabs for 17 checkpoints, got 1"):
        cost(S2, mix, slabs=1)
    with pytest.raises(SettingError, match="expected an organization with conv slabs, got s1; nearest: s2"):
        conv_saving_bytes(S1, live=1, slabs=1)


def test_requests_leave_their_last_block_half_empty() -> None:
    assert Mix(attention=4, checkpoints=1, requests=2).blocks(512) == math.ceil(4 + 2 * 511 / 1024)
    assert Mix(attention=4, checkpoints=1, requests=2).blocks(1) == 4 * 512
    assert payload_bytes(S2, Mix(attention=1, checkpoints=1, requests=9)) == 44 * (512 + 1557) * KIB


def test_layers_apart_cost_their_own_counts() -> None:
    granite = model_geometry("granite-4.0-h-micro")
    mix = Mix(attention=3, checkpoints=5)
    payload = 3 * 4 * MIB + 5 * 36 * 1_074_688
    assert cost(layout_for("d0", granite), mix).total_bytes == payload == payload_bytes(layout_for("s2", granite), mix)
    # Nine groups of four planes: 9 member pages per checkpoint, 4 checkpoints to a slab, 1 MiB pages.
    assert cost(layout_for("s2", granite), mix).total_bytes == 4 * (3 + 5 * 9 + 2) * MIB
    assert cost(layout_for("s1", granite), mix).total_bytes == 4 * (3 + 5 * 9 + 5) * MIB
    assert cost(layout_for("s0", granite), mix).total_bytes == 4 * (3 + 5 * 9) * 525 * 2048


@pytest.mark.parametrize(
    ("text", "mix"),
    [
        ("attention=120,checkpoints=16", Mix(attention=120, checkpoints=16)),
        (" checkpoints = 2 ", Mix(attention=0, checkpoints=2)),
        ("attention=1,checkpoints=0,requests=8", Mix(attention=1, checkpoints=0, requests=8)),
    ],
)
def test_a_mix_is_read(text: str, mix: Mix) -> None:
    assert parse_mix(text) == mix


@pytest.mark.parametrize(
    "text", ["", "attention", "attention=-1", "attention=1.5", "pages=3", "attention=1,attention=2"]
)
def test_a_mix_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(SettingError, match="expected a mix like attention=120,checkpoints=16"):
        parse_mix(text)
