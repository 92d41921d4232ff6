"""Pins at preemption: one boundary of a retracted request is kept until the request resumes.

Of the boundaries that a retracted request could resume from, the rightmost one is pinned that enough distinct requests
have used: those whose prefix hit found it resident, and the one that owns it because it published it. A repeat by one
request does not count; at K = 1 the owner alone suffices. A pin takes its units, the attention before the boundary
included, from the protection budget; a boundary that does not fit is passed over for the next on its left.

When the request resumes, the caller takes its execution references first and drops the pin afterwards, so the boundary
is referenced without a gap.
Source: paper section B.2, settings R0 (K = 3), R1 (2) and R2 (1).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from radix.protection import ProtectionBudget, Units


class Resident(NamedTuple):
    """A boundary at which a request could resume: depth in tokens, a key of the caller's (the tree's node), distinct
    requesters, and the units of each pool that a pin takes."""

    depth: int
    key: int
    requesters: int
    cost: Units


class PinCounts(msgspec.Struct):
    """Pin decisions since start: retracted requests tested, those with a boundary that enough requests had used,
    boundaries pinned, and most pins at a time."""

    tested: int = 0
    eligible: int = 0
    pinned: int = 0
    most_at_once: int = 0


class Pins:
    """Pins by request. A request has at most one.

    Args:
        k: distinct requesters that a boundary needs; None pins nothing.
    """

    def __init__(self, k: int | None, budget: ProtectionBudget) -> None:
        if k is not None and k < 1:
            raise ValueError(f"expected a threshold of at least 1 request, got {k}")
        self.k = k
        self.counts = PinCounts()
        self.held: dict[str, Resident] = {}
        self._budget = budget

    @property
    def units(self) -> Units:
        """Units of each pool that the pins hold now."""
        return tuple(map(sum, zip(*(pin.cost for pin in self.held.values()), strict=True)))

    def choose(self, request: str, boundaries: Iterable[Resident]) -> Resident | None:
        """Pin the rightmost eligible boundary of a retracted request and return it; None if there is none.

        Raises:
            ValueError: the request has a pin already.
        """
        if self.k is None:
            return None
        if request in self.held:
            raise ValueError(f"expected a request without a pin, got {request!r}")
        self.counts.tested += 1
        eligible = [boundary for boundary in boundaries if boundary.requesters >= self.k]
        self.counts.eligible += bool(eligible)
        for boundary in sorted(eligible, key=lambda resident: -resident.depth):
            if self._budget.take(boundary.cost):
                self.held[request] = boundary
                self.counts.pinned += 1
                self.counts.most_at_once = max(self.counts.most_at_once, len(self.held))
                return boundary
        return None

    def drop(self, request: str) -> Resident | None:
        """Drop the pin of a request that has resumed (with its references taken) or will not; None if it had none."""
        pin = self.held.pop(request, None)
        if pin is not None:
            self._budget.give_back(pin.cost)
        return pin
