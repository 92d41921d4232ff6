"""Table rows that a decode step reads and writes, found on the device, so that a captured graph can find them anew.

On a CPU the backend plans a step on the host, which sees without waiting when nothing has changed. A GPU must not be
waited for, and a CUDA graph repeats what was recorded: every choice here is therefore a tensor operation on tensors
that are never replaced (slots, tracking slots, mask, source table, tables of states, the static rows).

Imports torch only. Source: SGLang 0.5.23, `AttentionBackend.init_forward_metadata_in_graph`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from sgl_hybrid.memory.ledger import ABSENT


class Rows(NamedTuple):
    """Table rows of some slots. members: [num, groups * M] integer pages; lines: [num, conv_columns] integer."""

    members: torch.Tensor
    lines: torch.Tensor


class DecodePlan(NamedTuple):
    """Rows of the slots that decode reads from and writes to."""

    read: Rows
    write: Rows


def split_rows(rows: torch.Tensor, num_members: int) -> Rows:
    """View rows [num, groups * M + conv_columns] of both tables as members and lines."""
    return Rows(rows[:, :num_members], rows[:, num_members:])


def split_plan(rows: torch.Tensor, num_members: int) -> DecodePlan:
    """View rows [2, num, width], those read before those written, as a plan."""
    return DecodePlan(split_rows(rows[0], num_members), split_rows(rows[1], num_members))


def find_rows(
    tables: torch.Tensor,
    source: torch.Tensor,
    slots: torch.Tensor,
    kept: torch.Tensor | None,
    crossing: torch.Tensor | None,
) -> torch.Tensor:
    """Return what each row of a step reads and writes, [2, batch, width] int32, and move `source` on to what it writes.

    A row reads the slot that holds its state. It writes its own slot or, where it crosses a boundary, the slot that
    keeps it. A row without a slot (SGLang pads a batch with -1 in a graph, with slot 0 elsewhere) is absent in both.
    Allocates; waits for nothing.

    tables: [num_virtual + 1, width] int32. source: [num_virtual + 1] int64, written.
    slots: [batch] integer, distinct but for padding.
    kept: [batch] integer, tracking slots; not positive: none. crossing: [batch] bool. None for both: no row crosses.
    """
    slots = slots.to(torch.int64)
    present = slots > 0
    own = slots.clamp(min=0)
    written = own
    if kept is not None and crossing is not None:
        kept = kept.to(torch.int64)
        written = torch.where(crossing & (kept > 0) & present, kept, own)
    rows = tables[torch.stack((source[own], written))].masked_fill_(~present[:, None], ABSENT)
    # A kept slot holds its own state from now on, and the row goes on from there. Where several entries name one slot
    # (a row that crosses nothing, padding), they agree.
    source[torch.cat((written, own))] = torch.cat((written, written))
    return rows


class StaticRows:
    """Rows at fixed addresses for the largest captured batch; a smaller one has the first of them."""

    def __init__(self, max_batch: int, width: int, num_members: int, device: torch.device) -> None:
        self._rows = torch.full((2, max_batch, width), ABSENT, dtype=torch.int32, device=device)
        self._num_members = num_members

    def fill(self, rows: torch.Tensor) -> None:
        """Copy rows [2, batch, width] in."""
        self._rows[:, : rows.shape[1]].copy_(rows)

    def plan(self, batch: int) -> DecodePlan:
        """The plan of a batch of this size: views, whatever they hold."""
        return split_plan(self._rows[:, :batch], self._num_members)
