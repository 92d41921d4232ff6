"""The prefix cache of every organization: what it names, protects and evicts. Faults of the kind `bNN` by their number.

`ShadowedServer` compares each call with the naive tree; `check` verifies every ledger, byte and recency.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from radix.eviction import Kind
from sgl_hybrid.memory import ORGANIZATIONS
from sgl_hybrid.memory.pages import PageKind
from tests.oracles.tree import Prefix
from tests.seams.request_flow import TinyServer, prompt
from tests.seams.shadow import ShadowedServer
from tests.seams.tree_fixture import published_arguments, start, tiny_plan
from tests.tiny_layouts import PAGE_TOKENS

ORGS = sorted(ORGANIZATIONS)
SHARED = [org for org in ORGS if ORGANIZATIONS[org].shared]
Serve = Callable[..., ShadowedServer]


@pytest.fixture(scope="module", autouse=True)
def _arguments() -> Iterator[None]:
    with published_arguments():
        yield


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start servers, and check each at the end."""
    started = []

    def start(org: str, *, pages: int = 48, checkpoints: int = 12, **options: object) -> ShadowedServer:
        started.append(ShadowedServer(tiny_plan(org, pages=pages, checkpoints=checkpoints, **options)))
        return started[-1]

    yield start
    for server in started:
        server.check()


