"""Which cached thing goes next: one order over attention leaves, checkpoints and slabs.

A need for pages may be met by any kind in a shared pool; in a dual one each pool evicts its own kind. Nothing is moved
or freed here: the caller carries out one decision, looks at what became free, and asks again.

Recency is a number that grows with every use; the unit that was used is refreshed, not its ancestors. A slab is as
recent as the most recent of its checkpoints: it may go only when all of them may.

With `value` eviction a candidate has a value: the recomputation that its loss is expected to cost, for each byte that
its eviction gives back. The least valuable goes, of equally valuable ones the least recent. Without it every value is 0
and recency decides.

What an open session refers to goes after everything else, in the same order among itself.

Source: paper sections 3.4 and D.2; SGLang 0.5.23 refreshes likewise (`MambaComponent.refresh_lru`) and takes
what is in no session first (`UnifiedLRUList`). The paper evicts by recency; value and sessions are not the paper's.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple


class Kind(enum.Enum):
    """What may be evicted."""

    ATTENTION = "attention"
    CHECKPOINT = "checkpoint"
    SLAB = "slab"


class Candidate(NamedTuple):
    """A unit of one kind that no request references. `key` is the caller's; `value` in tokens per byte; `in_session`:
    an open session refers to it, or to a part of it."""

    kind: Kind
    recency: float
    key: int
    value: float = 0.0
    in_session: bool = False


_ORDER = {Kind.SLAB: 0, Kind.CHECKPOINT: 1, Kind.ATTENTION: 2}


def next_victim(candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the least valuable candidate, of equally valuable ones the least recent; None if there is none. One in a
    session is returned only where all are.

    Of equally recent ones a slab goes before a checkpoint (it frees its page with all its checkpoints), a checkpoint
    before attention (its loss leaves attention that a shallower boundary can use)."""
    return min(
        candidates,
        key=lambda unit: (unit.in_session, unit.value, unit.recency, _ORDER[unit.kind]),
        default=None,
    )


def slab_recency(checkpoints: Sequence[float]) -> float:
    """Recency of a slab from those of its cached checkpoints.

    Raises:
        ValueError: a slab without checkpoints is no candidate, its page is free.
    """
    if not checkpoints:
        raise ValueError("expected a slab with at least one checkpoint, got none")
    return max(checkpoints)


def replay_value(depth: int, nearest: int, requesters: int) -> int:
    """Return the tokens that the loss of a checkpoint is expected to cost: those between its boundary and the nearest
    valid one on its left, which each of the distinct requests that want it would compute again. The attention pages
    between the two are stranded by the loss; where there are none of either, the loss costs nothing.

    depth, nearest: tokens; nearest is 0 if no valid boundary is on the left.

    Raises:
        ValueError: the nearest boundary is not on the left.
    """
    if not 0 <= nearest < depth:
        raise ValueError(f"expected a nearest boundary from 0 to below {depth} tokens, got {nearest}")
    return (depth - nearest) * requesters


def value_per_byte(saved_tokens: int, freed_bytes: int) -> float:
    """Return the value of a candidate. One whose eviction gives nothing back is worth keeping at any price.

    Raises:
        ValueError: a quantity is negative.
    """
    if saved_tokens < 0 or freed_bytes < 0:
        raise ValueError(f"expected tokens and bytes from 0 on, got {saved_tokens} and {freed_bytes}")
    return saved_tokens / freed_bytes if freed_bytes else float("inf")
