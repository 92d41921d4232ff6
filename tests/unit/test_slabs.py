"""The slab allocator: fullest first, empty slabs go back, held slabs stay, moves are planned and then committed."""

from __future__ import annotations

import random

import pytest

from sgl_hybrid.errors import CapacityError, InvariantError
from sgl_hybrid.memory.pages import PageAllocator, PageKind
from sgl_hybrid.memory.slabs import SlabAllocator


def make(num_pages: int = 8, slots: int = 4) -> tuple[PageAllocator, SlabAllocator]:
    pages = PageAllocator(num_pages)
    return pages, SlabAllocator(pages, slots)


def snapshot(pages: PageAllocator, slabs: SlabAllocator) -> tuple[object, ...]:
    slots = {page: (slabs.slots_of(page), slabs.is_idle(page)) for page in slabs.slabs()}
    return pages.num_free, slots, slabs.occupancy(), slabs.opened, slabs.popped, slabs.num_live, slabs.num_held


def test_a_line_is_slots_times_page_plus_slot_with_the_real_page_id() -> None:
    pages, slabs = make(slots=16)
    pages.take(PageKind.ATTENTION, 5)
    lines = [slabs.take_slot(owner) for owner in range(1, 19)]
    assert lines == [16 * 6 + slot for slot in range(16)] + [16 * 7, 16 * 7 + 1]
    assert slabs.slots_of(7) == [(112, 17), (113, 18)]
    slabs.check()


