"""A small model of a scheduler over one shared pool: what the policies of `radix` do to each other and to progress.

A block of attention is one page, a state `STATE_PAGES`, and every block ends on a boundary. A step admits from the head
of the queue, then every running request makes one block; what is short evicts cached units, and when that does not
suffice a running request is taken back. The model takes every decision from `radix`, does what it says and counts pages
by looking at all of them, so a budget that is exceeded, a protected unit that goes, or a step without progress shows.
"""

from __future__ import annotations

import zlib
from collections import Counter, deque
from typing import NamedTuple

from radix.demand import BoundaryNames, Demand, Namespace
from radix.eviction import Candidate, Kind, next_victim, replay_value, value_per_byte
from radix.headroom import Headroom, PoolCheck, Verdict, headroom_blocks, judge
from radix.pinning import Pins, Resident
from radix.protection import ProtectionBudget
from radix.retention import Lifetime, Plan, Produced, Retention

STATE_PAGES = 2

Prefix = tuple[int, ...]


class Work(NamedTuple):
    """A request: its prompt, one number a block, and the blocks it makes."""

    name: str
    prompt: Prefix
    output: int


class Policies(NamedTuple):
    """One setting of every policy."""

    headroom: Headroom
    lifetime: Lifetime = Lifetime.CACHED
    retention_k: int = 2
    pin_k: int | None = None
    protection: float = 0.25
    value_eviction: bool = False
    every_boundary: bool = False
    """States at every boundary of a prompt, not at its end and branch point only."""


