"""The policies of one scheduler, joined: headroom, who wants and who used which boundary, retention, pins, counters.

Retention and pins share one protection budget. `wanted` has a request at every boundary of its prompt, whether or not
a checkpoint is there; `used` has those whose prefix hit ended on a boundary, and the one that published it. Retention
and the value of a checkpoint ask the first, pins the second.
Source: paper sections 4.4, 4.5 and B.2.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import zip_longest

import msgspec

from radix.demand import BoundaryNames, Demand, Namespace
from radix.headroom import AutoHeadroom, FixedHeadroom, Headroom
from radix.pinning import Pins, Resident
from radix.protection import ProtectionBudget, Units
from radix.retention import Lifetime, Plan, Produced, Retention
from radix.work import Rounds, Submitted, WorkCounts


class Chosen(msgspec.Struct, frozen=True):
    """One setting of every policy, with the defaults of the flags. headroom: f, or None for the automatic one. pin_k:
    None pins nothing."""

    headroom: float | None = None
    lifetime: Lifetime = Lifetime.CACHED
    retention_k: int = 2
    pin_k: int | None = None
    protection: float = 0.25
    value_eviction: bool = False


class PolicyCounts(msgspec.Struct):
    """Decisions since start.

    headroom_waits: scheduler steps in which the first waiting request fitted and was left for headroom alone.
    adopted_own, adopted_running, adopted_ended: admitted requests that continue from a checkpoint, by who published it:
    themselves, a request that runs, one that does not.
    eligible_boundaries: boundaries that `retention_k` distinct requests have come to want.
    retained: checkpoints that were protected for their producer. retained_requests: distinct requests that continued
    from one while it was protected. evictions_skipped: decisions in which a retained checkpoint was due and was passed
    over. released: checkpoints that the transient lifetime freed; release_skipped: those it left to another request.
    yielded: times that all protection was given up because nothing else was left.
    resumed, resumed_at_pin: retracted requests admitted again; those that continue from their pin or beyond.
    """

    headroom_waits: int = 0
    adopted_own: int = 0
    adopted_running: int = 0
    adopted_ended: int = 0
    eligible_boundaries: int = 0
    retained: int = 0
    retained_requests: int = 0
    evictions_skipped: int = 0
    released: int = 0
    release_skipped: int = 0
    yielded: int = 0
    resumed: int = 0
    resumed_at_pin: int = 0


class Adoption(msgspec.Struct, frozen=True):
    """An admission: the request, whether it was retracted before, the depth in tokens and the checkpoint that it
    continues from (None: from nothing)."""

    request: str
    resumes: bool
    depth: int
    checkpoint: int | None


class Occupancy(msgspec.Struct):
    """Units of each pool that are retained and pinned: most at a time, and their sums over the scheduler's steps."""

    steps: int = 0
    retained_most: Units = ()
    retained_unit_steps: Units = ()
    pinned_most: Units = ()
    pinned_unit_steps: Units = ()


