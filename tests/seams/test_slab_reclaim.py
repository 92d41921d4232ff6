"""Taking slabs of conv slots back in S2: coupled invalidation inside the tree, or moving the states elsewhere (B49)."""

from __future__ import annotations

import pytest

from radix.eviction import Kind
from sgl_hybrid.memory.pages import PageKind
from tests.oracles.tree import Prefix
from tests.seams.request_flow import prompt
from tests.seams.shadow import ShadowedServer
from tests.seams.tree_fixture import tiny_plan
from tests.tiny_layouts import PAGE_TOKENS

SLOTS_16, SLOTS_4 = 8, 20  # Conv channels that make slabs of so many slots.
pytestmark = pytest.mark.usefixtures("published")


def server_of(
    conv_channels: int, *, pages: int = 120, slab_reclaim: str | None = None, placement: str = "branch", **shape: int
) -> ShadowedServer:
    shape = {"conv_channels": conv_channels, **shape}
    policies = {"slab_reclaim": slab_reclaim, "placement": placement}
    return ShadowedServer(tiny_plan("s2", pages=pages, checkpoints=0, **policies, **shape))


def by_slab(server: ShadowedServer) -> dict[int, list[Prefix]]:
    """Return the cached prefixes with a state in each slab."""
    store, found = server.cache.memory.store, {}
    for prefix, v in server.naive.states.items():
        found.setdefault(store.slab_of(v), []).append(prefix)
    return found


def conv_bytes(server: ShadowedServer, prefix: Prefix) -> bytes:
    """Return the conv state of a prefix, of all layers."""
    memory = server.cache.memory
    memory.pool.update_tables(memory.store)
    (line,) = memory.pool.conv_line[server.naive.states[prefix]].tolist()
    return b"".join(plane[:, line].numpy().tobytes() for plane in server.cache.contents.lines)


def has_slab_candidate(server: ShadowedServer) -> bool:
    return any(candidate.kind is Kind.SLAB for candidate in server.cache.tree._candidates())


def test_b49_a_slab_is_kept_while_one_of_its_slots_is_written() -> None:
    """One running request among cached checkpoints: a shortage takes these, never the slab. Then it can be taken, and
    no lookup finds a state that was in it."""
    server = server_of(SLOTS_16)
    (running,) = server.admit((None, prompt(2, seed=50)))
    assert server.extend(running, end=8)
    for seed in range(13):
        server.serve(prompt(1, seed=seed))
    store = server.cache.memory.store
    (page,) = by_slab(server)
    assert len(by_slab(server)[page]) == 13
    assert not store.is_reclaimable(page)
    assert not has_slab_candidate(server)
    with pytest.raises(ValueError, match="without active or referenced slots"):
        store.reclaim(page)
    for missing in range(1, 6):
        server.run_short(slots=missing)
        server.check()
    server.run_dry(slots=False)
    assert store.pages.kind_of(page) is PageKind.SLAB
    assert not server.victims[Kind.SLAB]
    for seed in range(13):
        assert server.probe(prompt(1, seed=seed)).depth == 0
        server.serve(prompt(1, seed=seed))
    assert server.extend(running)
    server.finish(running)
    (page,) = by_slab(server)
    assert store.is_reclaimable(page)
    assert len(server.reclaim(page)) == 14
    assert store.counts.cross_invalidated == 13
    server.check()
    for seed in (*range(13), 50):
        assert server.probe(prompt(2, seed=seed)).depth == 0
    assert server.naive.blocks == {}


@pytest.mark.parametrize("groups", [1, 2])
def test_b49_reclaim_deletes_leaves_and_leaves_tombstones_inside(groups: int) -> None:
    """States of a chain and of single prompts in one slab. A lock on any one of them keeps the slab."""
    server = server_of(SLOTS_16, pages=160, groups=groups)
    chain = prompt(5)
    (other,) = server.admit((None, prompt(6)))
    assert server.extend(other)
    server.finish(other)
    server.serve(chain, chunk=PAGE_TOKENS)
    for seed in range(1, 6):
        server.serve(prompt(2, seed=seed))
    store = server.cache.memory.store
    page, mates = max(by_slab(server).items(), key=lambda item: len(item[1]))
    assert has_slab_candidate(server)
    for salt, tokens in mates:
        server.probe(tokens, salt, pin=True)
        assert not store.is_reclaimable(page)
        server.unpin()
        assert store.is_reclaimable(page)
    leaves = [prefix for prefix in mates if not any(prefix[1] == key[1][: len(prefix[1])] != key[1] for key in mates)]
    assert sorted(server.reclaim(page)) == sorted(mates)
    server.check()
    assert 1 < len(leaves) < len(mates)
    assert all(prefix not in server.naive.blocks for prefix in leaves)
    for seed in range(20, 32):
        server.serve(prompt(1, seed=seed))
    for _, tokens in mates:
        assert server.probe(tokens).depth == 0
    server.check()


