"""Conv slots: pages cut into slabs of `slots_per_slab` slots of equal stride.

A slot is named by its line, `slots_per_slab * page + slot`, with the real page id, so that a line is an address. Each
live slot has an owner (a checkpoint's id) and may be held: the owner is being written or read. New slots go to the
fullest slab that has room, so that the others empty out; an empty slab gives its page back.

A slab is *idle* when none of its slots is held; only an idle slab may be reclaimed or have its slots moved.

Invariants: every slab has a live slot; held slots are live; a slab sits in exactly one bucket, that of its number of
live slots, on the idle or the held side.
Source: paper section 3.4 (slots of a fixed stride, line = 16 p + s, coupled invalidation).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sgl_hybrid.errors import InvariantError
from sgl_hybrid.memory.pages import PageAllocator, PageKind

NO_OWNER = 0


class _Slab:
    """Slots of one page; `live` and `held` are bit masks over them."""

    __slots__ = ("held", "live", "owners")

    def __init__(self, slots: int) -> None:
        self.live = 0
        self.held = 0
        self.owners = [NO_OWNER] * slots


class SlabAllocator:
    """Hands out slots. One operation costs O(slots per slab), whatever the number of slabs."""

    def __init__(self, pages: PageAllocator, slots_per_slab: int) -> None:
        if slots_per_slab < 1:
            raise ValueError(f"expected slots_per_slab >= 1, got {slots_per_slab}")
        self.slots_per_slab = slots_per_slab
        self.num_live = 0
        self.num_held = 0
        self.opened = 0
        self.popped = 0
        self._pages = pages
        self._slabs: dict[int, _Slab] = {}
        # Pages by number of live slots; dictionaries serve as ordered sets.
        self._idle: list[dict[int, None]] = [{} for _ in range(slots_per_slab + 1)]
        self._busy: list[dict[int, None]] = [{} for _ in range(slots_per_slab + 1)]

    @property
    def num_slabs(self) -> int:
        return len(self._slabs)

    @property
    def num_open(self) -> int:
        """Free slots in the slabs there are."""
        return len(self._slabs) * self.slots_per_slab - self.num_live

    def occupancy(self) -> list[int]:
        """Return a histogram: element n is the number of slabs with n live slots."""
        return [len(idle) + len(busy) for idle, busy in zip(self._idle, self._busy, strict=True)]

    def slabs(self) -> list[int]:
        """Return the pages that are slabs, oldest first."""
        return list(self._slabs)

    def take_slot(self, owner: int) -> int:
        """Take a slot, held, in the fullest slab with room (of equals, one that is held already); return its line.

        Raises:
            CapacityError: no slab has room and no page is free.
            ValueError: the owner is below 1.
        """
        if owner <= NO_OWNER:
            raise ValueError(f"expected an owner >= 1, got {owner}")
        page = next(self._partial(), None)
        if page is None:
            page = self._open()
        slab = self._slabs[page]
        slot = _lowest_free(slab.live)
        self._change(page, live=slab.live | 1 << slot, held=slab.held | 1 << slot)
        slab.owners[slot] = owner
        return page * self.slots_per_slab + slot

    def give_back(self, line: int) -> int | None:
        """Free a slot, held or not. Return the slab's page if that was its last slot: the page is free then.

        Raises:
            ValueError: the line is no live slot.
        """
        page, slot, slab = self._locate(line)
        bit = 1 << slot
        slab.owners[slot] = NO_OWNER
        self._change(page, live=slab.live & ~bit, held=slab.held & ~bit)
        return self._pop_if_empty(page)

    def hold(self, line: int) -> None:
        """Keep a slot's slab from reclaim: its owner is written or read.

        Raises:
            ValueError: the line is no live slot, or is held.
        """
        page, slot, slab = self._locate(line)
        if slab.held >> slot & 1:
            raise ValueError(f"expected a slot that is not held, got line {line}")
        self._change(page, live=slab.live, held=slab.held | 1 << slot)

    def let_go(self, line: int) -> None:
        """Undo `hold`.

        Raises:
            ValueError: the line is no live slot, or is not held.
        """
        page, slot, slab = self._locate(line)
        if not slab.held >> slot & 1:
            raise ValueError(f"expected a held slot, got line {line}")
        self._change(page, live=slab.live, held=slab.held & ~(1 << slot))

    def owner_of(self, line: int) -> int:
        """Return the owner of a slot.

        Raises:
            ValueError: the line is no live slot.
        """
        _, slot, slab = self._locate(line)
        return slab.owners[slot]

    def slots_of(self, page: int) -> list[tuple[int, int]]:
        """Return (line, owner) of the live slots of a slab, by line.

        Raises:
            ValueError: the page is no slab.
        """
        first = page * self.slots_per_slab
        owners = self._slab(page).owners
        return [(first + slot, owner) for slot, owner in enumerate(owners) if owner != NO_OWNER]

    def num_live_of(self, page: int) -> int:
        """Return the number of live slots of a slab.

        Raises:
            ValueError: the page is no slab.
        """
        return self._slab(page).live.bit_count()

    def is_idle(self, page: int) -> bool:
        """Tell whether no slot of a slab is held.

        Raises:
            ValueError: the page is no slab.
        """
        return self._slab(page).held == 0

    def is_held(self, line: int) -> bool:
        """Tell whether a slot is held.

        Raises:
            ValueError: the line is no live slot.
        """
        _, slot, slab = self._locate(line)
        return bool(slab.held >> slot & 1)

    @property
    def num_idle(self) -> int:
        """Slabs without a held slot: their pages come free when what is cached in them goes."""
        return sum(len(bucket) for bucket in self._idle)

    def sparsest_idle(self) -> int | None:
        """Return the idle slab with the fewest live slots, None if no slab is idle."""
        return next((next(iter(bucket)) for bucket in self._idle if bucket), None)

    def plan_moves(self, page: int) -> list[tuple[int, int]] | None:
        """Return (old line, new line) that would empty an idle slab into the fullest others; None if they lack room.

        Changes nothing; costs O(slots moved).

        Raises:
            ValueError: the page is no slab, or one of its slots is held.
        """
        slab = self._slab(page)
        if slab.held:
            raise ValueError(f"expected an idle slab, got page {page} with held slots")
        moving = [line for line, _ in self.slots_of(page)]
        if self.num_open - (self.slots_per_slab - len(moving)) < len(moving):
            return None
        return list(zip(moving, self._open_lines(excluding=page), strict=False))

    def move(self, moves: Sequence[tuple[int, int]]) -> list[int]:
        """Give each old line's owner its new line; return the pages of slabs this emptied, free now.

        Moves bookkeeping only: the caller has copied the bytes.

        Raises:
            ValueError: an old line is not live or is held, a new line is live or in no slab, or a line comes twice.
                Nothing is changed.
        """
        for old, new in moves:
            _, slot, slab = self._locate(old)
            if slab.held >> slot & 1:
                raise ValueError(f"expected slots that are not held, got line {old}")
            page, slot = divmod(new, self.slots_per_slab)
            if self._slab(page).live >> slot & 1:
                raise ValueError(f"expected a free slot to move to, got line {new}")
        if len({line for pair in moves for line in pair}) != 2 * len(moves):
            raise ValueError(f"expected each line once, got {list(moves)}")
        for old, new in moves:
            source, old_slot, slab = self._locate(old)
            target, new_slot = divmod(new, self.slots_per_slab)
            other = self._slabs[target]
            other.owners[new_slot], slab.owners[old_slot] = slab.owners[old_slot], NO_OWNER
            self._change(target, live=other.live | 1 << new_slot, held=other.held)
            self._change(source, live=slab.live & ~(1 << old_slot), held=slab.held)
        sources = dict.fromkeys(old // self.slots_per_slab for old, _ in moves)
        return [page for page in sources if self._pop_if_empty(page) is not None]

    def check(self) -> None:
        """Verify masks, owners, buckets, counts and the pages' kind.

        Raises:
            InvariantError: naming the slab and what differs.
        """
        for page, slab in self._slabs.items():
            live = sum(1 << slot for slot, owner in enumerate(slab.owners) if owner != NO_OWNER)
            if live != slab.live or live == 0 or slab.held & ~live:
                raise InvariantError(f"slab {page}: live {slab.live:b}, held {slab.held:b}, owners {slab.owners}")
            places = [
                (side, count)
                for side, buckets in (("busy", self._busy), ("idle", self._idle))
                for count, bucket in enumerate(buckets)
                if page in bucket
            ]
            expected = [("busy" if slab.held else "idle", live.bit_count())]
            if places != expected:
                raise InvariantError(f"slab {page} in buckets {places}, expected {expected}")
        if sorted(self._slabs) != self._pages.held(PageKind.SLAB) or sum(self.occupancy()) != len(self._slabs):
            raise InvariantError(f"slabs {sorted(self._slabs)}, expected pages {self._pages.held(PageKind.SLAB)}")
        found = [sum(getattr(slab, name).bit_count() for slab in self._slabs.values()) for name in ("live", "held")]
        if found != [self.num_live, self.num_held]:
            raise InvariantError(f"live and held slots {found}, expected {[self.num_live, self.num_held]}")
        if self.opened - self.popped != len(self._slabs):
            raise InvariantError(f"opened {self.opened} - popped {self.popped} slabs, expected {len(self._slabs)}")

    def _slab(self, page: int) -> _Slab:
        if page not in self._slabs:
            raise ValueError(f"expected the page of a slab, got {page}")
        return self._slabs[page]

    def _locate(self, line: int) -> tuple[int, int, _Slab]:
        page, slot = divmod(line, self.slots_per_slab)
        slab = self._slabs.get(page)
        if slab is None or not slab.live >> slot & 1:
            raise ValueError(f"expected the line of a live slot, got {line} (page {page}, slot {slot})")
        return page, slot, slab

    def _partial(self) -> Iterator[int]:
        """Yield slabs with room, fullest first; of equals the held ones first, so that idle slabs stay idle."""
        for count in range(self.slots_per_slab - 1, 0, -1):
            yield from self._busy[count]
            yield from self._idle[count]

    def _open_lines(self, *, excluding: int) -> Iterator[int]:
        for page in self._partial():
            if page != excluding:
                live = self._slabs[page].live
                first = page * self.slots_per_slab
                yield from (first + slot for slot in range(self.slots_per_slab) if not live >> slot & 1)

    def _open(self) -> int:
        (page,) = self._pages.take(PageKind.SLAB, 1)
        self._slabs[page] = _Slab(self.slots_per_slab)
        self._idle[0][page] = None
        self.opened += 1
        return page

    def _change(self, page: int, *, live: int, held: int) -> None:
        """Set a slab's masks and move it to the bucket they mean."""
        slab = self._slabs[page]
        del (self._busy if slab.held else self._idle)[slab.live.bit_count()][page]
        self.num_live += live.bit_count() - slab.live.bit_count()
        self.num_held += held.bit_count() - slab.held.bit_count()
        slab.live, slab.held = live, held
        (self._busy if held else self._idle)[live.bit_count()][page] = None

    def _pop_if_empty(self, page: int) -> int | None:
        if self._slabs[page].live:
            return None
        del self._slabs[page]
        del self._idle[0][page]
        self._pages.give_back((page,), kind=PageKind.SLAB)
        self.popped += 1
        return page


def _lowest_free(mask: int) -> int:
    """Return the position of the lowest clear bit."""
    return (~mask & mask + 1).bit_length() - 1
