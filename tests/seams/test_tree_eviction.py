"""The prefix cache of every organization under pressure: what goes, what stays, and who waits.

`ShadowedServer` compares each call with the naive tree; `check` verifies every ledger, byte and recency. Faults of the
kind `bNN` are named by their number.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from radix.eviction import Kind
from sgl_hybrid.memory import ORGANIZATIONS
from sgl_hybrid.memory.pages import PageKind
from tests.oracles.tree import Prefix
from tests.seams.request_flow import prompt
from tests.seams.shadow import Serve
from tests.tiny_layouts import PAGE_TOKENS

ORGS = sorted(ORGANIZATIONS)
SHARED = [org for org in ORGS if ORGANIZATIONS[org].shared]
pytestmark = pytest.mark.usefixtures("published")


@pytest.mark.parametrize("org", ORGS)
def test_b47_leaves_go_first_in_every_lock_pattern(serve: Serve, org: str) -> None:
    """A chain of five nodes: what is locked stays with all attention before it, the rest goes from its end."""
    server = serve(org, placement="all")
    tokens = prompt(5)
    for pattern in range(32):
        server.serve(tokens, chunk=PAGE_TOKENS)
        locked = [depth for depth in range(1, 6) if pattern >> depth - 1 & 1]
        for depth in locked:
            server.probe(tokens[: depth * PAGE_TOKENS], pin=True)
        server.run_dry(slots=True)
        server.run_dry(slots=False)
        server.check()
        assert server.depths(tokens) == locked
        assert len(server.naive.blocks) == max(locked, default=0)
        while server.pins:
            server.unpin()
        server.run_dry(slots=False)
        assert server.naive.blocks == {}


@pytest.mark.parametrize("org", ORGS)
def test_b45_a_lost_inner_state_costs_its_depth_only(serve: Serve, org: str) -> None:
    """Attention stays, both before and behind; the next request leaves the state there again."""
    server = serve(org, placement="all")
    tokens = prompt(3)
    server.serve(tokens, chunk=PAGE_TOKENS)
    server.probe(tokens[:PAGE_TOKENS])
    server.run_short(slots=1)
    assert server.depths(tokens) == [1, 3]
    assert server.probe(tokens[:33]) == (16, 32, 32)
    assert server.probe(tokens) == (48, 48, None)
    assert server.cache.memory.pages.count(PageKind.ATTENTION) == 3
    assert server.serve(tokens[:33]) == 16
    assert server.probe(tokens[:33]) == (32, 32, None)


@pytest.mark.parametrize("org", ORGS)
def test_b16_no_state_is_found_behind_lost_attention(serve: Serve, org: str) -> None:
    server = serve(org, placement="all")
    tokens = prompt(3)
    server.serve(tokens, chunk=PAGE_TOKENS)
    server.probe(tokens[: 2 * PAGE_TOKENS], pin=True)
    server.run_dry(slots=False)
    assert server.probe(tokens) == (32, 32, None)
    server.unpin()


@pytest.mark.parametrize("org", ORGS)
def test_b46_mild_pressure_costs_a_long_context_its_tail_at_most(serve: Serve, org: str) -> None:
    server = serve(org, placement="all", pages=60)
    tokens = prompt(8)
    server.serve(tokens, chunk=PAGE_TOKENS)
    before = len(server.naive.blocks)
    server.run_short(slots=1)
    server.run_short(pages=1)
    lost = (before - len(server.naive.blocks)) * PAGE_TOKENS
    assert server.probe(tokens).depth >= 128 - lost - PAGE_TOKENS


@pytest.mark.parametrize("org", ORGS)
@pytest.mark.parametrize("slots", [True, False])
def test_the_least_recently_used_goes_first_whatever_is_needed(serve: Serve, org: str, slots: bool) -> None:
    server = serve(org)
    prompts = [prompt(2, seed=seed) for seed in range(4)]
    for tokens in prompts:
        server.serve(tokens)
    server.probe(prompts[0])
    order = []
    while server.naive.states:
        before = [seed for seed in range(4) if server.depths(prompts[seed])]
        server.run_short(**{"slots" if slots else "pages": 1})
        order += [seed for seed in before if not server.depths(prompts[seed])]
    assert order == [1, 2, 3, 0]


@pytest.mark.parametrize("org", SHARED)
def test_one_recency_order_over_both_kinds(serve: Serve, org: str) -> None:
    """States of an old chain, then its attention from the end, then the newer prompt; asked for pages only."""
    server = serve(org, placement="all")
    old, new = prompt(3), prompt(3, seed=1)
    server.serve(old, chunk=PAGE_TOKENS)
    server.serve(new)
    sizes = []
    while server.naive.blocks:
        server.run_short(pages=1)
        sizes.append((len(server.depths(old)), server.probe(old).attention // PAGE_TOKENS, len(server.depths(new))))
        server.check()
    assert sizes[-1] == (0, 0, 0)
    assert sizes == sorted(sizes, key=lambda size: (size[2], size[1], size[0]), reverse=True)
    assert server.victims[Kind.CHECKPOINT] + server.victims[Kind.SLAB] >= 2


def test_each_pool_of_d0_evicts_its_own_kind(serve: Serve) -> None:
    server = serve("d0", placement="all")
    tokens = prompt(4)
    server.serve(tokens, chunk=PAGE_TOKENS)
    server.run_short(slots=2)
    assert (len(server.naive.blocks), server.depths(tokens)) == (4, [3, 4])
    server.run_short(pages=1)
    assert (len(server.naive.blocks), server.depths(tokens)) == (3, [3])


@pytest.mark.parametrize("org", ORGS)
def test_b51_evicted_tokens_are_counted_by_sglangs_metric(serve: Serve, org: str) -> None:
    server = serve(org)
    counted: list[int] = []
    server.cache.tree.metrics_collector = SimpleNamespace(
        observe_eviction_duration=lambda seconds: None, increment_eviction_num_tokens=counted.append
    )
    server.serve(prompt(3))
    server.run_short(slots=1)
    server.run_dry(slots=False)
    assert sum(counted) == 48


@pytest.mark.parametrize("org", ORGS)
def test_a_state_that_returns_under_a_lock_is_referenced(serve: Serve, org: str) -> None:
    """The lock was taken on a tombstone; the state that is published there is protected until it is released."""
    server = serve(org, placement="all")
    tokens = prompt(3)
    server.serve(tokens, chunk=PAGE_TOKENS)
    inner: Prefix = (None, tokens[: 2 * PAGE_TOKENS])
    node = server.cache.tree.checkpoints.node_of[server.naive.states[inner]]
    server.evict_state(inner)
    server.pins.append((server.cache.tree.lock(node.id), inner))
    server.naive.locks[inner] += 1
    assert server.serve(tokens[:33]) == 16
    server.check()
    server.run_dry(slots=True)
    assert server.probe(tokens).depth == 32
    server.unpin()
    server.check()
    server.run_dry(slots=True)
    assert server.depths(tokens) == []


@pytest.mark.parametrize("org", SHARED)
def test_b3_states_get_the_pages_that_attention_holds(serve: Serve, org: str) -> None:
    """All pages hold attention of past requests. Eight short requests run at once."""
    server = serve(org, pages=80)
    pages = server.cache.memory.pages
    for seed in range(8):
        server.serve(prompt(10, seed=seed))
    assert pages.count(PageKind.ATTENTION) >= 50
    assert server.cache.slots.available_size() < 16
    server.victims.clear()
    flights = server.admit(*[(None, prompt(1, seed=10 + number)) for number in range(8)], new_tokens=8)
    assert len(flights) == 8
    assert server.extend(*flights)
    server.check()
    assert server.victims[Kind.ATTENTION] > 0


@pytest.mark.parametrize("org", SHARED)
def test_b2_attention_gets_the_pages_that_states_hold(serve: Serve, org: str) -> None:
    server = serve(org, placement="all", pages=40)
    server.serve(prompt(9), chunk=PAGE_TOKENS)
    states = len(server.naive.states)
    assert server.serve(prompt(24, seed=1), chunk=PAGE_TOKENS) == 0
    assert server.victims[Kind.CHECKPOINT] + server.victims[Kind.SLAB] > 0
    assert len(server.depths(prompt(9))) < states


@pytest.mark.parametrize("org", ORGS)
def test_b2_a_boundary_without_room_for_another_slot_is_not_published(
    serve: Serve, org: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No slot is to be had for one chunk. The request goes on with the slot it has, and publishes the next time."""
    server = serve(org, placement="all", pages=30, checkpoints=6)
    (flight,) = server.admit((None, prompt(4)))
    assert server.extend(flight, end=PAGE_TOKENS)
    server.probe(prompt(4), pin=True)
    with monkeypatch.context() as patch:
        patch.setattr(server.cache.slots, "take", lambda: None)
        assert server.extend(flight, end=2 * PAGE_TOKENS)
    assert server.cache.memory.store.counts.skipped == 1
    server.unpin()
    server.check()
    assert server.depths(prompt(4)) == [1]
    assert server.extend(flight)
    server.finish(flight)
    assert server.depths(prompt(4)) == [1, 3, 4]


@pytest.mark.parametrize("org", ORGS)
def test_b1_requests_that_find_no_state_wait(serve: Serve, org: str) -> None:
    """Beside a locked state there is room for two requests. Of six at once two run, the others when these are done."""
    pages = {"s0": 16, "s1": 22, "s2": 22, "d0": 40}[org]
    server = serve(org, pages=pages, checkpoints=3)
    server.serve(prompt(1, seed=9))
    server.probe(prompt(1, seed=9), pin=True)
    waiting: list[Prefix] = [(None, prompt(2, seed=seed)) for seed in range(6)]
    rounds = []
    while waiting:
        flights = server.admit(*waiting, new_tokens=8)
        rounds.append(len(flights))
        assert server.extend(*flights)
        server.check()
        for flight in flights:
            waiting.remove((None, flight.running.tokens))
            server.finish(flight)
    assert rounds == [2, 2, 2]
    server.unpin()