class Policies:
    """Decisions of one scheduler (see the module). What is to be done comes back as a `Plan` or a pin.

    Args:
        grid: tokens between two boundaries.
        pools: units of each pool; one in a shared organization, attention pages and checkpoints in a dual one.
        pool_tokens: tokens that the memory would hold with attention only.
    """

    def __init__(self, chosen: Chosen, *, grid: int, pools: Units, pool_tokens: int) -> None:
        self.chosen = chosen
        self.grid = grid
        self.headroom: Headroom = (
            AutoHeadroom(pool_tokens) if chosen.headroom is None else FixedHeadroom(chosen.headroom)
        )
        self.wanted, self.used = Demand(), Demand()
        self.budget = ProtectionBudget.share(chosen.protection, pools)
        self.retention = Retention(chosen.lifetime, self.wanted.count, self.budget, k=chosen.retention_k)
        self.pins = Pins(chosen.pin_k, self.budget)
        self.counts = PolicyCounts()
        self.work = WorkCounts()
        self.rounds = Rounds(self.work)
        self.occupancy = Occupancy()
        self._names: dict[str, BoundaryNames] = {}
        self._owner: dict[int, str] = {}
        self._boundary: dict[int, bytes] = {}
        self._evicted: OrderedDict[bytes, None] = OrderedDict()

    @property
    def names_needed(self) -> bool:
        """Whether a policy asks who wants or used a boundary; otherwise no prompt is read for it."""
        chosen = self.chosen
        asks = chosen.lifetime is Lifetime.RETAINED or chosen.pin_k is not None or chosen.value_eviction
        return asks or chosen.headroom is None

    def arrived(self, request: str, namespace: Namespace, tokens: Sequence[int]) -> Plan:
        """A request waits with this prompt; again for one that is retracted, which wants nothing new."""
        if not self.names_needed or request in self._names:
            return Plan()
        names = self._names[request] = BoundaryNames(namespace, self.grid)
        new = self.wanted.register(request, names.up_to(tokens[: len(tokens) - 1]))
        k = self.chosen.retention_k
        self.counts.eligible_boundaries += sum(self.wanted.count(name) == k for name in new)
        return self._counted(self.retention.demanded(new))

    def admitted(self, adoption: Adoption, tokens: Sequence[int]) -> Resident | None:
        """A request is admitted, with its execution references taken; return the pin to drop now, if it had one."""
        counts, checkpoint, request = self.counts, adoption.checkpoint, adoption.request
        pin = self.pins.drop(request)
        counts.resumed += adoption.resumes
        counts.resumed_at_pin += pin is not None and adoption.depth >= pin.depth
        if not adoption.resumes:
            self.headroom.missed(self._missed_tokens(request, adoption.depth))
        if checkpoint is None:
            return pin
        producer = self.retention.producer_of(checkpoint)
        if self._owner.get(checkpoint) == request:
            counts.adopted_own += 1
        elif producer is not None:
            counts.adopted_running += 1
        else:
            counts.adopted_ended += 1
        counts.retained_requests += checkpoint in self.retention.protected and not adoption.resumes
        if request in self._names:
            self.used.register(request, self._names[request].up_to(tokens[: adoption.depth])[-1:])
        return pin

    def _missed_tokens(self, request: str, depth: int) -> int:
        """Tokens beyond `depth` up to the deepest boundary of the request's prompt whose checkpoint was evicted."""
        names = self._names[request].named if request in self._names else []
        deepest = max((place for place, name in enumerate(names, start=1) if name in self._evicted), default=0)
        return max(0, deepest * self.grid - depth)

    def published(self, request: str, tokens: Sequence[int], checkpoint: int, cost: Units) -> Plan:
        """A request has published the boundary after `tokens`; cost: units that protecting the checkpoint takes."""
        boundary = b""
        if request in self._names:
            boundary = self._names[request].up_to(tokens)[-1]
            self.used.register(request, [boundary])
            self._boundary[checkpoint] = boundary
            self._evicted.pop(boundary, None)
        self._owner[checkpoint] = request
        return self._counted(self.retention.published(request, Produced(boundary, len(tokens), checkpoint, cost)))

    def step(self, work: Submitted, *, waiting: bool) -> None:
        """A batch was submitted; waiting: whether a request is left in the queue."""
        self.work.submit(work)
        if waiting and self.rounds.held_back:
            self.counts.headroom_waits += 1
            self.headroom.deferred()
        seen = self.occupancy
        seen.steps += 1
        if not (self.retention.protected or self.pins.held):
            return
        self._observe()
        seen.retained_unit_steps = _plus(seen.retained_unit_steps, self.retention.units)
        seen.pinned_unit_steps = _plus(seen.pinned_unit_steps, self.pins.units)

    def _observe(self) -> None:
        seen = self.occupancy
        seen.retained_most = _most(seen.retained_most, self.retention.units)
        seen.pinned_most = _most(seen.pinned_most, self.pins.units)

    def retracted(self, request: str, residents: Sequence[Resident]) -> Resident | None:
        """A request is taken back; return the boundary to pin, if any."""
        pin = self.pins.choose(request, residents)
        self._observe()
        return pin

    def ended(self, request: str) -> Plan:
        """A request no longer runs: finished, aborted or retracted."""
        return self.retention.ended(request)

    def forget(self, request: str) -> Resident | None:
        """A request will not come back; return the pin to drop, if it had one."""
        self._names.pop(request, None)
        return self.pins.drop(request)

    def released(self, checkpoint: int) -> None:
        """A checkpoint is freed because its lifetime is over, not because memory is short."""
        self._boundary.pop(checkpoint, None)

    def lost(self, checkpoint: int) -> None:
        """A checkpoint left the tree: evicted, unless `released` came before."""
        self._owner.pop(checkpoint, None)
        boundary = self._boundary.pop(checkpoint, None)
        if boundary is not None:
            self._evicted[boundary] = None
            if len(self._evicted) > self.wanted.max_boundaries:
                self._evicted.popitem(last=False)
        self.retention.lost(checkpoint)

    def flushed(self) -> None:
        """The tree was dropped by whoever runs the server: nothing of it was evicted for want of memory."""
        self._owner.clear()
        self._boundary.clear()
        self._evicted.clear()

    def yielded(self) -> tuple[Plan, list[Resident]]:
        """Give up all protection; return what is to be unprotected."""
        pins = [pin for request in list(self.pins.held) if (pin := self.pins.drop(request)) is not None]
        plan = self.retention.yielded()
        self.counts.yielded += bool(pins or plan.unprotect)
        return plan, pins

    def requesters(self, checkpoint: int) -> int:
        """Distinct requests that want the boundary of a checkpoint; at least 1, which whoever published it was."""
        boundary = self._boundary.get(checkpoint)
        return max(1, self.wanted.count(boundary)) if boundary is not None else 1

    def users(self, checkpoint: int) -> int:
        """Distinct requests that used the boundary of a checkpoint, the one that published it among them."""
        boundary = self._boundary.get(checkpoint)
        return 0 if boundary is None else self.used.count(boundary)

    def _counted(self, plan: Plan) -> Plan:
        self.counts.retained += len(plan.protect)
        self._observe()
        return plan


def _plus(sums: Units, units: Units) -> Units:
    return tuple(a + b for a, b in zip_longest(sums, units, fillvalue=0))


def _most(highest: Units, units: Units) -> Units:
    return tuple(max(a, b) for a, b in zip_longest(highest, units, fillvalue=0))
