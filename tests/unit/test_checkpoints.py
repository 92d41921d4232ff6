"""Composite checkpoints: atomic in every organization, protected while referenced, never freed twice."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from sgl_hybrid.errors import CapacityError, InvariantError
from sgl_hybrid.memory import ORGANIZATIONS, Layout, layout_for
from sgl_hybrid.memory.budget import pages_for
from sgl_hybrid.memory.checkpoints import CheckpointStore, Life
from sgl_hybrid.memory.ledger import ABSENT
from sgl_hybrid.memory.organization import ConvPlacement
from sgl_hybrid.memory.pages import PageAllocator, PageKind
from sgl_hybrid.memory.presets import model_geometry
from tests.tiny_layouts import tiny_layout

ORGS = sorted(ORGANIZATIONS)
SHAPES = [{"members": members, "groups": groups} for members, groups in itertools.product((1, 2, 3), (1, 2, 3))]


def make(layout: Layout, num_pages: int = 40, **options: int) -> CheckpointStore:
    return CheckpointStore(layout, PageAllocator(num_pages), **options)


def snapshot(store: CheckpointStore) -> tuple[object, ...]:
    rows = [
        (store.member_row(v), store.conv_row(v), store.life_of(v), store.references_of(v))
        for v in range(store.num_virtual + 1)
    ]
    slabs = store.slabs and [
        (page, store.slabs.slots_of(page), store.is_reclaimable(page)) for page in store.slabs.slabs()
    ]
    return rows, slabs, store.ledgers(), store.free_ids(), store.pages.held(PageKind.FREE), store.counts.freed


def publish_many(store: CheckpointStore, count: int) -> list[int]:
    ids = store.allocate_many(count)
    for v in ids:
        store.publish(v)
    return ids


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape.values())))
@pytest.mark.parametrize("org", ORGS)
def test_a_checkpoint_takes_the_parts_its_layout_names(org: str, shape: dict[str, int]) -> None:
    layout = tiny_layout(org, **shape)
    store = make(layout)
    v = store.allocate()
    members, lines = store.member_row(v), store.conv_row(v)
    assert len(members) == layout.member_pages
    assert len(lines) == layout.conv_columns
    assert {store.pages.kind_of(page) for page in members} == {PageKind.MEMBER}
    if layout.conv_placement is ConvPlacement.INSIDE:
        assert lines == members
    elif layout.conv_placement is ConvPlacement.PAGE:
        assert store.pages.kind_of(lines[0]) is PageKind.CONV
    else:
        assert store.pages.kind_of(lines[0] // layout.slots_per_slab) is PageKind.SLAB
    assert len(store.pages_of(v)) == store.pages.num_pages - store.pages.num_free
    assert store.freed_pages(v) == store.pages_of(v)
    store.check()


def failing_take(store: CheckpointStore, allowed: int) -> Callable[[PageKind, int], list[int]]:
    """Grant `allowed` pages of any kind, then run out."""
    take, granted = store.pages.take, itertools.count()

    def limited(kind: PageKind, count: int) -> list[int]:
        if any(next(granted) >= allowed for _ in range(count)):
            raise CapacityError("pages", required=count, available=0)
        return take(kind, count)

    return limited


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape.values())))
@pytest.mark.parametrize("org", ORGS)
def test_b1_when_the_kth_part_fails_nothing_is_held(
    org: str, shape: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = tiny_layout(org, **shape)
    store = make(layout)
    need = store.pages_needed(1)
    assert need == pages_for(layout, 0, 1)
    held = store.pages.take(PageKind.ATTENTION, store.pages.num_free - need)
    assert store.capacity() == 1
    before = snapshot(store)
    for k in range(need):
        with monkeypatch.context() as patch:
            patch.setattr(store.pages, "take", failing_take(store, k))
            with pytest.raises(CapacityError):
                store.allocate()
        assert snapshot(store) == before
        assert store.take_dirty() == []
        taken = store.pages.take(PageKind.ATTENTION, need - k)
        assert store.capacity() == 0
        with pytest.raises(CapacityError, match=f"expected {need} free pages, got {k}"):
            store.allocate()
        store.check()
        store.pages.give_back(taken)
        assert snapshot(store) == before
    store.allocate()
    store.pages.give_back(held)
    store.check()


@pytest.mark.parametrize("org", ORGS)
def test_b39_a_batch_of_checkpoints_is_granted_whole_or_not_at_all(org: str) -> None:
    store = make(tiny_layout(org))
    most = store.capacity()
    before = snapshot(store)
    with pytest.raises(CapacityError, match=f"expected {most + 1} free checkpoints, got {most}"):
        store.allocate_many(most + 1)
    assert snapshot(store) == before
    assert len(set(store.allocate_many(most))) == most
    assert store.capacity() == 0
    store.check()


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape.values())))
@pytest.mark.parametrize("org", ORGS)
def test_b7_b3_capacity_is_what_allocation_grants_at_every_fill(org: str, shape: dict[str, int]) -> None:
    for num_pages, attention in itertools.product(range(10, 26), range(6)):
        store = make(tiny_layout(org, **shape), num_pages=num_pages)
        store.pages.take(PageKind.ATTENTION, attention)
        promised = store.capacity()
        for left in range(promised, 0, -1):
            assert store.capacity() == left
            need, free = store.pages_needed(1), store.pages.num_free
            store.allocate()
            assert store.pages.num_free == free - need
        with pytest.raises(CapacityError):
            store.allocate()
        held = store.pages.num_pages - store.pages.num_free
        assert held == pages_for(store.layout, 0, promised) + attention


def test_the_papers_budget_holds_the_papers_counts() -> None:
    # b63 is 193 pages of 512 KiB; 63 checkpoints take 3 * 63 members and 4 slabs of 16 in S2, 4 * 48 pages in S1.
    falcon = model_geometry("falcon-h1-7b")
    store = make(layout_for("s2", falcon), num_pages=193)
    assert store.num_virtual == 63
    assert pages_for(store.layout, 0, 63) == 193
    assert make(layout_for("s1", falcon), num_pages=193).num_virtual == 48
    assert make(layout_for("s0", falcon), num_pages=63).num_virtual == 63
    assert make(layout_for("d0", falcon), num_pages=29).num_virtual == 29


@pytest.mark.parametrize("org", ORGS)
def test_a_life_from_active_to_free(org: str) -> None:
    store = make(tiny_layout(org))
    v = store.allocate()
    assert (store.life_of(v), store.is_held(v)) == (Life.ACTIVE, True)
    store.publish(v)
    assert (store.life_of(v), store.is_held(v)) == (Life.PUBLISHED, False)
    store.acquire(v)
    store.acquire(v)
    with pytest.raises(ValueError, match=f"without execution references, got {v} with 2"):
        store.free(v)
    store.release(v)
    assert store.is_held(v)
    store.release(v)
    assert not store.is_held(v)
    pages = store.pages_of(v)
    assert sorted(store.free(v)) == sorted(pages)
    assert store.pages.num_free == store.pages.num_pages
    counts = store.counts
    assert (counts.allocated, counts.published, counts.freed, counts.cross_invalidated) == (1, 1, 1, 0)
    store.check()


@pytest.mark.parametrize("org", ORGS)
def test_b42_operations_out_of_order_are_refused_and_change_nothing(org: str) -> None:
    store = make(tiny_layout(org))
    active, published, freed = store.allocate(), store.allocate(), store.allocate()
    store.publish(published)
    store.free(freed)
    before = snapshot(store)
    refused = [
        (store.free, (freed, 0, -1, store.num_virtual + 1)),
        (store.publish, (published, freed, 0)),
        (store.acquire, (active, freed, 0)),
        (store.release, (active, published, freed, 0)),
        (store.pages_of, (freed, 0)),
        (store.freed_pages, (freed, 0)),
        (store.slab_of, (freed, 0)),
        (store.member_row, (-1, store.num_virtual + 1)),
    ]
    for operation, ids in refused:
        for v in ids:
            with pytest.raises(ValueError, match="expected"):
                operation(v)
    assert snapshot(store) == before
    store.check()


@pytest.mark.parametrize("org", ORGS)
def test_b26_b27_padding_rows_name_the_sink_and_free_rows_are_absent(org: str) -> None:
    layout = tiny_layout(org, groups=2)
    store = make(layout)
    v = store.allocate()
    assert store.member_row(0) == (0,) * layout.member_pages
    assert store.conv_row(0) == (0,) * layout.conv_columns
    store.free(v)
    assert store.member_row(v) == (ABSENT,) * layout.member_pages
    assert store.conv_row(v) == (ABSENT,) * layout.conv_columns
    assert 0 not in store.allocate_many(store.capacity())


def test_only_changed_rows_are_dirty() -> None:
    store = make(tiny_layout("s2"))
    a, b = store.allocate(), store.allocate()
    assert store.take_dirty() == [a, b]
    assert store.take_dirty() == []
    store.publish(a)
    store.acquire(a)
    store.release(a)
    assert store.take_dirty() == []
    store.free(b)
    assert store.allocate() == b
    assert store.take_dirty() == [b]


@pytest.mark.parametrize("org", ORGS)
def test_ids_can_run_out_before_pages(org: str) -> None:
    store = make(tiny_layout(org), num_virtual=2)
    assert store.capacity() == 2
    store.allocate_many(2)
    with pytest.raises(CapacityError, match="expected 1 free state slots, got 0"):
        store.allocate()
    with pytest.raises(ValueError, match="pages for at least one checkpoint of 2 members"):
        make(tiny_layout("s1"), num_pages=2)


@pytest.mark.parametrize("org", ORGS)
def test_clear_frees_all_but_the_attention_pages(org: str) -> None:
    store = make(tiny_layout(org))
    store.pages.take(PageKind.ATTENTION, 3)
    ids = publish_many(store, 3)
    store.acquire(ids[0])
    store.acquire(ids[0])
    store.allocate()
    store.clear()
    assert store.ledgers().pages == (40, 37, 3, 0, 0, 0, 0)
    store.check()


@pytest.mark.parametrize("org", ORGS)
def test_ledgers_name_who_has_each_unit(org: str) -> None:
    store = make(tiny_layout(org, groups=2))
    store.pages.take(PageKind.ATTENTION, 4)
    _active, _cached, referenced = store.allocate(), *publish_many(store, 2)
    store.acquire(referenced)
    pages, ids, slots = store.ledgers()
    width = {"s0": 2, "s1": 5, "s2": 4, "d0": 1}[org]
    slabs = 2 if org == "s2" else 0
    assert pages == (40, 40 - 4 - 3 * width - slabs, 4, width, width, width, slabs)
    assert ids == (store.num_virtual, store.num_virtual - 3, 0, 1, 1, 1, 0)
    assert slots == ((4, 1, 0, 1, 1, 1) if org == "s2" else (0,) * 6) + (0,)


def test_check_finds_a_stolen_part_a_lost_hold_and_a_wrong_count() -> None:
    for corrupt in (
        lambda store, v: store.pages.give_back(store.member_row(v)),
        lambda store, v: store._members.__setitem__(v, store.member_row(v - 1)),
        lambda store, v: store._lines.__setitem__(v, store.conv_row(v - 1)),
        lambda store, v: store.slabs.let_go(store.conv_row(v)[0]),
        lambda store, v: store._references.__setitem__(v, 1),
        lambda store, v: store._free.append(v),
        lambda store, v: setattr(store, "num_cached", 1),
        lambda store, v: store.pages.take(PageKind.CONV, 1),
        lambda store, v: store._members.__setitem__(5, (9, 10)),
    ):
        store = make(tiny_layout("s2"))
        store.allocate()
        v = store.allocate()
        store.check()
        corrupt(store, v)
        with pytest.raises(InvariantError):
            store.check()


def s2_slabs(*occupied: int) -> tuple[CheckpointStore, list[list[int]]]:
    """Return a store with slabs of four slots whose first `n` slots are cached checkpoints, for each n given."""
    store = make(tiny_layout("s2"), num_pages=80)
    ids = publish_many(store, 4 * len(occupied))
    groups = [ids[4 * n : 4 * n + 4] for n in range(len(occupied))]
    for group, count in zip(groups, occupied, strict=True):
        while len(group) > count:
            store.free(group.pop())
    return store, groups


def test_freeing_a_checkpoint_frees_its_slab_only_with_the_last_slot() -> None:
    store, [[a, b]] = s2_slabs(2)
    slab = store.slab_of(a)
    assert store.freed_pages(a) == list(store.member_row(a))
    assert slab not in store.free(a)
    assert store.freed_pages(b) == [*store.member_row(b), slab]
    assert slab in store.free(b)
    assert store.pages.num_free == store.pages.num_pages


def test_b49_a_slab_is_reclaimed_only_without_active_or_referenced_slots_and_takes_all_its_checkpoints() -> None:
    store = make(layout_for("s2", model_geometry("falcon-h1-7b")), num_pages=49)
    ids = publish_many(store, 15)
    running = store.allocate()
    slab = store.slab_of(running)
    assert {store.slab_of(v) for v in ids} == {slab}
    assert store.capacity() == 0
    for protect, unprotect in (
        (lambda: None, lambda: store.publish(running)),
        (lambda: store.acquire(running), lambda: store.release(running)),
    ):
        protect()
        assert not store.is_reclaimable(slab)
        assert store.sparsest_reclaimable() is None
        for decide in (store.reclaim, store.migration):
            with pytest.raises(ValueError, match=str(slab)):
                decide(slab)
        unprotect()
    assert store.is_reclaimable(slab)
    assert store.sparsest_reclaimable() == slab
    before = snapshot(store)
    victims = store.reclaim(slab)
    assert victims == [*ids, running]
    assert snapshot(store) == before
    for v in victims:
        last = store.free(v, cross_invalidated=True)
        assert store.member_row(v) == (ABSENT,) * 3
        assert store.conv_row(v) == (ABSENT,)
    assert last[-1] == slab
    assert store.pages.kind_of(slab) is PageKind.FREE
    assert store.counts.cross_invalidated == 16
    assert store.slabs is not None
    assert store.slabs.popped == 1
    store.check()


def test_a_slab_is_migrated_into_the_fullest_others() -> None:
    store, [full, two, three] = s2_slabs(4, 2, 3)
    slab = store.slab_of(two[0])
    store.acquire(full[0])
    store.acquire(three[0])
    store.take_dirty()
    assert store.migration(slab) is None
    store.release(full[0])
    store.free(full[3])
    before = snapshot(store)
    moves = store.migration(slab)
    assert moves is not None
    assert snapshot(store) == before
    assert [(move.checkpoint, move.old_line) for move in moves] == [(v, store.conv_row(v)[0]) for v in two]
    members = [store.member_row(v) for v in two]
    store.take_dirty()
    assert store.migrate(moves) == [slab]
    assert [store.conv_row(v) for v in two] == [(move.new_line,) for move in moves]
    assert [store.member_row(v) for v in two] == members
    assert store.take_dirty() == two
    assert {store.slab_of(v) for v in two} == {store.slab_of(full[0]), store.slab_of(three[0])}
    assert (store.counts.migrated, store.counts.cross_invalidated) == (2, 0)
    store.check()


def test_a_migration_that_no_longer_fits_is_refused_and_nothing_changes() -> None:
    store, [two, three] = s2_slabs(2, 3)
    store.free(two[1])
    slab = store.slab_of(two[0])
    moves = store.migration(slab)
    assert moves is not None
    taken = store.allocate()
    before = snapshot(store)
    with pytest.raises(ValueError, match="a free slot to move to"):
        store.migrate(moves)
    assert snapshot(store) == before
    store.free(taken)
    store.free(two[0])
    with pytest.raises(ValueError, match="line of a live slot"):
        store.migrate(moves)
    newcomer, moves = three[0], [moves[0]._replace(old_line=store.conv_row(three[1])[0], checkpoint=three[0])]
    with pytest.raises(ValueError, match=f"to belong to checkpoint {newcomer}, got {three[1]}"):
        store.migrate(moves)
    store.check()


@pytest.mark.parametrize("org", ["s0", "s1", "d0"])
def test_organizations_without_slabs_say_so(org: str) -> None:
    store = make(tiny_layout(org))
    v = store.allocate()
    assert store.slab_of(v) is None
    assert store.sparsest_reclaimable() is None
    for operation in (store.is_reclaimable, store.reclaim, store.migration):
        with pytest.raises(ValueError, match=f"with conv slabs, got {org}"):
            operation(1)
