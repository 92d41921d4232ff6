"""The page allocator: all or nothing, no double free, no shared lists, id 0 never."""

from __future__ import annotations

import pytest

from sgl_hybrid.errors import CapacityError, InvariantError
from sgl_hybrid.memory.pages import PADDING_PAGE, PageAllocator, PageKind

KINDS = [PageKind.ATTENTION, PageKind.MEMBER, PageKind.CONV, PageKind.SLAB]


def snapshot(pages: PageAllocator) -> tuple[object, ...]:
    return pages.num_free, [pages.count(kind) for kind in PageKind], [pages.held(kind) for kind in PageKind]


@pytest.mark.parametrize("num_pages", [1, 2, 9000])
def test_b26_every_page_is_handed_out_once_and_the_padding_page_never(num_pages: int) -> None:
    pages = PageAllocator(num_pages)
    taken = pages.take(PageKind.MEMBER, num_pages)
    assert sorted(taken) == list(range(1, num_pages + 1))
    assert PADDING_PAGE not in taken
    with pytest.raises(CapacityError):
        pages.take(PageKind.MEMBER, 1)
    pages.check()


def test_b39_a_batch_is_taken_whole_or_not_at_all() -> None:
    pages = PageAllocator(5)
    pages.take(PageKind.ATTENTION, 2)
    before = snapshot(pages)
    with pytest.raises(CapacityError, match="expected 4 free pages, got 3") as caught:
        pages.take(PageKind.MEMBER, 4)
    assert (caught.value.unit, caught.value.required, caught.value.available) == ("pages", 4, 3)
    assert snapshot(pages) == before
    assert pages.take(PageKind.MEMBER, 3) == [3, 4, 5]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 1], "each page once"),
        ([1, 2, 3], "got 3"),
        ([1, 0], "got 0"),
        ([2, -1], "got -1"),
        ([1, 7], "got 7"),
        ([1, 2], "expected MEMBER pages, got page 2 of SLAB"),
    ],
    ids=["twice", "free", "padding", "negative", "foreign", "other kind"],
)
def test_b42_a_wrong_free_is_refused_and_changes_nothing(ids: list[int], message: str) -> None:
    pages = PageAllocator(6)
    assert pages.take(PageKind.MEMBER, 1) == [1]
    assert pages.take(PageKind.SLAB, 1) == [2]
    before = snapshot(pages)
    with pytest.raises(ValueError, match=message):
        pages.give_back(ids, kind=PageKind.MEMBER if message.startswith("expected MEMBER") else None)
    assert snapshot(pages) == before
    pages.check()


def test_b38_returned_ids_do_not_change_with_later_calls() -> None:
    pages = PageAllocator(8)
    first = pages.take(PageKind.ATTENTION, 3)
    held = pages.held(PageKind.ATTENTION)
    kept = list(first)
    pages.give_back(first)
    pages.take(PageKind.MEMBER, 8)
    assert (first, held) == (kept, kept)
    first.append(1)
    held.clear()
    pages.check()


def test_pages_are_counted_by_kind() -> None:
    pages = PageAllocator(20)
    for count, kind in enumerate(KINDS, start=1):
        taken = pages.take(kind, count)
        assert {pages.kind_of(page) for page in taken} == {kind}
    assert [pages.count(kind) for kind in PageKind] == [10, 1, 2, 3, 4]
    pages.give_back(pages.held(PageKind.SLAB) + pages.held(PageKind.ATTENTION))
    assert [pages.count(kind) for kind in PageKind] == [15, 0, 2, 3, 0]
    pages.check()


def test_the_page_freed_last_is_taken_first_and_an_undone_take_leaves_no_trace() -> None:
    pages = PageAllocator(6)
    taken = pages.take(PageKind.MEMBER, 3)
    pages.give_back(taken)
    assert pages.take(PageKind.MEMBER, 3) == taken
    pages.give_back([2])
    assert pages.take(PageKind.CONV, 1) == [2]


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="expected num_pages >= 1, got 0"):
        PageAllocator(0)
    pages = PageAllocator(3)
    with pytest.raises(ValueError, match="other than FREE"):
        pages.take(PageKind.FREE, 1)
    with pytest.raises(ValueError, match="count >= 0"):
        pages.take(PageKind.MEMBER, -1)
    for page in (0, -1, 4):
        with pytest.raises(ValueError, match=f"from 1 to 3, got {page}"):
            pages.kind_of(page)
    assert pages.take(PageKind.MEMBER, 0) == []
    pages.give_back([])
    pages.check()


def test_check_finds_a_lost_page_a_doubled_page_and_a_wrong_count() -> None:
    for corrupt in (
        lambda pages: pages._free.pop(),
        lambda pages: pages._free.append(3),
        lambda pages: pages._counts.__setitem__(PageKind.MEMBER, 2),
        lambda pages: pages._kinds.__setitem__(PADDING_PAGE, PageKind.SLAB),
    ):
        pages = PageAllocator(4)
        pages.take(PageKind.MEMBER, 1)
        pages.check()
        corrupt(pages)
        with pytest.raises(InvariantError):
            pages.check()
