"""How long a request's own earlier boundaries stay while it runs.

The producer of a checkpoint is the request that published it. TRANSIENT frees a producer's earlier boundary when it
passes the next one. CACHED leaves it in the order of recency. RETAINED does so too, and protects from eviction, while
the producer runs, the boundaries that at least K distinct requests want, within the protection budget. When the
producer ends or is retracted, its boundaries are ordinary cached ones.

Decisions only: the caller frees, protects and unprotects what a `Plan` names, and says what became of it.
Source: paper section 4.5.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from radix.protection import ProtectionBudget, Units


class Lifetime(enum.StrEnum):
    """What happens to a boundary when its producer passes the next."""

    TRANSIENT = "transient"
    CACHED = "cached"
    RETAINED = "retained"


class Produced(NamedTuple):
    """A published checkpoint of a running request: the name of its boundary, its depth in tokens, its id, and the
    units of each pool that protecting it takes."""

    boundary: bytes
    depth: int
    checkpoint: int
    cost: Units


class Plan(msgspec.Struct, frozen=True):
    """Checkpoints to free, to protect and to unprotect, by id."""

    free: tuple[int, ...] = ()
    protect: tuple[int, ...] = ()
    unprotect: tuple[int, ...] = ()


class Retention:
    """Boundaries of running requests under one lifetime.

    Args:
        wanted: distinct requests that want a boundary.
        k: from how many on a boundary is retained.
    """

    def __init__(
        self, lifetime: Lifetime, wanted: Callable[[bytes], int], budget: ProtectionBudget, *, k: int = 2
    ) -> None:
        if k < 1:
            raise ValueError(f"expected a threshold of at least 1 request, got {k}")
        self.lifetime = lifetime
        self.k = k
        self.protected: dict[int, Units] = {}
        self._wanted = wanted
        self._budget = budget
        self._produced: dict[str, dict[int, Produced]] = {}
        self._producer_of: dict[int, str] = {}
        self._by_boundary: dict[bytes, set[int]] = {}

    @property
    def units(self) -> Units:
        """Units of each pool that are protected now."""
        return tuple(map(sum, zip(*self.protected.values(), strict=True)))

    def producer_of(self, checkpoint: int) -> str | None:
        """Return the running request that published a checkpoint, None if it ended or never was."""
        return self._producer_of.get(checkpoint)

    def published(self, producer: str, produced: Produced) -> Plan:
        """A running request has published a boundary."""
        own = self._produced.setdefault(producer, {})
        earlier = tuple(v for v, other in own.items() if other.depth < produced.depth)
        own[produced.checkpoint] = produced
        self._producer_of[produced.checkpoint] = producer
        self._by_boundary.setdefault(produced.boundary, set()).add(produced.checkpoint)
        if self.lifetime is Lifetime.TRANSIENT:
            return Plan(free=earlier)
        return Plan(protect=self._protect([produced.checkpoint]))

    def demanded(self, boundaries: Iterable[bytes]) -> Plan:
        """More requests want these boundaries."""
        return Plan(
            protect=self._protect(v for boundary in boundaries for v in sorted(self._by_boundary.get(boundary, ())))
        )

    def ended(self, producer: str) -> Plan:
        """A producer finished, was aborted or was retracted."""
        own = self._produced.pop(producer, {})
        released = tuple(v for v in own if v in self.protected)
        for checkpoint in own:
            self._forget(checkpoint, own[checkpoint])
        return Plan(unprotect=released)

    def lost(self, checkpoint: int) -> None:
        """A checkpoint was freed or evicted; nothing of it is protected any more."""
        producer = self._producer_of.get(checkpoint)
        if producer is not None:
            self._forget(checkpoint, self._produced[producer].pop(checkpoint))

    def yielded(self) -> Plan:
        """Give up all protection, because nothing else is left to evict; the boundaries stay as cached ones."""
        released = tuple(self.protected)
        for checkpoint in released:
            self._budget.give_back(self.protected.pop(checkpoint))
        return Plan(unprotect=released)

    def _protect(self, checkpoints: Iterable[int]) -> tuple[int, ...]:
        if self.lifetime is not Lifetime.RETAINED:
            return ()
        added = []
        for checkpoint in checkpoints:
            produced = self._produced[self._producer_of[checkpoint]][checkpoint]
            if checkpoint in self.protected or self._wanted(produced.boundary) < self.k:
                continue
            if self._budget.take(produced.cost):
                self.protected[checkpoint] = produced.cost
                added.append(checkpoint)
        return tuple(added)

    def _forget(self, checkpoint: int, produced: Produced) -> None:
        del self._producer_of[checkpoint]
        same = self._by_boundary[produced.boundary]
        same.discard(checkpoint)
        if not same:
            del self._by_boundary[produced.boundary]
        cost = self.protected.pop(checkpoint, None)
        if cost is not None:
            self._budget.give_back(cost)
