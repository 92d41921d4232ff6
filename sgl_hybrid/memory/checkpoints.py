"""Composite checkpoints: virtual ids that name member pages and a conv state as one thing, valid or absent as a whole.

A virtual id v from 1 to `num_virtual` is what the server above sees as a state slot; id 0 is the padding slot, whose
rows name the padding page. The layout says how many member pages a checkpoint has and where its conv state lives:
behind the recurrent state in the same page, in a page of its own, or in a slot of a slab. Nothing here asks for the
name of an organization; D0 is this store over a page allocator of its own.

Life: FREE -> ACTIVE (a request writes it) -> PUBLISHED (a node of the tree names it) -> FREE. A published checkpoint
with execution references is protected, one without is cached. The store decides and counts; it knows no tree and moves
no bytes. Whoever frees a published checkpoint has removed it from the tree before.

Invariants: those of `check()`; free + attention + active + cached + referenced = total for pages, conv slots and ids.
Source: paper sections 3.1 to 3.5 (one validity for all parts, execution references, coupled slabs).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from sgl_hybrid.errors import CapacityError
from sgl_hybrid.memory.budget import checkpoints_in
from sgl_hybrid.memory.ledger import ABSENT, Ledgers, check_store, ledgers_of
from sgl_hybrid.memory.organization import ConvPlacement, Layout
from sgl_hybrid.memory.pages import PADDING_PAGE, PageAllocator, PageKind
from sgl_hybrid.memory.slabs import SlabAllocator


class Life(enum.IntEnum):
    """Where a virtual id is in its life."""

    FREE = 0
    ACTIVE = 1
    PUBLISHED = 2


class Move(NamedTuple):
    """A conv state that changes its slot; both are lines."""

    checkpoint: int
    old_line: int
    new_line: int


class Counts(msgspec.Struct):
    """Events since the store was made. `cross_invalidated` are checkpoints freed because their slab was reclaimed,
    `skipped` boundaries left unpublished because no checkpoint could be had for the request to go on with,
    `decode_crossings` those that decoding passed and left unpublished because a prefill would not repeat its bits."""

    allocated: int = 0
    published: int = 0
    freed: int = 0
    cross_invalidated: int = 0
    migrated: int = 0
    skipped: int = 0
    decode_crossings: int = 0


class CheckpointStore:
    """Composites over one page allocator. An operation costs O(pages of one checkpoint + slots of one slab).

    Args:
        num_virtual: ids; by default as many as checkpoints fit into an empty pool.
    """

    def __init__(self, layout: Layout, pages: PageAllocator, *, num_virtual: int | None = None) -> None:
        self.layout = layout
        self.counts = Counts()
        self.slabs: SlabAllocator | None = None
        if layout.conv_placement is ConvPlacement.SLAB:
            self.slabs = SlabAllocator(pages, layout.slots_per_slab)
        self.pages = pages
        self.num_virtual = checkpoints_in(layout, pages.num_pages) if num_virtual is None else num_virtual
        if self.num_virtual < 1:
            raise ValueError(
                f"expected pages for at least one checkpoint of {layout.member_pages} members and its conv state, "
                f"got {pages.num_pages} pages and num_virtual={self.num_virtual}"
            )
        absent_members, absent_lines = (ABSENT,) * layout.member_pages, (ABSENT,) * layout.conv_columns
        self._absent = absent_members, absent_lines
        self._members = [absent_members] * (self.num_virtual + 1)
        self._lines = [absent_lines] * (self.num_virtual + 1)
        self._members[0] = (PADDING_PAGE,) * layout.member_pages
        self._lines[0] = (PADDING_PAGE * layout.slots_per_slab,) * layout.conv_columns
        self._life = [Life.FREE] * (self.num_virtual + 1)
        self._references = [0] * (self.num_virtual + 1)
        self._free = list(range(self.num_virtual, 0, -1))
        self.num_active = self.num_cached = self.num_referenced = 0
        self._dirty: dict[int, None] = {}

    def allocate(self) -> int:
        """Take all parts of one composite and return its id, ACTIVE; or take nothing.

        Raises:
            CapacityError: no id is free, or the pages do not suffice (`required` and `available` count pages).
        """
        if not self._free:
            raise CapacityError("state slots", required=1, available=0)
        v = self._free[-1]
        required, available = self.pages_needed(1), self.pages.num_free
        members: list[int] = []
        try:
            members = self.pages.take(PageKind.MEMBER, self.layout.member_pages)
            lines = self._take_lines(v, members)
        except CapacityError:
            self.pages.give_back(members)
            raise CapacityError("pages", required=required, available=available) from None
        self._free.pop()
        self._set_rows(v, tuple(members), lines)
        self._life[v] = Life.ACTIVE
        self.num_active += 1
        self.counts.allocated += 1
        return v

    def allocate_many(self, count: int) -> list[int]:
        """Take `count` checkpoints, or none.

        Raises:
            CapacityError: fewer than `count` can be allocated.
        """
        available = self.capacity()
        if count > available:
            raise CapacityError("checkpoints", required=count, available=available)
        return [self.allocate() for _ in range(count)]

    def publish(self, v: int) -> None:
        """Make an active checkpoint a cached one: a node of the tree names it, nobody writes it any more.

        Raises:
            ValueError: v is not active.
        """
        self._expect(v, Life.ACTIVE)
        self._life[v] = Life.PUBLISHED
        self.num_active -= 1
        self.num_cached += 1
        self._let_go(v)
        self.counts.published += 1

    def acquire(self, v: int) -> None:
        """Add an execution reference to a published checkpoint: it, its slot and its slab are protected.

        Raises:
            ValueError: v is not published.
        """
        self._expect(v, Life.PUBLISHED)
        self._references[v] += 1
        if self._references[v] == 1:
            self.num_cached -= 1
            self.num_referenced += 1
            self._hold(v)

    def release(self, v: int) -> None:
        """Drop an execution reference; after the last one the checkpoint is cached.

        Raises:
            ValueError: v has no reference.
        """
        self._expect(v, Life.PUBLISHED)
        if self._references[v] == 0:
            raise ValueError(f"expected a checkpoint with execution references, got {v} with none")
        self._references[v] -= 1
        if self._references[v] == 0:
            self.num_referenced -= 1
            self.num_cached += 1
            self._let_go(v)

    def free(self, v: int, *, cross_invalidated: bool = False) -> list[int]:
        """Return all parts of a checkpoint; return the pages that became free. Its rows read absent from now on.

        A published checkpoint must have been removed from the tree before. `cross_invalidated` counts it as lost to
        the reclaim of its slab.

        Raises:
            ValueError: v is free already, or has execution references.
        """
        self._expect_live(v)
        if self._references[v]:
            raise ValueError(f"expected a checkpoint without execution references, got {v} with {self._references[v]}")
        pages = self.freed_pages(v)
        self.pages.give_back(self._members[v], kind=PageKind.MEMBER)
        if self.layout.conv_placement is ConvPlacement.PAGE:
            self.pages.give_back(self._lines[v], kind=PageKind.CONV)
        elif self.slabs is not None:
            self.slabs.give_back(self._lines[v][0])
        if self._life[v] is Life.ACTIVE:
            self.num_active -= 1
        else:
            self.num_cached -= 1
        self._life[v] = Life.FREE
        self._set_rows(v, *self._absent)
        self._free.append(v)
        self.counts.freed += 1
        self.counts.cross_invalidated += cross_invalidated
        return pages

    def clear(self) -> None:
        """Free everything, references or not: for a flush, when no node and no request names a checkpoint."""
        for v in range(1, self.num_virtual + 1):
            while self._references[v]:
                self.release(v)
            if self._life[v] is not Life.FREE:
                self.free(v)

    @property
    def num_free_ids(self) -> int:
        return len(self._free)

    def capacity(self) -> int:
        """Return how many further checkpoints `allocate` would grant now, if nothing else took pages."""
        open_slots = 0 if self.slabs is None else self.slabs.num_open
        return min(len(self._free), checkpoints_in(self.layout, self.pages.num_free, open_slots=open_slots))

    def pages_needed(self, count: int) -> int:
        """Return the free pages that the next `count` checkpoints would take, given the open conv slots."""
        conv_pages = 0
        if self.layout.conv_placement is ConvPlacement.PAGE:
            conv_pages = count
        elif self.slabs is not None:
            conv_pages = -(-max(0, count - self.slabs.num_open) // self.slabs.slots_per_slab)
        return count * self.layout.member_pages + conv_pages

    def pages_of(self, v: int) -> list[int]:
        """Return the pages that hold a part of v: its members and its conv page or slab."""
        self._expect_live(v)
        if self.layout.conv_placement is ConvPlacement.INSIDE:
            return list(self._members[v])
        return [*self._members[v], self._lines[v][0] // self.layout.slots_per_slab]

    def freed_pages(self, v: int) -> list[int]:
        """Return the pages that freeing v would return now: those of `pages_of`, less a slab that others share."""
        pages = self.pages_of(v)
        if self.slabs is not None and self.slabs.num_live_of(pages[-1]) > 1:
            pages.pop()
        return pages

    def slab_of(self, v: int) -> int | None:
        """Return the slab page with the conv slot of v, None where conv states live elsewhere."""
        self._expect_live(v)
        return None if self.slabs is None else self._lines[v][0] // self.slabs.slots_per_slab

    def is_reclaimable(self, page: int) -> bool:
        """Tell whether no slot of a slab belongs to an active or referenced checkpoint.

        Raises:
            ValueError: the page is no slab.
        """
        return self._require_slabs().is_idle(page)

    def sparsest_reclaimable(self) -> int | None:
        """Return the reclaimable slab with the fewest checkpoints, None if there is none."""
        return None if self.slabs is None else self.slabs.sparsest_idle()

    def reclaim(self, page: int) -> list[int]:
        """Return the cached checkpoints of a slab, by line. Once all are out of the tree and freed, its page is free.

        Changes nothing: the caller invalidates each in the tree first and then frees it.

        Raises:
            ValueError: the page is no slab, or holds an active or referenced slot.
        """
        if not self.is_reclaimable(page):
            raise ValueError(f"expected a slab without active or referenced slots, got page {page}")
        return [owner for _, owner in self._require_slabs().slots_of(page)]

    def migration(self, page: int) -> list[Move] | None:
        """Return moves that would empty a slab into the fullest others, None if they have not enough room.

        Changes nothing: the caller copies each conv state from its old to its new line, then calls `migrate`.

        Raises:
            ValueError: the page is no slab, or holds an active or referenced slot.
        """
        slabs = self._require_slabs()
        moves = slabs.plan_moves(page)
        return None if moves is None else [Move(slabs.owner_of(old), old, new) for old, new in moves]

    def migrate(self, moves: Sequence[Move]) -> list[int]:
        """Commit moves whose bytes are copied; return the slab pages that became free.

        Raises:
            ValueError: a move no longer fits the slabs (something was allocated or freed since). Nothing is changed.
        """
        slabs = self._require_slabs()
        for v, old, _ in moves:
            if slabs.owner_of(old) != v:
                raise ValueError(f"expected line {old} to belong to checkpoint {v}, got {slabs.owner_of(old)}")
        freed = slabs.move([(old, new) for _, old, new in moves])
        for v, _, new in moves:
            self._set_rows(v, self._members[v], (new,))
        self.counts.migrated += len(moves)
        return freed

    def member_row(self, v: int) -> tuple[int, ...]:
        """Return the member pages of v, groups * members of them; all `ABSENT` if v is free."""
        self._expect_id(v)
        return self._members[v]

    def conv_row(self, v: int) -> tuple[int, ...]:
        """Return the conv lines of v; all `ABSENT` if v is free."""
        self._expect_id(v)
        return self._lines[v]

    def take_dirty(self) -> list[int]:
        """Return the ids whose rows changed since the last call, each once, oldest change first."""
        dirty = list(self._dirty)
        self._dirty.clear()
        return dirty

    def life_of(self, v: int) -> Life:
        """Return where v is in its life; the padding slot 0 is always free."""
        self._expect_id(v)
        return self._life[v]

    def is_live(self, v: int) -> bool:
        """Tell whether v is active or published."""
        return self.life_of(v) is not Life.FREE

    def is_published(self, v: int) -> bool:
        """Tell whether a node of the tree may name v."""
        return self.life_of(v) is Life.PUBLISHED

    def is_held(self, v: int) -> bool:
        """Tell whether v is active or has execution references."""
        return self.life_of(v) is Life.ACTIVE or self._references[v] > 0

    def free_ids(self) -> list[int]:
        """Return a copy of the free ids, next to be used last."""
        return list(self._free)

    def references_of(self, v: int) -> int:
        """Return the number of execution references to v."""
        self._expect_id(v)
        return self._references[v]

    def ledgers(self) -> Ledgers:
        """Count pages, ids and conv slots by who has them, in constant time."""
        return ledgers_of(self)

    def check(self) -> None:
        """Verify the ledgers, that every part has one owner and the right kind, and that holds follow references.

        Scans everything: for tests and strict modes.

        Raises:
            InvariantError: naming the checkpoint or ledger that is inconsistent.
        """
        check_store(self)

    def _take_lines(self, v: int, members: list[int]) -> tuple[int, ...]:
        if self.layout.conv_placement is ConvPlacement.INSIDE:
            return tuple(members[:: self.layout.members])
        if self.slabs is not None:
            return (self.slabs.take_slot(v),)
        return tuple(self.pages.take(PageKind.CONV, 1))

    def _set_rows(self, v: int, members: tuple[int, ...], lines: tuple[int, ...]) -> None:
        self._members[v], self._lines[v] = members, lines
        self._dirty[v] = None

    def _hold(self, v: int) -> None:
        if self.slabs is not None:
            self.slabs.hold(self._lines[v][0])

    def _let_go(self, v: int) -> None:
        if self.slabs is not None:
            self.slabs.let_go(self._lines[v][0])

    def _require_slabs(self) -> SlabAllocator:
        if self.slabs is None:
            raise ValueError(f"expected an organization with conv slabs, got {self.layout.organization}")
        return self.slabs

    def _expect_id(self, v: int) -> None:
        if not 0 <= v <= self.num_virtual:
            raise ValueError(f"expected a checkpoint id from 0 to {self.num_virtual}, got {v}")

    def _expect_live(self, v: int) -> None:
        if not self.is_live(v):
            raise ValueError(f"expected an active or published checkpoint, got {v}, which is free")

    def _expect(self, v: int, life: Life) -> None:
        if self.life_of(v) is not life:
            raise ValueError(f"expected checkpoint {v} to be {life.name}, got {self._life[v].name}")
