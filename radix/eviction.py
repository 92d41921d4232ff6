"""Which cached thing goes next: one recency order over attention leaves, checkpoints and slabs.

A need for pages may be met by any kind in a shared pool; in a dual one each pool evicts its own kind. Nothing is moved
or freed here: the caller carries out one decision, looks at what became free, and asks again.

Recency is a number that grows with every use; the unit that was used is refreshed, not its ancestors. A slab is as
recent as the most recent of its checkpoints: it may go only when all of them may.
Source: paper sections 3.4 and D.2; SGLang 0.5.23 refreshes likewise (`MambaComponent.refresh_lru`).
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
    """The least recent unit of one kind that no request references. `key` is the caller's."""

    kind: Kind
    recency: float
    key: int


_ORDER = {Kind.SLAB: 0, Kind.CHECKPOINT: 1, Kind.ATTENTION: 2}


def next_victim(candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the least recent candidate. Of equally recent ones a slab goes before a checkpoint (it frees its page with
    all its checkpoints), a checkpoint before attention (its loss leaves attention that a shallower boundary can use).
    None if there is no candidate."""
    return min(candidates, key=lambda candidate: (candidate.recency, _ORDER[candidate.kind]), default=None)


def slab_recency(checkpoints: Sequence[float]) -> float:
    """Recency of a slab from those of its cached checkpoints.

    Raises:
        ValueError: a slab without checkpoints is no candidate, its page is free.
    """
    if not checkpoints:
        raise ValueError("expected a slab with at least one checkpoint, got none")
    return max(checkpoints)