def test_the_last_checkpoint_of_a_slab_goes_with_its_page() -> None:
    """By shortage: the states of an old chain go one by one, and the last of a slab as the slab."""
    server = server_of(SLOTS_4, pages=80, placement="all")
    server.serve(prompt(10), chunk=PAGE_TOKENS)
    slabs = server.cache.memory.store.slabs
    num_slabs = slabs.num_slabs
    while not server.victims[Kind.SLAB]:
        assert slabs.num_slabs == num_slabs
        free = server.cache.memory.pages.num_free
        server.run_short(pages=1)
        server.check()
    assert slabs.num_slabs == num_slabs - 1
    assert server.cache.memory.pages.num_free == free + server.cache.memory.layout.member_pages + 1
    assert not server.victims[Kind.ATTENTION]


def sparse_slabs(server: ShadowedServer, *, kept: int) -> list[Prefix]:
    """Fill several slabs, then evict all states but `kept` of each; return those."""
    for seed in range(10):
        server.serve(prompt(2, seed=seed), chunk=PAGE_TOKENS)
    slabs = by_slab(server)
    assert len(slabs) > 2
    for prefixes in slabs.values():
        for prefix in prefixes[kept:]:
            server.evict_state(prefix)
    return sorted(prefix for prefixes in slabs.values() for prefix in prefixes[:kept])


@pytest.mark.parametrize("groups", [1, 2])
def test_migration_empties_slabs_and_loses_nothing(groups: int) -> None:
    """By shortage of a page: conv states move, byte for byte, and every state is found where it was."""
    server = server_of(SLOTS_4 // groups, pages=160, slab_reclaim="migrate", groups=groups)
    kept = sparse_slabs(server, kept=1)
    slabs = server.cache.memory.store.slabs
    before, num_slabs = {prefix: conv_bytes(server, prefix) for prefix in kept}, slabs.num_slabs
    assert len(set(before.values())) == len(kept)
    old_lines = {server.cache.memory.store.conv_row(v)[0] for v in server.naive.states.values()}
    spare = num_slabs - -(-len(kept) // slabs.slots_per_slab)
    for _ in range(spare):
        pages = server.cache.memory.pages.num_free
        server.run_short(pages=1)
        assert server.cache.memory.pages.num_free == pages + 1
        server.check()
    assert slabs.num_slabs == num_slabs - spare
    moved = server.cache.memory.store.counts.migrated
    assert moved >= spare > 0
    geometry = server.cache.memory.layout.geometry
    assert server.cache.memory.copied.slab_migration == moved * groups * geometry.conv_bytes
    assert sorted(server.naive.states) == kept
    assert {prefix: conv_bytes(server, prefix) for prefix in kept} == before
    assert {server.cache.memory.store.conv_row(v)[0] for v in server.naive.states.values()} != old_lines
    assert not server.victims
    for salt, tokens in kept:
        assert server.probe(tokens, salt).depth == len(tokens)


def test_without_room_elsewhere_migration_evicts() -> None:
    """Full slabs cannot be emptied into others: the least recent goes instead."""
    server = server_of(SLOTS_4, pages=60, slab_reclaim="migrate")
    server.serve(prompt(7), chunk=PAGE_TOKENS)
    while server.cache.tree._migrate_slab():
        server.settle()
    states = len(server.naive.states)
    assert server.cache.memory.store.sparsest_reclaimable() is not None
    server.run_short(slots=1)
    assert sum(server.victims.values()) > 0
    assert len(server.naive.states) < states
    server.check()


@pytest.mark.parametrize("slab_reclaim", [None, "invalidate"])
def test_the_default_policy_moves_nothing(slab_reclaim: str | None) -> None:
    server = server_of(SLOTS_4, pages=160, slab_reclaim=slab_reclaim)
    sparse_slabs(server, kept=1)
    assert not server.cache.tree._migrate_slab()
    server.run_short(pages=1)
    assert server.cache.memory.store.counts.migrated == 0
    assert sum(server.victims.values()) == 1


def test_migration_leaves_slabs_that_are_in_use() -> None:
    """A slab with a locked state stays where it is, and takes the states of others."""
    server = server_of(SLOTS_4, pages=160, slab_reclaim="migrate")
    kept = sparse_slabs(server, kept=1)
    salt, tokens = kept[0]
    server.probe(tokens, salt, pin=True)
    line = server.cache.memory.store.conv_row(server.naive.states[kept[0]])
    while server.cache.tree._migrate_slab():
        server.settle()
        server.check()
    assert server.cache.memory.store.conv_row(server.naive.states[kept[0]]) == line
    assert sorted(server.naive.states) == kept
    server.unpin()
