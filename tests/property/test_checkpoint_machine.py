"""A state machine over pages, slabs and checkpoints of every organization, against the naive pool after each step.

`CHECKPOINT_MACHINE_RUNS` and `CHECKPOINT_MACHINE_STEPS` set Hypothesis' runs and the most steps of one, and
`CHECKPOINT_MACHINE_WALK` the steps of the long walk through each organization.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sgl_hybrid.errors import CapacityError
from sgl_hybrid.memory import ORGANIZATIONS
from sgl_hybrid.memory.checkpoints import CheckpointStore, Life, Move
from sgl_hybrid.memory.ledger import ABSENT
from sgl_hybrid.memory.pages import PageAllocator, PageKind
from tests.oracles.pool import NaiveMemory, NaivePool
from tests.tiny_layouts import tiny_layout

RUNS = int(os.environ.get("CHECKPOINT_MACHINE_RUNS", "150"))
STEPS = int(os.environ.get("CHECKPOINT_MACHINE_STEPS", "60"))
WALK_STEPS = int(os.environ.get("CHECKPOINT_MACHINE_WALK", "3000"))
PICKS = st.lists(st.integers(0, 999), min_size=1, max_size=12)


class CheckpointMachine(RuleBasedStateMachine):
    """The caller's part is played here: `tree` are the ids that nodes name, `memory` is what the pages hold."""

    @initialize(
        org=st.sampled_from([*sorted(ORGANIZATIONS), "s2", "s2", "s2"]),
        members=st.integers(1, 3),
        groups=st.integers(1, 3),
        conv_channels=st.sampled_from([10, 20, 40]),
        composites=st.integers(1, 24),
        spare=st.integers(0, 6),
        fewer_ids=st.integers(0, 2),
    )
    def start(
        self, org: str, members: int, groups: int, conv_channels: int, composites: int, spare: int, fewer_ids: int
    ) -> None:
        layout = tiny_layout(org, members=members, groups=groups, conv_channels=conv_channels)
        pages = PageAllocator(composites * layout.member_pages + spare + 1)
        most = CheckpointStore(layout, pages).num_virtual
        self.store = CheckpointStore(layout, pages, num_virtual=max(1, most - fewer_ids))
        self.naive = NaivePool(layout, pages.num_pages, self.store.num_virtual)
        self.memory = NaiveMemory(layout.slots_per_slab)
        self.tree: set[int] = set()
        self.plan: list[Move] = []
        self.device = {v: (self.store.member_row(v), self.store.conv_row(v)) for v in range(self.store.num_virtual + 1)}
        self.serial = 0
        self.stamps: dict[int, int] = {}

    @rule(count=st.integers(1, 12))
    def allocate(self, count: int) -> None:
        granted = self.naive.capacity()
        if count > granted:
            self.refuse(CapacityError, lambda: self.store.allocate_many(count))
        if granted == 0:
            self.refuse(CapacityError, self.store.allocate)
            return
        for v in self.store.allocate_many(min(count, granted)) if count > 1 else [self.store.allocate()]:
            members, lines = self.store.member_row(v), self.store.conv_row(v)
            self.naive.allocate(v, members, lines)
            self.serial += 1
            self.stamps[v] = self.serial
            self.memory.write_pages(members, self.serial)
            self.memory.write_lines(lines, self.serial)

    @rule(picks=PICKS)
    def publish(self, picks: list[int]) -> None:
        for v in self.picked(self.naive.live.keys() - self.tree, picks):
            self.store.publish(v)
            self.naive.live[v].published = True
            self.tree.add(v)

    @rule(pick=st.integers(0, 999))
    def acquire(self, pick: int) -> None:
        for v in self.picked(self.tree, [pick]):
            self.store.acquire(v)
            self.naive.live[v].references += 1

    @rule(picks=PICKS)
    def release(self, picks: list[int]) -> None:
        for v in self.picked(self.naive.referenced(), picks):
            self.store.release(v)
            self.naive.live[v].references -= 1

    @rule(picks=PICKS)
    def free(self, picks: list[int]) -> None:
        for v in self.picked(self.naive.live.keys() - self.naive.referenced(), picks):
            self.let_go(v)

    @rule(every=st.integers(2, 3), first=st.integers(0, 2))
    def thin_out(self, every: int, first: int) -> None:
        """Free every second or third checkpoint nobody runs from: slabs are left with holes."""
        for v in sorted(self.naive.live.keys() - self.naive.referenced())[first::every]:
            self.let_go(v)

    @rule(pick=st.integers(0, 999))
    def misuse(self, pick: int) -> None:
        """Call every operation that the state of one id, free, active, cached or referenced, does not allow."""
        (v,) = self.picked(self.naive.ids | {0}, [pick])
        owned = self.naive.live.get(v)
        refused = []
        if owned is None:
            refused += [self.store.free, self.store.pages_of, self.store.freed_pages]
        if owned is None or owned.references:
            refused.append(self.store.free)
        if owned is None or owned.published:
            refused.append(self.store.publish)
        if owned is None or not owned.published:
            refused.append(self.store.acquire)
        if owned is None or not owned.references:
            refused.append(self.store.release)
        for operation in refused:
            self.refuse(ValueError, lambda operation=operation: operation(v))
        for page in self.picked(self.naive.pages - self.naive.reclaimable(), [pick]):
            for decide in (self.store.reclaim, self.store.migration):
                self.refuse(ValueError, lambda decide=decide, page=page: decide(page))

    @rule()
    def finish_all_requests(self) -> None:
        """Publish what is active and release what is referenced: every slab becomes reclaimable."""
        for v, owned in self.naive.live.items():
            if not owned.published:
                self.store.publish(v)
                owned.published = True
                self.tree.add(v)
            for _ in range(owned.references):
                self.store.release(v)
            owned.references = 0

    @rule(count=st.integers(1, 4))
    def take_attention(self, count: int) -> None:
        if count > len(self.naive.free_pages()):
            self.refuse(CapacityError, lambda: self.store.pages.take(PageKind.ATTENTION, count))
            return
        pages = self.store.pages.take(PageKind.ATTENTION, count)
        assert set(pages) <= self.naive.free_pages()
        self.naive.attention |= set(pages)
        self.memory.write_pages(pages, "attention")

    @rule(picks=PICKS)
    def give_attention_back(self, picks: list[int]) -> None:
        pages = self.picked(self.naive.attention, picks)
        self.refuse(ValueError, lambda: self.store.pages.give_back([*pages, *pages, 0]))
        self.store.pages.give_back(pages, kind=PageKind.ATTENTION)
        self.naive.attention -= set(pages)
        self.memory.write_pages(pages, "poison")

    @rule(pick=st.integers(0, 999))
    def reclaim(self, pick: int) -> None:
        for page in self.picked(self.naive.reclaimable(), [pick]):
            victims = self.store.reclaim(page)
            assert victims == [v for _, v in sorted(self.naive.slabs()[page].items())]
            for v in victims:
                self.let_go(v, cross_invalidated=True)
            assert page in self.naive.free_pages()

    @rule(pick=st.integers(0, 999), later=st.booleans())
    def migrate(self, pick: int, later: bool) -> None:
        for page in self.picked(self.naive.reclaimable(), [pick]):
            moves = self.store.migration(page)
            assert (moves is not None) == self.naive.has_room_for(page)
            if moves is None:
                continue
            assert [(move.old_line, move.checkpoint) for move in moves] == sorted(self.naive.slabs()[page].items())
            if later:
                self.plan = moves
            else:
                assert self.commit(moves) == [page]

    @rule()
    def migrate_late(self) -> None:
        """Commit a plan made some steps ago, when it may no longer fit."""
        moves, self.plan = self.plan, []
        if all(self.naive.may_move(*move) for move in moves):
            self.commit(moves)
        else:
            self.refuse(ValueError, lambda: self.store.migrate(moves))

    @rule(sure=st.integers(0, 19))
    def clear(self, sure: int) -> None:
        """Flush, one time in twenty."""
        if sure == 19:
            self.store.clear()
            self.naive.live.clear()
            self.tree.clear()

    def commit(self, moves: list[Move]) -> list[int]:
        for move in moves:
            self.memory.copy_line(move.old_line, move.new_line)
        before = self.naive.free_pages()
        freed = self.store.migrate(moves) if moves else []
        for move in moves:
            self.naive.live[move.checkpoint].lines = (move.new_line,)
            self.memory.write_lines([move.old_line], "poison")
        assert set(freed) == self.naive.free_pages() - before
        return freed

    def let_go(self, v: int, *, cross_invalidated: bool = False) -> None:
        """Remove a checkpoint from the tree, free it and poison what it had."""
        self.tree.discard(v)
        expected, lines = self.naive.freed_pages(v), self.naive.live[v].lines
        assert set(self.store.freed_pages(v)) == expected
        freed = self.store.free(v, cross_invalidated=cross_invalidated)
        assert sorted(freed) == sorted(expected)
        del self.naive.live[v]
        self.memory.write_lines(lines, "poison")
        self.memory.write_pages(freed, "poison")

    def refuse(self, error: type[Exception], operation: Callable[[], object]) -> None:
        """Run an operation that must fail; the invariants then show that nothing changed."""
        with pytest.raises(error):
            operation()
        assert self.store.take_dirty() == []

    @staticmethod
    def picked(among: Iterable[int], picks: list[int]) -> list[int]:
        """Return different elements, one for each number (counting round and round)."""
        choices = sorted(among)
        return choices and list(dict.fromkeys(choices[pick % len(choices)] for pick in picks))

    @invariant()
    def every_rule_holds(self) -> None:
        self.store.check()
        self.counts_equal_the_oracles()
        self.every_live_checkpoint_holds_its_own_bytes()
        self.what_the_tree_names_is_published_and_the_rest_is_absent()
        self.device_tables_that_follow_dirty_rows_are_current()

    def counts_equal_the_oracles(self) -> None:
        store, naive = self.store, self.naive
        assert (store.num_active, store.num_cached, store.num_referenced) == naive.census()
        assert set(store.pages.held(PageKind.FREE)) == naive.free_pages()
        assert set(store.pages.held(PageKind.ATTENTION)) == naive.attention
        assert store.capacity() == naive.capacity()
        assert store.pages_needed(1) == naive.pages_needed(len(naive.open_lines()))
        slabs = naive.slabs()
        if store.slabs is not None:
            assert set(store.slabs.slabs()) == slabs.keys()
            assert {page for page in slabs if store.is_reclaimable(page)} == naive.reclaimable()
        sparsest = store.sparsest_reclaimable()
        assert (sparsest is None) == (not naive.reclaimable())
        if sparsest is not None:
            assert len(slabs[sparsest]) == min(len(slabs[page]) for page in naive.reclaimable())
        events = store.counts
        assert events.allocated - events.freed == len(naive.live)

    def every_live_checkpoint_holds_its_own_bytes(self) -> None:
        for v, owned in self.naive.live.items():
            assert (self.store.member_row(v), self.store.conv_row(v)) == (owned.members, owned.lines)
            assert self.memory.writers_of(owned.members, owned.lines) == {self.stamps[v]}
        assert self.memory.writers_of(self.naive.attention) <= {"attention"}

    def what_the_tree_names_is_published_and_the_rest_is_absent(self) -> None:
        layout = self.store.layout
        for v in range(1, self.store.num_virtual + 1):
            assert (self.store.life_of(v) is Life.PUBLISHED) == (v in self.tree)
            if v not in self.naive.live:
                assert set(self.store.member_row(v) + self.store.conv_row(v)) == {ABSENT}
        assert self.store.member_row(0) == (0,) * layout.member_pages

    def device_tables_that_follow_dirty_rows_are_current(self) -> None:
        for v in self.store.take_dirty():
            self.device[v] = self.store.member_row(v), self.store.conv_row(v)
        for v, rows in self.device.items():
            assert rows == (self.store.member_row(v), self.store.conv_row(v))


