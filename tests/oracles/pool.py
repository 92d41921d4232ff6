"""Oracle of the memory layer: who owns what, in sets and dictionaries, every answer found by counting.

`NaivePool` does not choose pages; it is told what the allocators chose, refuses what is illegal, and answers the same
questions by recomputing them from the owners. `NaiveMemory` is the content of the pages: every unit remembers who wrote
it last, so that a unit with two owners shows.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

import msgspec

from sgl_hybrid.memory.organization import ConvPlacement, Layout


class Owned(msgspec.Struct):
    """One live checkpoint."""

    members: tuple[int, ...]
    lines: tuple[int, ...]
    published: bool = False
    references: int = 0

    @property
    def protected(self) -> bool:
        return not self.published or self.references > 0


class NaivePool:
    """Owners of one pool of `num_pages` pages and `num_virtual` ids."""

    def __init__(self, layout: Layout, num_pages: int, num_virtual: int) -> None:
        self.layout = layout
        self.pages = set(range(1, num_pages + 1))
        self.ids = set(range(1, num_virtual + 1))
        self.attention: set[int] = set()
        self.live: dict[int, Owned] = {}

    def conv_pages(self, v: int) -> set[int]:
        if self.layout.conv_placement is ConvPlacement.INSIDE:
            return set()
        return {line // self.layout.slots_per_slab for line in self.live[v].lines}

    def free_pages(self) -> set[int]:
        free = self.pages - self.attention
        for v, owned in self.live.items():
            free -= set(owned.members) | self.conv_pages(v)
        return free

    def slabs(self) -> dict[int, dict[int, int]]:
        """Return {slab page: {line: checkpoint}}."""
        slabs: dict[int, dict[int, int]] = {}
        if self.layout.conv_placement is ConvPlacement.SLAB:
            for v, owned in self.live.items():
                for line in owned.lines:
                    slabs.setdefault(line // self.layout.slots_per_slab, {})[line] = v
        return slabs

    def open_lines(self) -> set[int]:
        """Return the free lines of the slabs there are."""
        slots = self.layout.slots_per_slab
        return {
            page * slots + slot
            for page, taken in self.slabs().items()
            for slot in range(slots)
            if page * slots + slot not in taken
        }

    def pages_needed(self, open_slots: int) -> int:
        """Return the pages of one more checkpoint when `open_slots` conv slots are open."""
        if self.layout.conv_placement is ConvPlacement.INSIDE:
            return self.layout.member_pages
        return self.layout.member_pages + (self.layout.conv_placement is ConvPlacement.PAGE or open_slots == 0)

    def capacity(self) -> int:
        """Count how many checkpoints fit, one after another."""
        free, open_slots, ids = len(self.free_pages()), len(self.open_lines()), len(self.ids) - len(self.live)
        granted = 0
        while granted < ids and self.pages_needed(open_slots) <= free:
            free -= self.pages_needed(open_slots)
            open_slots = (open_slots or self.layout.slots_per_slab) - 1
            granted += 1
        return granted

    def freed_pages(self, v: int) -> set[int]:
        after = copy.copy(self)
        after.live = {other: owned for other, owned in self.live.items() if other != v}
        return after.free_pages() - self.free_pages()

    def allocate(self, v: int, members: tuple[int, ...], lines: tuple[int, ...]) -> None:
        """Record a new checkpoint; its parts must have been free, its slot in the fullest slab with room."""
        free, slabs, slots = self.free_pages(), self.slabs(), self.layout.slots_per_slab
        assert v in self.ids - self.live.keys()
        assert len(set(members)) == len(members) == self.layout.member_pages
        assert set(members) <= free
        match self.layout.conv_placement:
            case ConvPlacement.INSIDE:
                assert set(lines) <= set(members)
                assert len(set(lines)) == self.layout.groups
            case ConvPlacement.PAGE:
                assert set(lines) <= free - set(members)
                assert len(lines) == 1
            case ConvPlacement.SLAB:
                (line,) = lines
                room = {page: len(taken) for page, taken in slabs.items() if len(taken) < slots}
                if room:
                    assert line in self.open_lines()
                    assert room[line // slots] == max(room.values())
                else:
                    assert line // slots in free - set(members)
        self.live[v] = Owned(members, lines)

    def reclaimable(self) -> set[int]:
        return {page for page, taken in self.slabs().items() if not any(self.live[v].protected for v in taken.values())}

    def has_room_for(self, page: int) -> bool:
        """Tell whether the other slabs have room for the slots of this one."""
        outside = [line for line in self.open_lines() if line // self.layout.slots_per_slab != page]
        return len(outside) >= len(self.slabs()[page])

    def may_move(self, v: int, old: int, new: int) -> bool:
        owned = self.live.get(v)
        return owned is not None and not owned.protected and owned.lines == (old,) and new in self.open_lines()

    def referenced(self) -> set[int]:
        return {v for v, owned in self.live.items() if owned.references}

    def census(self) -> tuple[int, int, int]:
        """Count the active, cached and referenced checkpoints."""
        active = sum(not owned.published for owned in self.live.values())
        referenced = len(self.referenced())
        return active, len(self.live) - active - referenced, referenced


class NaiveMemory:
    """Contents: the last writer of every slot-sized piece of every page."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.writer: dict[int, object] = {}

    def write_pages(self, pages: Iterable[int], writer: object) -> None:
        for page in pages:
            self.write_lines(range(page * self.slots, (page + 1) * self.slots), writer)

    def write_lines(self, lines: Iterable[int], writer: object) -> None:
        self.writer.update(dict.fromkeys(lines, writer))

    def copy_line(self, old: int, new: int) -> None:
        self.writer[new] = self.writer[old]

    def writers_of(self, pages: Iterable[int] = (), lines: Iterable[int] = ()) -> set[object]:
        pieces = [page * self.slots + slot for page in pages for slot in range(self.slots)] + list(lines)
        return {self.writer.get(piece) for piece in pieces}
