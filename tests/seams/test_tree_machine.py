"""A state machine over pages, slabs, checkpoints and the tree of every organization, against the naive tree.

Requests live as SGLang's scheduler lets them; `ShadowedServer` compares each call, and `check` everything after it.
`TREE_MACHINE_RUNS` and `TREE_MACHINE_STEPS` set Hypothesis' runs and the most steps of one, `TREE_MACHINE_WALK` the
steps of the long walk through each organization.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from radix.eviction import Kind
from sgl_hybrid.memory import ORGANIZATIONS
from sgl_hybrid.seams.admission import free_attention_pages, free_state_slots
from tests.oracles.tree import Prefix
from tests.seams.shadow import ShadowedServer
from tests.seams.tree_fixture import tiny_plan
from tests.tiny_layouts import PAGE_TOKENS

RUNS = int(os.environ.get("TREE_MACHINE_RUNS", "80"))
STEPS = int(os.environ.get("TREE_MACHINE_STEPS", "40"))
WALK_STEPS = int(os.environ.get("TREE_MACHINE_WALK", "2000"))
MAX_PROMPT_TOKENS = 180

T = TypeVar("T")
pytestmark = pytest.mark.usefixtures("published")


class TreeMachine(RuleBasedStateMachine):
    """The rules' choices are numbers, counted round and round over what there is."""

    @initialize(
        org=st.sampled_from([*sorted(ORGANIZATIONS), "s2", "s2"]),
        members=st.integers(1, 2),
        groups=st.integers(1, 2),
        conv_channels=st.sampled_from([10, 20, 40]),
        grid_blocks=st.integers(1, 2),
        checkpoints=st.integers(3, 12),
        spare=st.integers(6, 20),
        migrate=st.booleans(),
    )
    def start(self, org: str, checkpoints: int, spare: int, *, migrate: bool = False, **shape: int) -> None:
        plan = tiny_plan(
            org,
            pages=spare if org == "d0" else spare + checkpoints * (shape["members"] * shape["groups"] + 1),
            checkpoints=checkpoints,
            slab_reclaim="migrate" if migrate and org == "s2" else None,
            **shape,
        )
        self.server = ShadowedServer(plan)
        self.asked: list[Prefix] = []

    @rule(
        blocks=st.lists(st.integers(0, 2), min_size=1, max_size=8),
        tail=st.integers(0, 15),
        salted=st.integers(0, 4),
        twin=st.booleans(),
    )
    def arrive(self, blocks: list[int], tail: int, salted: int, twin: bool) -> None:
        """A prompt of whole blocks that others may begin with too, and a rest; block 2 leaves block 0 in its middle."""
        tokens = [3 if symbol == 2 and at >= 8 else symbol % 2 for symbol in blocks for at in range(PAGE_TOKENS)]
        prompt = ("salt" if salted == 0 else None, (*tokens, *range(10, 10 + tail)))
        self.admit(*[prompt] * (1 + twin))

    @rule(pick=st.integers(0, 99), more=st.integers(1, 40))
    def come_back(self, pick: int, more: int) -> None:
        """The next turn of a conversation."""
        for salt, tokens in picked(self.asked, pick):
            self.admit((salt, (*tokens, *range(50, 50 + more))[:MAX_PROMPT_TOKENS]))

    @rule(pick=st.integers(0, 99), blocks=st.integers(1, 12))
    def extend(self, pick: int, blocks: int) -> None:
        for flight in picked([flight for flight in self.server.flights if not flight.prefilled], pick):
            self.server.extend(flight, end=flight.running.req.prefix_len + blocks * PAGE_TOKENS)

    @rule(pick=st.integers(0, 99), count=st.integers(1, 20))
    def decode(self, pick: int, count: int) -> None:
        for flight in picked([flight for flight in self.server.flights if flight.prefilled], pick):
            for _ in range(min(count, flight.tokens_left)):
                if not self.server.decode(flight, flight.length * 7 % 5):
                    break

    @rule(pick=st.integers(0, 99))
    def finish(self, pick: int) -> None:
        for flight in picked([flight for flight in self.server.flights if flight.prefilled], pick):
            self.note(flight.prefix(MAX_PROMPT_TOKENS))
            self.server.finish(flight)

    @rule(pick=st.integers(0, 99))
    def abort(self, pick: int) -> None:
        for flight in picked(self.server.flights, pick):
            self.server.abort(flight)

    @rule(pick=st.integers(0, 99), length=st.integers(1, MAX_PROMPT_TOKENS), pin=st.booleans())
    def probe(self, pick: int, length: int, pin: bool) -> None:
        """Look up the beginning of something asked before; pinned, it is locked as for a request."""
        for salt, tokens in picked(self.asked, pick):
            self.server.probe(tokens[:length], salt, pin=pin and len(self.server.pins) < 4)

    @rule(pick=st.integers(0, 99))
    def unpin(self, pick: int) -> None:
        if self.server.pins:
            self.server.unpin(pick % len(self.server.pins))

    @rule(count=st.integers(1, 8), slots=st.booleans())
    def run_short(self, count: int, slots: bool) -> None:
        self.server.run_short(**{"slots" if slots else "pages": count})

    @rule(slots=st.booleans(), sure=st.integers(0, 9))
    def run_dry(self, slots: bool, sure: int) -> None:
        """One time in ten: there is as much as admission is told."""
        if sure == 9:
            claim = (free_state_slots if slots else free_attention_pages)(self.server.cache.tree)
            assert self.server.run_dry(slots=slots) >= claim

    @rule(pick=st.integers(0, 99))
    def reclaim(self, pick: int) -> None:
        store = self.server.cache.memory.store
        slabs = [] if store.slabs is None else [page for page in store.slabs.slabs() if store.is_reclaimable(page)]
        for page in picked(slabs, pick):
            self.server.reclaim(page)

    @rule()
    def migrate(self) -> None:
        """With that policy, empty the sparsest idle slab: nothing is lost, and no byte changes."""
        slabs = self.server.cache.memory.store.slabs
        count = 0 if slabs is None else slabs.num_slabs
        if self.server.cache.tree._migrate_slab():
            assert slabs.num_slabs == count - 1
            self.server.settle()

    @rule(sure=st.integers(0, 19))
    def flush(self, sure: int) -> None:
        """One time in twenty."""
        if sure == 19:
            self.server.flush()

    @invariant()
    def every_rule_holds(self) -> None:
        self.server.check()

    def admit(self, *prompts: Prefix) -> None:
        """Admit in one pass and bind at once: it takes what admission has reserved."""
        self.note(prompts[0])
        flights = self.server.admit(*prompts)
        if flights:
            assert self.server.extend(*flights, end=flights[0].running.req.prefix_len + 3 * PAGE_TOKENS)

    def note(self, prompt: Prefix) -> None:
        self.asked = [*self.asked[-20:], prompt]