class Scheduler:
    """One pool of `num_pages`, first come first served."""

    def __init__(self, num_pages: int, policies: Policies) -> None:
        self.num_pages = num_pages
        self.policies = policies
        self.waiting: deque[Work] = deque()
        self.running: list[Work] = []
        self.done: list[str] = []
        self.made: Counter[str] = Counter()
        self.wanted, self.used = Demand(), Demand()
        self.budget = ProtectionBudget.share(policies.protection, [num_pages])
        self.retention = Retention(policies.lifetime, self._wanted_by, self.budget, k=policies.retention_k)
        self.pins = Pins(policies.pin_k, self.budget)
        self.blocks: dict[Prefix, int] = {}
        self.states: dict[Prefix, int] = {}
        self.depth_of: dict[int, Prefix] = {}
        self.retracted = 0
        self._clock = 0

    def submit(self, work: Work) -> None:
        """Queue a request that fits alone: its blocks, its state, one to make, and the one that it starts from."""
        assert len(work.prompt) + work.output + 3 * STATE_PAGES <= self.num_pages
        self.waiting.append(work)

    def step(self) -> None:
        """One round of admission and one block for every request that still runs after it."""
        before = sum(self.made.values()), len(self.done)
        busy = bool(self.waiting or self.running)
        self._admit()
        self._make_room()
        for work in list(self.running):
            self._decode(work)
        self.check()
        assert not busy or (sum(self.made.values()), len(self.done)) != before, "expected progress in every step"

    def check(self) -> None:
        """Verify that pages add up and that budgets hold."""
        assert self._held() <= self.num_pages
        costs = [pin.cost[0] for pin in self.pins.held.values()] + [c[0] for c in self.retention.protected.values()]
        assert sum(costs) == self.budget.used[0] <= self.budget.limits[0]
        assert set(self.retention.protected) <= set(self.depth_of)
        assert set(self.pins.held) <= {work.name for work in self.waiting}
        assert self.depth_of == {v: prefix for prefix, v in self.states.items()}
        running = {work.name for work in self.running}
        assert {self.retention.producer_of(v) for v in self.retention.protected} <= running

    # Admission

    def _admit(self) -> None:
        while self.waiting:
            work = self.waiting[0]
            text = self._text(work)
            self._apply(self.retention.demanded(self.wanted.register(work.name, self._names(text))))
            verdict = self._judge(work)
            if verdict is Verdict.SHORT and not self.running and self._unprotect():
                verdict = self._judge(work)
            if verdict is not Verdict.ADMIT:
                assert self.running, "expected a request that fits to be admitted when nothing runs"
                if verdict is Verdict.HEADROOM:
                    self.policies.headroom.deferred()
                return
            self.waiting.popleft()
            hit = self._hit(text)
            if hit:
                self.used.register(work.name, [self._names(text[:hit])[-1]])
                self._clock += 1
                self.blocks[text[:hit]] = self._clock
            self.running.append(work)
            self.pins.drop(work.name)
            self._free(self._fresh(text, hit), keep=text)
            found = max((end for end in range(1, len(text)) if text[:end] in self.blocks), default=0)
            for end in range(1, len(text) + 1):
                self.blocks.setdefault(text[:end], self._clock)
            ends = range(hit + 1, len(text)) if self.policies.every_boundary else sorted({found, len(text) - 1} - {0})
            for end in ends:
                self._publish(work, text[:end])

    def _judge(self, work: Work) -> Verdict:
        text = self._text(work)
        need = self._fresh(text, self._hit(text))
        available = self.num_pages - self._held() + self._evictable(keep=text)
        kept = headroom_blocks(self.policies.headroom.fraction, self.num_pages)
        return judge([PoolCheck(need, available, kept)], idle=not self.running)

    def _fresh(self, text: Prefix, hit: int) -> int:
        """Pages that admission takes: the state, the blocks that are not cached, and one more of each to go on."""
        return 2 * STATE_PAGES + 1 + sum(text[:end] not in self.blocks for end in range(1, len(text) + 1))

    def _hit(self, text: Prefix) -> int:
        """Deepest joint boundary before the last block."""
        return max((end for end in range(1, len(text)) if text[:end] in self.states), default=0)

    # Decode

    def _make_room(self) -> None:
        """Evict, or take requests back, until every running one can make a block; the last takes what is protected."""
        while not self._free(len(self.running)):
            if len(self.running) > 1:
                self._retract(min(self.running, key=lambda work: (self.made[work.name], -len(work.prompt))))
            else:
                assert self._unprotect(), "expected a request that fits to go on when it is alone"

    def _retract(self, work: Work) -> None:
        self.running.remove(work)
        self._apply(self.retention.ended(work.name))
        text = self._text(work)
        names = self._names(text)
        self.pins.choose(
            work.name,
            [
                Resident(end, end, self.used.count(names[end - 1]), (STATE_PAGES + end,))
                for end in range(1, len(text))
                if text[:end] in self.states
            ],
        )
        self.waiting.append(work)
        self.retracted += 1
        self.policies.headroom.retracted(len(text) - self._hit(text))

    def _decode(self, work: Work) -> None:
        self.made[work.name] += 1
        text = self._text(work)
        self._clock += 1
        self.blocks.setdefault(text, self._clock)
        if self.made[work.name] == work.output:
            self.running.remove(work)
            self.done.append(work.name)
        self._publish(work, text)
        if work not in self.running:
            self._apply(self.retention.ended(work.name))

    def _publish(self, work: Work, text: Prefix) -> None:
        """Name the state after a prefix, if there is none and room for one can be made."""
        if text in self.states or not self._free(STATE_PAGES, keep=text):
            return
        self._clock += 1
        self.states[text] = self._clock
        self.depth_of[self._clock] = text
        name = self._names(text)[-1]
        self.used.register(work.name, [name])
        produced = Produced(name, len(text), self._clock, (STATE_PAGES,))
        self._apply(self.retention.published(work.name, produced))

    # Memory

    def _held(self) -> int:
        return len(self.blocks) + STATE_PAGES * (len(self.states) + len(self.running))

    def _locked(self, keep: Prefix = ()) -> tuple[set[Prefix], set[Prefix]]:
        """Blocks and states that may not go: those of running requests, of `keep`, of pins and of retention."""
        blocks, states = set[Prefix](), set[Prefix]()
        for text in [*(self._text(work) for work in self.running), keep]:
            blocks.update(text[:end] for end in range(1, len(text) + 1))
        if keep and (hit := self._hit(keep)):
            states.add(keep[:hit])
        for work in self.waiting:
            pin = self.pins.held.get(work.name)
            if pin is not None:
                text = self._text(work)[: pin.depth]
                states.add(text)
                blocks.update(text[:end] for end in range(1, len(text) + 1))
        for checkpoint in self.retention.protected:
            text = self.depth_of[checkpoint]
            states.add(text)
            blocks.update(text[:end] for end in range(1, len(text) + 1))
        return blocks, states

    def _evictable(self, keep: Prefix) -> int:
        blocks, states = self._locked(keep)
        return len(self.blocks.keys() - blocks) + STATE_PAGES * len(self.states.keys() - states)

    def _free(self, pages: int, keep: Prefix = ()) -> bool:
        """Evict until `pages` are free; False if what may go does not suffice."""
        while self.num_pages - self._held() < pages:
            blocks, states = self._locked(keep)
            inner = {prefix[:-1] for prefix in self.blocks}
            found = [prefix for prefix in self.blocks if prefix not in blocks and prefix not in inner]
            victims = [
                *(("block", prefix) for prefix in found),
                *(("state", p) for p in self.states if p not in states),
            ]
            victim = next_victim([self._candidate(key, *victim) for key, victim in enumerate(victims)])
            if victim is None:
                return False
            kind, prefix = victims[victim.key]
            if kind == "block":
                del self.blocks[prefix]
            if prefix in self.states:
                self._lose(prefix)
        return True

    def _candidate(self, key: int, kind: str, prefix: Prefix) -> Candidate:
        value = 0.0
        if self.policies.value_eviction and prefix in self.states:
            nearest = self._hit(prefix)
            value = value_per_byte(
                replay_value(len(prefix), nearest, self._wanted_by(self._names(prefix)[-1])),
                STATE_PAGES + (kind == "block"),
            )
        recency = self.blocks[prefix] if kind == "block" else self.states[prefix]
        return Candidate(Kind.ATTENTION if kind == "block" else Kind.CHECKPOINT, recency, key, value)

    def _lose(self, prefix: Prefix) -> None:
        checkpoint = self.states.pop(prefix)
        assert checkpoint not in self.retention.protected, "expected a protected checkpoint to stay"
        del self.depth_of[checkpoint]
        self.retention.lost(checkpoint)

    def _apply(self, plan: Plan) -> None:
        _, locked = self._locked()
        for checkpoint in plan.free:
            if self.depth_of[checkpoint] not in locked:
                self._lose(self.depth_of[checkpoint])

    def _unprotect(self) -> bool:
        """Give up what is protected; False if nothing was."""
        if not self.pins.held and not self.retention.protected:
            return False
        for name in list(self.pins.held):
            self.pins.drop(name)
        self.retention.yielded()
        return True

    # Names

    def _text(self, work: Work) -> Prefix:
        """The prompt and the blocks made so far; what a request makes is its own."""
        own = zlib.crc32(work.name.encode())
        return work.prompt + tuple(100_000 + 1000 * own + index for index in range(self.made[work.name]))

    def _names(self, text: Prefix) -> list[bytes]:
        return BoundaryNames(Namespace(), 1).up_to(text)

    def _wanted_by(self, name: bytes) -> int:
        return self.wanted.count(name)