def call(machine: CheckpointMachine, rng: random.Random) -> None:
    """Apply one rule with random arguments, and every invariant after it."""
    pick, picks = rng.randrange(1000), [rng.randrange(1000) for _ in range(rng.randint(1, 12))]
    steps: list[Callable[[], None]] = [
        lambda: machine.allocate(rng.randint(1, 12)),
        lambda: machine.publish(picks),
        lambda: machine.acquire(pick),
        lambda: machine.release(picks),
        lambda: machine.free(picks),
        lambda: machine.thin_out(rng.randint(2, 3), rng.randint(0, 2)),
        lambda: machine.misuse(pick),
        lambda: machine.take_attention(rng.randint(1, 4)),
        lambda: machine.give_attention_back(picks),
        lambda: machine.reclaim(pick),
        lambda: machine.migrate(pick, rng.random() < 0.5),
        machine.migrate_late,
        machine.finish_all_requests,
        lambda: machine.clear(rng.randint(0, 19)),
    ]
    rng.choice(steps)()
    machine.every_rule_holds()


@pytest.mark.parametrize("org", sorted(ORGANIZATIONS))
def test_a_long_walk(org: str) -> None:
    """Rules drawn evenly, in a pool larger than Hypothesis likes: slabs fill, thin out and are moved together."""
    rng = random.Random(org)
    machine = CheckpointMachine()
    machine.start(org, members=2, groups=1, conv_channels=20, composites=20, spare=10, fewer_ids=0)
    for _ in range(WALK_STEPS):
        call(machine, rng)
    if org == "s2":
        events = machine.store.counts
        assert min(events.migrated, events.cross_invalidated) > WALK_STEPS // 100


TestCheckpointMachine = CheckpointMachine.TestCase
TestCheckpointMachine.settings = settings(
    max_examples=RUNS,
    stateful_step_count=STEPS,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