def picked(among: Sequence[T], pick: int) -> list[T]:
    """Return one element, counting round and round, or none."""
    return [among[pick % len(among)]] if among else []


def call(machine: TreeMachine, rng: random.Random) -> None:
    """Apply one rule with random arguments, and every invariant after it."""
    pick = rng.randrange(100)
    blocks = [rng.choice((0, 0, 0, 1, 2)) for _ in range(rng.randint(1, 8))]
    steps: list[Callable[[], None]] = [
        *[lambda: machine.arrive(blocks, rng.randint(0, 15), rng.randint(0, 4), rng.random() < 0.3)] * 2,
        *[lambda: machine.extend(pick, rng.randint(1, 12))] * 2,
        *[lambda: machine.finish(pick)] * 2,
        lambda: machine.come_back(pick, rng.randint(1, 40)),
        lambda: machine.decode(pick, rng.randint(1, 20)),
        lambda: machine.abort(pick) if rng.random() < 0.3 else machine.finish(pick),
        lambda: machine.probe(pick, rng.randint(1, MAX_PROMPT_TOKENS), rng.random() < 0.5),
        lambda: machine.unpin(pick),
        lambda: machine.run_short(rng.randint(1, 8), rng.random() < 0.5),
        lambda: machine.run_dry(rng.random() < 0.5, rng.randint(0, 9)),
        lambda: machine.reclaim(pick),
        machine.migrate,
        lambda: machine.flush(rng.randint(0, 19)),
    ]
    rng.choice(steps)()
    machine.every_rule_holds()


@pytest.mark.parametrize("case", [*sorted(ORGANIZATIONS), "s2 migrate"])
def test_b40_a_long_walk(case: str) -> None:
    """Rules drawn evenly, in a larger pool: many requests share prefixes, slabs fill, thin out and are moved."""
    rng = random.Random(case)
    machine = TreeMachine()
    org, migrate = case.split()[0], case.endswith("migrate")
    shape = {"members": 2, "groups": 1, "conv_channels": 20, "grid_blocks": 1}
    machine.start(org, checkpoints=14, spare=24, migrate=migrate, **shape)
    for _ in range(WALK_STEPS):
        call(machine, rng)
    server, counts = machine.server, machine.server.cache.memory.store.counts
    if server.shared:
        assert min(server.victims[Kind.ATTENTION], server.victims[Kind.CHECKPOINT]) > WALK_STEPS // 100
    assert not migrate or counts.migrated > WALK_STEPS // 200


TestTreeMachine = TreeMachine.TestCase
TestTreeMachine.settings = settings(
    max_examples=RUNS,
    stateful_step_count=STEPS,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