def depths(server: ShadowedServer, tokens: tuple[int, ...]) -> list[int]:
    """Return the lengths, in blocks, of the prefixes of `tokens` whose state is cached."""
    return sorted(len(prefix) // PAGE_TOKENS for _, prefix in server.naive.states if tokens[: len(prefix)] == prefix)


@pytest.mark.parametrize("org", ORGS)
def test_b22_a_prompt_of_whole_blocks_is_found_but_for_its_last_block(serve: Serve, org: str) -> None:
    """SGLang computes the last token anew, so the state that is kept is the one before the last block."""
    server = serve(org)
    assert [server.serve(prompt(4, rest=0)) for _ in range(3)] == [0, 48, 48]
    assert [server.serve(prompt(4)) for _ in range(2)] == [48, 64]


@pytest.mark.parametrize("org", ORGS)
def test_a_prefix_shared_by_two_prompts_is_found_by_the_third(serve: Serve, org: str) -> None:
    server = serve(org)
    found = [server.serve(prompt(3, rest=0) + prompt(2, seed=seed)) for seed in (1, 2, 3)]
    assert found == [0, 0, 48]


@pytest.mark.parametrize("org", ORGS)
def test_b52_salts_are_apart(serve: Serve, org: str) -> None:
    server = serve(org)
    for salt in ("a", "b", None):
        assert server.serve(prompt(3), salt=salt) == 0
    for salt in ("a", "b", None):
        assert server.serve(prompt(3), salt=salt) == 48
    assert server.probe(prompt(3), "c") == (0, 0, None)


@pytest.mark.parametrize("org", ORGS)
def test_a_running_request_references_what_it_continues_from(serve: Serve, org: str) -> None:
    """One reference however many requests, until each has run the step that reads it; cached then and found again."""
    server = serve(org)
    server.serve(prompt(3))
    store = server.cache.memory.store
    first, second = server.admit((None, prompt(3)), (None, prompt(3, rest=5)))
    assert (store.num_referenced, store.num_cached) == (1, 0)
    server.run_dry(slots=True)
    server.run_dry(slots=False)
    assert depths(server, prompt(3)) == [3]
    server.abort(first)
    assert (store.num_referenced, store.num_cached) == (1, 0)
    assert server.extend(second)
    assert (store.num_active, store.num_referenced, store.num_cached) == (1, 0, 1)
    server.finish(second)
    assert (store.num_active, store.num_cached) == (0, 1)
    assert server.probe(prompt(3)).depth == 48


@pytest.mark.parametrize("org", ORGS)
def test_adopting_a_checkpoint_copies_no_state(serve: Serve, org: str) -> None:
    """The slot of the request has the cached one as its source until its first step has run; its bytes are old."""
    server = serve(org)
    server.serve(prompt(3))
    (cached,) = server.naive.states.values()
    server.admit((None, prompt(3)))
    (own,) = server.cache.slots.alloc(1).tolist()
    server.cache.contents.write_state(own, 7)
    states = server.cache.requests.mamba_pool
    states.copy_from(torch.tensor([cached]), torch.tensor([own]))
    assert int(states.source[own]) == cached
    assert server.cache.contents.wrong_states({own: 7}) == []
    states.clear_slots(torch.tensor([own]))
    assert int(states.source[own]) == own
    server.cache.slots.free(torch.tensor([own]))


@pytest.mark.parametrize("org", ORGS)
def test_twins_of_one_batch_leave_one_copy(serve: Serve, org: str) -> None:
    """Both compute and publish the same prefix. The tree keeps the first one's pages, and both go on from there."""
    server = serve(org)
    twins = server.admit((None, prompt(3)), (None, prompt(3)))
    assert server.extend(*twins)
    assert server.pages_of(twins[0], 48) == server.pages_of(twins[1], 48)
    for twin in twins:
        assert server.decode(twin, 5)
        server.finish(twin)
    assert (len(server.naive.blocks), len(server.naive.states)) == (3, 1)


@pytest.mark.parametrize("org", ORGS)
def test_b9_published_depth_is_what_was_consumed(serve: Serve, org: str) -> None:
    """Chunks that end off a grid of two blocks; decoding across boundaries. The bytes say of which depth a state is."""
    server = ShadowedServer(tiny_plan(org, pages=60, checkpoints=12, grid_blocks=2, placement="all"))
    (flight,) = server.admit((None, prompt(7, rest=3)), new_tokens=48)
    for end in (16, 48, 80, 115):
        assert server.extend(flight, end=end)
    for token in range(40):
        assert server.decode(flight, token)
    assert depths(server, flight.running.tokens) == [2, 4, 6, 8]
    server.finish(flight)
    assert depths(server, flight.running.tokens) == [2, 4, 6, 8]
    server.check()


@pytest.mark.parametrize("org", ORGS)
def test_a_running_request_holds_one_slot_between_steps(serve: Serve, org: str) -> None:
    """Prefill and decode over boundaries; what they cross is found by another request while the first one runs."""
    server = serve(org, placement="all")
    (flight,) = server.admit((None, prompt(3)), new_tokens=48)
    for end in (16, 40, 49):
        assert server.extend(flight, end=end)
        assert len(flight.running.slots) == 1
    for token in range(40):
        assert server.decode(flight, token)
        assert len(flight.running.slots) == 1
    assert depths(server, flight.running.tokens) == [1, 2, 3, 4, 5]
    assert server.probe(flight.running.tokens).depth == 80
    assert server.cache.memory.store.num_active == 1


@pytest.mark.parametrize("org", ORGS)
@pytest.mark.parametrize("room", [True, False])
def test_b9_a_result_that_comes_late_publishes_what_its_step_tracked(
    org: str, room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first decode step crosses a boundary before the prefill's own boundary is published. Both are found then, or
    the second is left out if there is no slot for it; the next requests read what they expect."""
    server = TinyServer(start(tiny_plan(org, pages=48, checkpoints=4)))
    (first,) = server.admit((None, prompt(3, rest=15)))
    assert server.extend(first)
    with monkeypatch.context() as patch:
        if not room:
            patch.setattr(server.cache.slots, "alloc", lambda need_size: None)
        assert server.decode(first, 0, late_result=True)
    assert server.decode(first, 1)
    assert server.decode(first, 2)
    server.finish(first)
    found = [server.match(first.tokens[:length]).device_prefix_len for length in (63, 66)]
    assert found == [48, 64 if room else 48]
    (second,) = server.admit((None, first.tokens[:66]))
    assert server.extend(second)
    server.cache.memory.check()


@pytest.mark.parametrize("org", ORGS)
def test_twins_that_decode_the_same_go_on_from_their_own_states(serve: Serve, org: str) -> None:
    """The tree has the second one's boundary from the first: the second keeps its slot until it has read it."""
    server = serve(org)
    twins = server.admit((None, prompt(3)), (None, prompt(3)), new_tokens=48)
    assert server.extend(*twins)
    for token in range(20):
        for twin in twins:
            assert server.decode(twin, token)
        server.check()
    assert [len(twin.running.slots) for twin in twins] == [1, 1]
    assert depths(server, twins[0].running.tokens) == [3, 4]


@pytest.mark.parametrize("org", ORGS)
@pytest.mark.parametrize("chunks", range(6))
def test_b34_an_aborted_request_leaves_what_it_published(serve: Serve, org: str, chunks: int) -> None:
    """Aborted before its first chunk, or after any: no page or slot is held, and nothing new is found."""
    server = serve(org, placement="all")
    (flight,) = server.admit((None, prompt(5)))
    for chunk in range(chunks):
        assert server.extend(flight, end=(chunk + 1) * PAGE_TOKENS)
    server.abort(flight)
    server.check()
    assert depths(server, prompt(5)) == list(range(1, chunks + 1))[:5]
    assert server.cache.memory.store.num_active == 0


@pytest.mark.parametrize("org", ORGS)
def test_b56_after_a_flush_nothing_is_found_then_all(serve: Serve, org: str) -> None:
    server = serve(org)
    server.serve(prompt(3))
    server.flush()
    server.check()
    assert server.cache.tree.checkpoints.node_of == {}
    assert [server.serve(prompt(3)) for _ in range(2)] == [0, 48]


@pytest.mark.parametrize("org", ORGS)
def test_b25_slots_used_over_and_over_carry_nothing_over(serve: Serve, org: str) -> None:
    """A hundred requests over the same few slots; each step reads its state back, and decoding crosses boundaries."""
    server = serve(org, pages=40, checkpoints=5)
    for number in range(100):
        (flight,) = server.admit((None, prompt(number % 4, rest=3, seed=number % 7)))
        assert server.extend(flight)
        for token in range(number % 20):
            assert server.decode(flight, token)
        (server.abort if number % 3 == 0 else server.finish)(flight)
    states = server.cache.requests.mamba_pool
    (flight,) = server.admit((None, prompt(1, seed=9)))
    assert server.extend(flight)
    own = int(flight.running.req.kv.mamba_pool_idx)
    assert int(states.source[own]) == own


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
        assert depths(server, tokens) == locked
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
    assert depths(server, tokens) == [1, 3]
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
        before = [seed for seed in range(4) if depths(server, prompts[seed])]
        server.run_short(**{"slots" if slots else "pages": 1})
        order += [seed for seed in before if not depths(server, prompts[seed])]
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
        sizes.append((len(depths(server, old)), server.probe(old).attention // PAGE_TOKENS, len(depths(server, new))))
        server.check()
    assert sizes[-1] == (0, 0, 0)
    assert sizes == sorted(sizes, key=lambda size: (size[2], size[1], size[0]), reverse=True)
    assert server.victims[Kind.CHECKPOINT] + server.victims[Kind.SLAB] >= 2


def test_each_pool_of_d0_evicts_its_own_kind(serve: Serve) -> None:
    server = serve("d0", placement="all")
    tokens = prompt(4)
    server.serve(tokens, chunk=PAGE_TOKENS)
    server.run_short(slots=2)
    assert (len(server.naive.blocks), depths(server, tokens)) == (4, [3, 4])
    server.run_short(pages=1)
    assert (len(server.naive.blocks), depths(server, tokens)) == (3, [3])


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
    assert depths(server, tokens) == []


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
    assert len(depths(server, prompt(9))) < states


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
        patch.setattr(server.cache.slots, "alloc", lambda need_size: None)
        assert server.extend(flight, end=2 * PAGE_TOKENS)
    assert server.cache.memory.store.counts.skipped == 1
    server.unpin()
    server.check()
    assert depths(server, prompt(4)) == [1]
    assert server.extend(flight)
    server.finish(flight)
    assert depths(server, prompt(4)) == [1, 3, 4]


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
