"""Rows that a decode step finds on the device equal those that a loop over the rows finds."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_hybrid.memory.ledger import ABSENT
from sgl_hybrid.seams.decode_tables import StaticRows, find_rows

NUM_VIRTUAL, WIDTH, MEMBERS, MAX_BATCH = 12, 3, 2, 5
NOTHING = [ABSENT] * WIDTH

Row = tuple[int, int, bool]
"""Slot, tracking slot and whether the row crosses a boundary."""


@st.composite
def steps(draw: st.DrawFn) -> list[list[Row]]:
    """Batches of running slots with padding between them; no slot is in two places of a step."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        ids = iter(draw(st.permutations(range(1, NUM_VIRTUAL + 1))))
        batch = []
        for _ in range(draw(st.integers(0, MAX_BATCH))):
            slot = draw(st.sampled_from([-1, 0])) if draw(st.integers(0, 4)) == 0 else next(ids)
            batch.append(
                (slot, draw(st.sampled_from([-1, 0])) if draw(st.booleans()) else next(ids), draw(st.booleans()))
            )
        found.append(batch)
    return found


def walk(tables: list[list[int]], source: list[int], batch: list[Row]) -> tuple[list[list[int]], list[list[int]]]:
    """What each row reads and writes; moves `source` on."""
    read, write = [], []
    for slot, kept, crosses in batch:
        written = kept if crosses and kept > 0 else slot
        read.append(tables[source[slot]] if slot > 0 else NOTHING)
        write.append(tables[written] if slot > 0 else NOTHING)
    for slot, kept, crosses in batch:
        if slot > 0:
            written = kept if crosses and kept > 0 else slot
            source[written] = source[slot] = written
    return read, write


@given(steps())
def test_rows_and_sources_equal_a_loop(batches: list[list[Row]]) -> None:
    tables = [[10 * v + column for column in range(WIDTH)] for v in range(NUM_VIRTUAL + 1)]
    source = list(range(NUM_VIRTUAL + 1))
    tables_on_device, source_on_device = torch.tensor(tables, dtype=torch.int32), torch.tensor(source)
    static = StaticRows(MAX_BATCH, WIDTH, MEMBERS, torch.device("cpu"))
    for batch in batches:
        slots, kept, crossing = (list(column) for column in zip(*batch, strict=True)) if batch else ([], [], [])
        static.fill(
            find_rows(
                tables_on_device,
                source_on_device,
                torch.tensor(slots, dtype=torch.int32),
                torch.tensor(kept, dtype=torch.int64),
                torch.tensor(crossing, dtype=torch.bool),
            )
        )
        plan = static.plan(len(batch))
        found = tuple(torch.cat(rows, dim=1).tolist() for rows in plan)
        assert found == walk(tables, source, batch)
        assert source_on_device.tolist() == source