def test_new_slots_go_to_the_fullest_slab_so_that_the_others_empty_out() -> None:
    pages, slabs = make()
    lines = [slabs.take_slot(owner) for owner in range(1, 13)]
    first, second, third = slabs.slabs()
    for line in (lines[0], lines[4], lines[5], lines[8], lines[9], lines[10]):
        slabs.give_back(line)
    assert [slabs.num_live_of(page) for page in (first, second, third)] == [3, 2, 1]
    assert slabs.occupancy() == [0, 1, 1, 1, 0]
    taken = [slabs.take_slot(20 + n) // 4 for n in range(4)]
    assert taken == [first, second, second, third]
    slabs.check()
    assert pages.count(PageKind.SLAB) == 3


def test_of_equally_full_slabs_the_held_one_is_used_so_that_idle_ones_stay_reclaimable() -> None:
    _, slabs = make()
    lines = [slabs.take_slot(owner) for owner in range(1, 9)]
    first, second = slabs.slabs()
    for line in (lines[3], lines[7]):
        slabs.give_back(line)
    for line in lines[:3]:
        slabs.let_go(line)
    assert (slabs.is_idle(first), slabs.is_idle(second)) == (True, False)
    assert slabs.take_slot(9) // 4 == second


def test_an_empty_slab_returns_its_page() -> None:
    pages, slabs = make(num_pages=1)
    lines = [slabs.take_slot(owner) for owner in (1, 2)]
    with pytest.raises(CapacityError):
        pages.take(PageKind.ATTENTION, 1)
    assert slabs.give_back(lines[0]) is None
    assert slabs.give_back(lines[1]) == 1
    assert (slabs.num_slabs, slabs.opened, slabs.popped) == (0, 1, 1)
    assert pages.take(PageKind.ATTENTION, 1) == [1]
    slabs.check()


def test_b39_a_slot_without_a_page_takes_nothing() -> None:
    pages, slabs = make(num_pages=1, slots=2)
    slabs.take_slot(1)
    slabs.take_slot(2)
    before = snapshot(pages, slabs)
    with pytest.raises(CapacityError, match="expected 1 free pages, got 0"):
        slabs.take_slot(3)
    assert snapshot(pages, slabs) == before


def test_b42_a_line_that_is_not_live_is_refused_and_nothing_changes() -> None:
    pages, slabs = make()
    line = slabs.take_slot(1)
    slabs.give_back(slabs.take_slot(2))
    before = snapshot(pages, slabs)
    for wrong in (line + 1, 0, -1, 4 * 7, 4 * 100):
        for operation in (slabs.give_back, slabs.hold, slabs.let_go, slabs.owner_of):
            with pytest.raises(ValueError, match=f"line of a live slot, got {wrong} "):
                operation(wrong)
    with pytest.raises(ValueError, match="not held"):
        slabs.hold(line)
    slabs.let_go(line)
    with pytest.raises(ValueError, match="a held slot"):
        slabs.let_go(line)
    slabs.hold(line)
    with pytest.raises(ValueError, match="owner >= 1, got 0"):
        slabs.take_slot(0)
    with pytest.raises(ValueError, match="page of a slab, got 5"):
        slabs.slots_of(5)
    assert snapshot(pages, slabs) == before


def test_the_sparsest_idle_slab_is_the_one_to_reclaim() -> None:
    _, slabs = make()
    lines = [slabs.take_slot(owner) for owner in range(1, 11)]
    assert slabs.sparsest_idle() is None
    first, second, third = slabs.slabs()
    for line in lines[:8]:
        slabs.let_go(line)
    assert slabs.sparsest_idle() == first
    slabs.give_back(lines[4])
    assert slabs.sparsest_idle() == second
    for line in lines[8:]:
        slabs.let_go(line)
    assert slabs.sparsest_idle() == third
    slabs.hold(lines[8])
    assert slabs.sparsest_idle() == second


def test_a_slab_is_emptied_into_the_fullest_others() -> None:
    pages, slabs = make()
    lines = [slabs.take_slot(owner) for owner in range(1, 13)]
    first, second, third = slabs.slabs()
    for line in lines:
        slabs.let_go(line)
    for line in (lines[0], lines[4], lines[5], lines[8], lines[9]):
        slabs.give_back(line)
    before = snapshot(pages, slabs)
    moves = slabs.plan_moves(third)
    assert moves == [(lines[10], first * 4), (lines[11], second * 4)]
    assert snapshot(pages, slabs) == before
    assert slabs.move(moves) == [third]
    assert [slabs.owner_of(new) for _, new in moves] == [11, 12]
    assert slabs.slabs() == [first, second]
    assert slabs.is_idle(first)
    assert slabs.popped == 1
    slabs.check()


def test_a_slab_without_room_elsewhere_or_with_a_held_slot_is_not_emptied() -> None:
    _, slabs = make()
    lines = [slabs.take_slot(owner) for owner in range(1, 8)]
    first, second = slabs.slabs()
    for line in lines[:4]:
        slabs.let_go(line)
    assert slabs.plan_moves(first) is None
    with pytest.raises(ValueError, match=f"expected an idle slab, got page {second}"):
        slabs.plan_moves(second)


@pytest.mark.parametrize(
    ("moves", "message"),
    [
        ([(20, 4), (5, 5)], "line of a live slot, got 5"),
        ([(20, 6)], "a free slot to move to, got line 6"),
        ([(20, 4), (21, 5)], "not held, got line 21"),
        ([(20, 32)], "page of a slab, got 8"),
        ([(20, 4), (22, 4)], "each line once"),
    ],
    ids=["freed since", "taken since", "held since", "no slab", "twice"],
)
def test_moves_that_no_longer_fit_are_refused_and_nothing_changes(moves: list[tuple[int, int]], message: str) -> None:
    pages, slabs = make()
    first = [slabs.take_slot(owner) for owner in range(1, 5)]
    pages.take(PageKind.ATTENTION, 3)
    second = [slabs.take_slot(owner) for owner in range(5, 8)]
    assert (first, second) == ([4, 5, 6, 7], [20, 21, 22])
    for line in (4, 5):
        slabs.give_back(line)
    for line in (6, 7, 20, 22):
        slabs.let_go(line)
    before = snapshot(pages, slabs)
    with pytest.raises(ValueError, match=message):
        slabs.move(moves)
    assert snapshot(pages, slabs) == before
    slabs.check()


@pytest.mark.parametrize("slots", [1, 2, 3, 16, 70])
def test_random_use_keeps_the_ledger(slots: int) -> None:
    rng = random.Random(slots)
    pages, slabs = make(num_pages=12, slots=slots)
    live: dict[int, int] = {}
    for owner in range(1, 600):
        if live and rng.random() < 0.45:
            line = rng.choice(sorted(live))
            assert slabs.owner_of(line) == live.pop(line)
            slabs.give_back(line)
        elif slabs.num_open or pages.num_free:
            fullest = max((n for n, count in enumerate(slabs.occupancy()[:-1]) if count), default=0)
            line = slabs.take_slot(owner)
            assert slabs.num_live_of(line // slots) == fullest + 1
            assert line not in live
            live[line] = owner
        slabs.check()
    assert sorted(live) == sorted(line for page in slabs.slabs() for line, _ in slabs.slots_of(page))


def test_check_finds_corruption() -> None:
    for corrupt in (
        lambda slabs, page: slabs._slabs[page].owners.__setitem__(0, 0),
        lambda slabs, page: setattr(slabs._slabs[page], "held", 0b1000),
        lambda slabs, page: slabs._idle[2].__setitem__(page, None),
        lambda slabs, page: slabs._slabs.pop(page),
        lambda slabs, page: setattr(slabs, "num_live", 5),
        lambda slabs, page: setattr(slabs, "opened", 5),
    ):
        _, slabs = make()
        slabs.take_slot(1)
        slabs.let_go(slabs.take_slot(2))
        slabs.check()
        corrupt(slabs, slabs.slabs()[0])
        with pytest.raises(InvariantError):
            slabs.check()


def test_a_slab_needs_a_slot() -> None:
    with pytest.raises(ValueError, match="slots_per_slab >= 1, got 0"):
        make(slots=0)
