"""Two tables of the paper beside values computed from the model's geometry.

Printed values are facts of arXiv:2610.15755v1, Tables A-1 (storage of example sets, MiB per layer) and B-2 (budgets,
bytes per layer), which hold for Falcon-H1-7B in bf16. Another model's column is computed by the same rules and
compared all the same, so that differences show.
"""

from __future__ import annotations

import msgspec

from sgl_hybrid.memory.budget import parse_budget, plan_units
from sgl_hybrid.memory.cost import Mix, cost
from sgl_hybrid.memory.geometry import StateGeometry
from sgl_hybrid.memory.organization import layout_for

A1_SETS: dict[tuple[int, int], tuple[str, str, str]] = {
    (1, 1): ("3.041016", "2.500000", "2.500000"),
    (16, 16): ("48.656250", "40.000000", "32.500000"),
    (4, 16): ("30.410156", "34.000000", "26.500000"),
    (0, 16): ("24.328125", "32.000000", "24.500000"),
}
B2_COLUMNS = (
    "nominal_bytes",
    "d0_attention_units",
    "d0_recurrent_units",
    "s0_pages",
    "s1_pages",
    "s2_pages",
    "d0_attention_bytes",
    "d0_recurrent_bytes",
    "d0_total_bytes",
    "s0_bytes",
    "s1_s2_bytes",
)
B2_BUDGETS: dict[str, tuple[int, ...]] = {
    "b63": (101154816, 3256, 29, 63, 193, 193, 53346304, 46236672, 99582976, 100445184, 101187584),
    "b83": (133267456, 4289, 39, 84, 254, 254, 70270976, 62180352, 132451328, 133926912, 133169152),
    "b108": (173408256, 5581, 51, 109, 331, 331, 91439104, 81312768, 172751872, 173786112, 173539328),
}
MIB = 1 << 20


class Cell(msgspec.Struct, frozen=True):
    """One value of a table: its row, its column, the printed value and the computed one."""

    row: str
    column: str
    paper: str
    computed: str
    equal: bool


def _cell(row: str, column: str, paper: str, computed: str) -> Cell:
    return Cell(row, column, paper, computed, paper == computed)


def table_a1(geometry: StateGeometry) -> list[Cell]:
    """Return Table A-1: MiB per layer of four example sets in S0, S1 and S2."""
    cells = []
    for (attention, checkpoints), printed in A1_SETS.items():
        mix = Mix(attention=attention, checkpoints=checkpoints)
        for org, paper in zip(("s0", "s1", "s2"), printed, strict=True):
            computed = cost(layout_for(org, geometry), mix).plane_bytes / MIB
            cells.append(_cell(f"{attention} + {checkpoints}", f"{org}_mib", paper, f"{computed:.6f}"))
    return cells


def table_b2(geometry: StateGeometry) -> list[Cell]:
    """Return Table B-2 (and the D0 units behind it): whole units and bytes per layer of the three budgets."""
    cells = []
    for name, printed in B2_BUDGETS.items():
        budget = parse_budget(name, geometry)
        units = {org: plan_units(layout_for(org, geometry), budget) for org in ("s0", "s1", "s2", "d0")}
        d0 = units["d0"]
        computed = (
            budget.plane_bytes,
            d0.num_attention_pages,
            d0.num_checkpoints,
            *(units[org].num_pages for org in ("s0", "s1", "s2")),
            d0.attention_layer_bytes,
            d0.recurrent_layer_bytes,
            d0.plane_bytes,
            units["s0"].plane_bytes,
            units["s2"].plane_bytes,
        )
        for column, paper, value in zip(B2_COLUMNS, printed, computed, strict=True):
            cells.append(_cell(name, column, str(paper), str(value)))
    return cells


TABLES = {"a1": table_a1, "b2": table_b2}
