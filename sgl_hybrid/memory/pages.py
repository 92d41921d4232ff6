"""The pages of one pool: which are free, and what each taken one holds.

Page ids are 1 to `num_pages`. Id 0 is the padding sink: it exists in the pool's tensors, takes the writes of padded
rows and is never handed out. Plain integers; one thread (the scheduler's) uses an allocator.

Invariants: a page is free or has exactly one kind; the free list holds each free page once.
Source: paper section 3.1 (every physical unit is counted once).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from sgl_hybrid.errors import CapacityError, InvariantError

PADDING_PAGE = 0


class PageKind(enum.IntEnum):
    """What a page holds: nothing, tokens of attention KV, recurrent state, one conv state, or a slab of conv slots.

    A composite (recurrent state with its conv state behind it) is a MEMBER page.
    """

    FREE = 0
    ATTENTION = 1
    MEMBER = 2
    CONV = 3
    SLAB = 4


class PageAllocator:
    """Hands out page ids, all or nothing. Taking and giving back cost O(pages moved)."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"expected num_pages >= 1, got {num_pages}")
        self.num_pages = num_pages
        self._kinds = bytearray(num_pages + 1)
        self._free = list(range(num_pages, 0, -1))
        self._counts = [0] * len(PageKind)
        self._counts[PageKind.FREE] = num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def count(self, kind: PageKind) -> int:
        """Return the number of pages of this kind; the kinds sum to `num_pages`."""
        return self._counts[kind]

    def kind_of(self, page: int) -> PageKind:
        """Return what a page holds.

        Raises:
            ValueError: no page of this pool has this id.
        """
        if not 1 <= page <= self.num_pages:
            raise ValueError(f"expected a page id from 1 to {self.num_pages}, got {page}")
        return PageKind(self._kinds[page])

    def held(self, kind: PageKind) -> list[int]:
        """Return the ids of a kind in increasing order. Scans the pool: for flushes and checks."""
        return [page for page in range(1, self.num_pages + 1) if self._kinds[page] == kind]

    def take(self, kind: PageKind, count: int) -> list[int]:
        """Take `count` free pages for `kind`, most recently freed first, or none of them.

        Raises:
            CapacityError: fewer are free.
            ValueError: a negative count, or kind FREE.
        """
        if kind == PageKind.FREE or count < 0:
            raise ValueError(f"expected a kind other than FREE and count >= 0, got {kind.name} and {count}")
        if count > len(self._free):
            raise CapacityError("pages", required=count, available=len(self._free))
        if count == 0:
            return []
        taken = self._free[-count:]
        del self._free[-count:]
        taken.reverse()
        for page in taken:
            self._kinds[page] = kind
        self._counts[PageKind.FREE] -= count
        self._counts[kind] += count
        return taken

    def give_back(self, ids: Sequence[int], *, kind: PageKind | None = None) -> None:
        """Return pages to the free list. With `kind`, all must hold it.

        Raises:
            ValueError: an id is not of this pool, is free, holds another kind, or comes twice. Nothing is changed.
        """
        for page in ids:
            if not 1 <= page <= self.num_pages or self._kinds[page] == PageKind.FREE:
                raise ValueError(f"expected held page ids from 1 to {self.num_pages}, got {page}")
            if kind is not None and self._kinds[page] != kind:
                raise ValueError(f"expected {kind.name} pages, got page {page} of {self.kind_of(page).name}")
        if len(set(ids)) != len(ids):
            raise ValueError(f"expected each page once, got {list(ids)}")
        for page in reversed(ids):
            self._counts[self._kinds[page]] -= 1
            self._kinds[page] = PageKind.FREE
            self._free.append(page)
        self._counts[PageKind.FREE] += len(ids)

    def check(self) -> None:
        """Verify that the free list, the kinds and the counts say the same.

        Raises:
            InvariantError: naming what differs.
        """
        free = sorted(self._free)
        if free != self.held(PageKind.FREE):
            raise InvariantError(f"free list {free}, expected the pages of kind FREE {self.held(PageKind.FREE)}")
        found = [self._kinds.count(kind, 1) for kind in PageKind]
        if found != self._counts or sum(found) != self.num_pages:
            raise InvariantError(f"pages by kind {found}, expected {self._counts} with sum {self.num_pages}")
        if self._kinds[PADDING_PAGE] != PageKind.FREE:
            raise InvariantError(f"padding page {PADDING_PAGE} holds {PageKind(self._kinds[PADDING_PAGE]).name}")
