"""Who has the units of a pool, and the check that every unit of a checkpoint store has one owner.

Source: paper section 3.1 (each allocated physical unit is counted once) and Table D-1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from sgl_hybrid.errors import InvariantError
from sgl_hybrid.memory.organization import ConvPlacement
from sgl_hybrid.memory.pages import PageKind

if TYPE_CHECKING:
    from sgl_hybrid.memory.checkpoints import CheckpointStore

ABSENT = -1


class Ledger(NamedTuple):
    """Units of one kind by who has them; they sum to `total`.

    active: being written by requests. cached: published, without execution reference. referenced: published, with one.
    slabs: pages that hold conv slots (0 for other units); one slab serves checkpoints of every state.
    """

    total: int
    free: int
    attention: int
    active: int
    cached: int
    referenced: int
    slabs: int = 0

    def check(self, unit: str) -> None:
        """Verify the sum.

        Raises:
            InvariantError: the parts do not sum to the total.
        """
        found = sum(self) - self.total
        if found != self.total:
            raise InvariantError(f"{unit}: {self} sums to {found}")


class Ledgers(NamedTuple):
    """The ledgers of one store, by unit."""

    pages: Ledger
    ids: Ledger
    conv_slots: Ledger


def ledgers_of(store: CheckpointStore) -> Ledgers:
    """Count the units of a store by who has them, in constant time; the conv slots are those of the slabs there are."""
    pages, slabs = store.pages, store.slabs
    held = (store.num_active, store.num_cached, store.num_referenced)
    width = store.layout.member_pages + (store.layout.conv_placement is ConvPlacement.PAGE)
    active, cached, referenced = (width * count for count in held)
    num_slabs = 0 if slabs is None else slabs.num_slabs
    attention = pages.count(PageKind.ATTENTION)
    return Ledgers(
        pages=Ledger(pages.num_pages, pages.num_free, attention, active, cached, referenced, num_slabs),
        ids=Ledger(store.num_virtual, store.num_free_ids, 0, *held),
        conv_slots=Ledger(num_slabs * slabs.slots_per_slab, slabs.num_open, 0, *held) if slabs else Ledger(*[0] * 6),
    )


def check_store(store: CheckpointStore) -> None:
    """Verify the allocators, the ledgers, and every checkpoint's life and parts. Scans everything.

    Raises:
        InvariantError: naming what is inconsistent.
    """
    store.pages.check()
    if store.slabs is not None:
        store.slabs.check()
    _check_lives(store)
    _check_parts(store)
    ledgers = ledgers_of(store)
    for unit, ledger in zip(ledgers._fields, ledgers, strict=True):
        ledger.check(unit)


def _check_lives(store: CheckpointStore) -> None:
    ids = range(1, store.num_virtual + 1)
    live = [v for v in ids if store.is_live(v)]
    if sorted([*store.free_ids(), *live]) != list(ids):
        raise InvariantError(f"free ids {sorted(store.free_ids())} and live ids {live}, expected 1..{len(ids)} once")
    referenced = [v for v in ids if store.references_of(v)]
    active = [v for v in live if store.is_held(v) and v not in referenced]
    if any(store.references_of(v) < 0 or not store.is_published(v) for v in referenced):
        raise InvariantError(f"expected published checkpoints with counts above 0, got references to {referenced}")
    found = (len(active), len(live) - len(active) - len(referenced), len(referenced))
    if found != (store.num_active, store.num_cached, store.num_referenced):
        raise InvariantError(f"active, cached, referenced are {found}, counted as {ledgers_of(store).ids}")


def _check_parts(store: CheckpointStore) -> None:
    """Verify that every part of every checkpoint has one owner and the right kind, and that no part is ownerless."""
    owners: dict[int, int] = {}
    lines: dict[int, int] = {}
    for v in range(1, store.num_virtual + 1):
        members, conv = store.member_row(v), store.conv_row(v)
        if not store.is_live(v):
            if set(members + conv) != {ABSENT}:
                raise InvariantError(f"free checkpoint {v} has members {members} and lines {conv}")
            continue
        own_page = conv if store.layout.conv_placement is ConvPlacement.PAGE else ()
        parts = [(page, PageKind.MEMBER) for page in members] + [(page, PageKind.CONV) for page in own_page]
        for page, kind in parts:
            if page in owners or store.pages.kind_of(page) is not kind:
                raise InvariantError(f"{kind.name} page {page} of checkpoint {v} is {_described(store, page, owners)}")
            owners[page] = v
        for line in conv:
            if line in lines:
                raise InvariantError(f"line {line} belongs to checkpoints {lines[line]} and {v}")
            lines[line] = v
            _check_slot(store, v, line)
    held = store.pages.count(PageKind.MEMBER) + store.pages.count(PageKind.CONV)
    if len(owners) != held:
        raise InvariantError(f"checkpoints own {len(owners)} pages, expected the {held} of kind MEMBER and CONV")
    if store.slabs is not None and len(lines) != store.slabs.num_live:
        raise InvariantError(f"checkpoints own {len(lines)} conv slots, expected the {store.slabs.num_live} live ones")


def _check_slot(store: CheckpointStore, v: int, line: int) -> None:
    if store.slabs is None:
        return
    if store.slabs.owner_of(line) != v:
        raise InvariantError(f"line {line} of checkpoint {v} belongs to {store.slabs.owner_of(line)}")
    if store.slabs.is_held(line) != store.is_held(v):
        raise InvariantError(f"line {line} of checkpoint {v}: held {store.slabs.is_held(line)}, expected the other")


def _described(store: CheckpointStore, page: int, owners: dict[int, int]) -> str:
    owner = f", of checkpoint {owners[page]}" if page in owners else ""
    return f"of kind {store.pages.kind_of(page).name}{owner}"
