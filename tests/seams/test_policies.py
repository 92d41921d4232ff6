"""Each policy on a small cache: what it admits, keeps and frees, and the counter that says so."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import pytest
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.sampling.sampling_params import SamplingParams

from radix.headroom import headroom_blocks
from sgl_hybrid.memory import ORGANIZATIONS
from sgl_hybrid.memory.dual_pool import Pool
from sgl_hybrid.seams import process
from sgl_hybrid.seams.admission import check_decode, count_retractions
from sgl_hybrid.seams.isolation import separate_adapter
from sgl_hybrid.seams.protection import note_arrival
from tests.seams.policy_flow import PolicyServer
from tests.seams.request_flow import prompt
from tests.tiny_layouts import PAGE_TOKENS

ORGS = sorted(ORGANIZATIONS)
pytestmark = pytest.mark.usefixtures("published")


# Headroom


@pytest.mark.parametrize("org", ORGS)
def test_headroom_lets_a_second_request_wait_until_the_first_has_ended(org: str) -> None:
    for fraction, admitted in ((None, True), (0.0, True), (0.6, False)):
        server = PolicyServer(org, pages=60, checkpoints=12, admission_headroom=fraction)
        first = server.begin(prompt(12, seed=1))
        assert first is not None
        assert (server.begin(prompt(12, seed=2)) is not None) is admitted
        assert server.policies.rounds.held_back is not admitted
        if not admitted:
            server.finish(first)
            assert server.begin(prompt(12, seed=2)) is not None


@pytest.mark.parametrize("org", ORGS)
def test_headroom_never_blocks_a_request_when_nothing_runs(org: str) -> None:
    server = PolicyServer(org, pages=60, checkpoints=12, admission_headroom=0.99)
    assert server.begin(prompt(20)) is not None
    assert not server.policies.rounds.held_back


@pytest.mark.parametrize("org", ORGS)
def test_what_is_cached_and_reclaimable_counts_as_headroom(org: str) -> None:
    server = PolicyServer(org, pages=120, checkpoints=20, admission_headroom=0.3)
    server.pressure(24)
    free = server.memory.store.num_free_ids if org == "d0" else server.memory.pages.num_free
    assert free < headroom_blocks(0.3, 20 if org == "d0" else 120)
    assert server.begin(prompt(4, seed=1)) is not None
    assert server.begin(prompt(4, seed=2)) is not None


def test_each_pool_of_a_dual_organization_has_its_own_headroom() -> None:
    """Attention has room for all; of ten states a fraction of 0.6 keeps six."""
    server = PolicyServer("d0", pages=400, checkpoints=10, admission_headroom=0.6)
    admitted = 0
    while server.begin(prompt(2, seed=admitted + 1)) is not None:
        admitted += 1
    assert admitted > 0
    assert server.policies.rounds.held_back
    assert server.memory.store.num_free_ids + server.memory.store.num_cached >= 6


def test_an_automatic_fraction_rises_with_retractions_and_falls_while_requests_wait() -> None:
    server = PolicyServer("s2", pages=60, checkpoints=0, admission_headroom="auto")
    before = server.policies.headroom.fraction
    req = server.retract(server.begin(prompt(12, seed=1)))
    assert server.policies.headroom.fraction == before  # a pause or a higher priority takes requests back too
    count_retractions(([req], 0.5, []), SimpleNamespace(tree_cache=server.cache.tree))
    raised = server.policies.headroom.fraction
    assert raised > before
    server.policies.headroom.deferred()
    assert server.policies.headroom.fraction < raised


# Lifetime


def chunks(server: PolicyServer, tokens: tuple[int, ...], *ends: int):
    """Prefill a request in chunks up to each end; it goes on running."""
    (running,) = server.admit((None, tokens), new_tokens=24)
    for end in (*ends, len(tokens)):
        assert server.extend(running, end=end)
        server.publish(running)
    return running


@pytest.mark.parametrize("org", ORGS)
def test_transient_frees_the_earlier_boundary_when_the_producer_passes_the_next(org: str) -> None:
    tokens = prompt(6)
    found = {}
    for lifetime in ("transient", "cached"):
        policies = {"checkpoint_lifetime": lifetime, "checkpoint_placement": "all"}
        server = PolicyServer(org, pages=80, checkpoints=16, grid_blocks=2, **policies)
        running = chunks(server, tokens, 2 * PAGE_TOKENS, 4 * PAGE_TOKENS)
        found[lifetime] = [server.depth(tokens[:length]) // PAGE_TOKENS for length in (48, 80, 97)]
        server.finish(running)
        assert server.depth(tokens) == 6 * PAGE_TOKENS
        server.memory.check()
        assert server.policies.counts.released == (2 if lifetime == "transient" else 0)
    assert found == {"transient": [0, 0, 6], "cached": [2, 4, 6]}


def test_transient_leaves_a_boundary_to_the_request_that_reads_it() -> None:
    policies = {"checkpoint_lifetime": "transient", "checkpoint_placement": "all"}
    server = PolicyServer("s2", pages=80, checkpoints=0, grid_blocks=2, **policies)
    tokens = prompt(4)
    (running,) = server.admit((None, tokens))
    assert server.extend(running, end=2 * PAGE_TOKENS)
    server.publish(running)
    (reader,) = server.admit((None, (*tokens[: 2 * PAGE_TOKENS], 7, 8, 9)))
    assert reader.req.prefix_len == 2 * PAGE_TOKENS
    assert server.extend(running)
    server.publish(running)
    assert server.policies.counts.release_skipped == 1
    assert server.extend(reader)


@pytest.mark.parametrize("org", ORGS)
def test_retained_keeps_what_two_requests_want_while_the_producer_runs(org: str) -> None:
    context = prompt(4, rest=0)
    kept = {}
    for lifetime in ("cached", "retained"):
        policies = {"checkpoint_lifetime": lifetime, "protection_budget": 0.5, "checkpoint_placement": "all"}
        server = PolicyServer(org, pages=60, checkpoints=8, grid_blocks=4, **policies)
        running = chunks(server, (*context, *range(90_000, 90_040)), 4 * PAGE_TOKENS)
        waits = Req("waits", "", array("q", (*context, 1, 2, 3)), SamplingParams(max_new_tokens=4))
        server.protection.arrived(waits)
        server.pressure(16)
        kept[lifetime] = server.depth((*context, 1, 2, 3))
        assert server.protection.num_retained == (lifetime == "retained")
        server.finish(running)
        assert server.protection.num_retained == 0
        assert server.policies.budget.used == (0,) * len(server.policies.budget.used)
        counts = server.policies.counts
        assert (counts.eligible_boundaries, counts.retained) == ((1, 1) if lifetime == "retained" else (0, 0))
        server.pressure(16)
        assert server.depth((*context, 1, 2, 3)) == 0
        server.memory.check()
    assert kept == {"cached": 0, "retained": 4 * PAGE_TOKENS}
    assert server.policies.counts.evictions_skipped > 0 or org == "d0"


# Pins


@pytest.mark.parametrize("org", ORGS)
def test_a_pinned_boundary_outlives_pressure_and_is_resumed_from(org: str) -> None:
    tokens = prompt(5)
    depths = {}
    for pin_k in (None, 1):
        server = PolicyServer(org, pages=60, checkpoints=8, preempt_pin_k=pin_k, protection_budget=0.5)
        req = server.retract(server.begin(tokens))
        server.pressure(16)
        running = server.resume(req)
        depths[pin_k] = server.matched[req.rid]
        assert server.policies.pins.held == {}
        assert server.policies.counts.resumed_at_pin == (pin_k is not None)
        server.finish(running)
        server.memory.check()
    assert depths == {None: 0, 1: 5 * PAGE_TOKENS}


def test_references_are_taken_before_the_pin_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    server = PolicyServer("s2", pages=60, checkpoints=0, preempt_pin_k=1)
    req = server.retract(server.begin(prompt(5)))
    store = server.memory.store
    pinned = [v for v in range(1, store.num_virtual + 1) if store.references_of(v)]
    assert len(pinned) == 1
    left = []
    release = store.release

    def released(v: int) -> None:
        release(v)
        left.append((v, store.references_of(v)))

    monkeypatch.setattr(store, "release", released)
    running = server.resume(req)
    assert server.matched[req.rid] == 5 * PAGE_TOKENS
    assert server.policies.pins.held == {}
    assert left == []  # its lock came before the pin went, so the last reference never did
    server.finish(running)
    assert (pinned[0], 0) in left


@pytest.mark.parametrize(("pin_k", "expected"), [(1, 5), (2, 3), (3, None)])
def test_a_pin_needs_distinct_users_and_repeats_do_not_count(pin_k: int, expected: int | None) -> None:
    """The context's boundary was published by one request and used by another, which came back and is no third."""
    server = PolicyServer("s2", pages=120, checkpoints=0, preempt_pin_k=pin_k)
    context = prompt(3, rest=0)
    server.serve((*context, 1))
    running = server.begin((*context, *range(9000, 9000 + 2 * PAGE_TOKENS), 5))
    assert server.matched[running.req.rid] == 3 * PAGE_TOKENS
    req = server.retract(running)
    again = server.resume(req)
    server.publish(again)
    server.retract(again)
    pin = server.policies.pins.held.get(req.rid)
    assert (pin and pin.depth // PAGE_TOKENS) == expected
    assert server.policies.pins.counts.tested == 2


@pytest.mark.parametrize("org", ORGS)
def test_pins_yield_to_a_request_that_fits_when_nothing_runs(org: str) -> None:
    server = PolicyServer(org, pages=44, checkpoints=5, preempt_pin_k=1, protection_budget=1.0)
    reqs = [server.retract(server.begin(prompt(8, seed=seed))) for seed in (1, 2, 3)]
    assert len(server.policies.pins.held) >= 2
    assert server.begin(prompt(24, seed=9), new_tokens=2) is not None
    assert server.policies.counts.yielded == 1
    assert server.policies.pins.held == {}
    server.finish(server.running[0])
    assert [server.resume(req) is not None for req in reqs[:1]] == [True]


@pytest.mark.parametrize("org", ORGS)
def test_protection_stays_while_sglang_evicts_more_than_it_needs(org: str) -> None:
    """Before each decode step SGLang evicts for a page of every row, whether or not one is needed."""
    server = PolicyServer(org, pages=44, checkpoints=6, preempt_pin_k=1, protection_budget=1.0)
    req = server.retract(server.begin(prompt(8, seed=1)))
    server.cache.tree.evict_for_alloc(EvictParams(num_tokens=44 * PAGE_TOKENS))
    assert list(server.policies.pins.held) == [req.rid]
    assert server.policies.counts.yielded == 0


@pytest.mark.parametrize("org", ORGS)
def test_an_allocation_that_would_fail_takes_what_is_protected(org: str) -> None:
    server = PolicyServer(org, pages=44, checkpoints=6, preempt_pin_k=1, protection_budget=1.0)
    req = server.retract(server.begin(prompt(8, seed=1)))
    assert server.cache.tokens.alloc(44 * PAGE_TOKENS) is not None
    assert (server.policies.pins.held, server.policies.counts.yielded) == ({}, 1)
    assert req.rid not in server.protection._pinned


@pytest.mark.parametrize("others", [0, 1])
def test_only_the_last_running_request_takes_what_is_protected(others: int) -> None:
    """With another one, SGLang takes that one back instead."""
    server = PolicyServer("s2", pages=44, checkpoints=0, preempt_pin_k=1, protection_budget=1.0)
    server.retract(server.begin(prompt(8, seed=1)))
    free = server.memory.pages.num_free
    batch = SimpleNamespace(
        new_tokens_required_next_decode=lambda selected: (free + 1) * PAGE_TOKENS,
        token_to_kv_pool_allocator=server.cache.tokens,
        tree_cache=server.cache.tree,
        spec_algorithm=None,
        reqs=[None] * (1 + others),
    )
    assert check_decode(batch) is not bool(others)
    assert len(server.policies.pins.held) == others


def test_a_request_that_is_tried_again_after_protection_yields_is_counted_once() -> None:
    server = PolicyServer("s2", pages=44, checkpoints=5, preempt_pin_k=1, protection_budget=1.0)
    for seed in (1, 2, 3):
        server.retract(server.begin(prompt(8, seed=seed)))
    served = process.served()
    before = num_checks()
    assert server.begin(prompt(24, seed=9), new_tokens=2) is not None
    assert server.policies.counts.yielded == 1
    assert (server.policies.work.empty_rounds, served.activity.requests.deferred) == (0, 0)
    assert num_checks() == [count + 1 for count in before]


def num_checks() -> list[int]:
    counts = process.served().ledger.counts
    return [
        sum((counts[pool].granted, counts[pool].granted_with_none_free, counts[pool].short, counts[pool].exhausted))
        for pool in Pool
    ]


def test_a_request_that_the_queue_refuses_wants_nothing() -> None:
    server = PolicyServer("s2", pages=60, checkpoints=0, checkpoint_lifetime="retained")
    tree = server.cache.tree
    for request, queued in (("refused", False), ("queued", True)):
        req = Req(request, "", array("q", prompt(3)), SamplingParams(max_new_tokens=4))
        note_arrival(None, SimpleNamespace(tree_cache=tree, waiting_queue=[req] if queued else []), req)
        assert (req.rid in server.policies._names, len(server.policies.wanted) > 0) == (queued, queued)


def test_a_transient_boundary_that_is_read_is_skipped_once() -> None:
    server = PolicyServer("s2", pages=60, checkpoints=0, checkpoint_lifetime="transient")
    server.begin(prompt(3))
    (read,) = server.cache.tree.checkpoints.node_of
    for _ in range(3):
        server.protection._release(read)
    assert (server.policies.counts.release_skipped, server.policies.counts.released) == (1, 0)


def test_a_waiting_request_that_is_given_up_leaves_no_pin() -> None:
    server = PolicyServer("s2", pages=60, checkpoints=0, preempt_pin_k=1)
    req = server.retract(server.begin(prompt(5)))
    assert server.memory.store.num_referenced == 1
    server.cache.tree.release_aborted_request(req.cache_request_handle)
    assert (server.memory.store.num_referenced, server.policies.pins.held) == (0, {})
    server.flush()
    assert server.memory.pages.num_free == server.memory.pages.num_pages


# Value


@pytest.mark.parametrize("org", ORGS)
def test_value_keeps_the_state_whose_loss_strands_more(org: str) -> None:
    """A long context with one state, used long ago, and a short one, used just now: each costs one checkpoint."""
    left = {}
    for eviction in ("lru", "value"):
        server = PolicyServer(org, pages=400, checkpoints=8, checkpoint_eviction=eviction)
        long, short = prompt(20, seed=1), prompt(2, seed=2)
        server.serve(long)
        server.serve(short)
        while server.depth(long) and server.depth(short):  # the short one is looked up last
            need = {"mamba_num": 1} if org == "d0" else {"num_tokens": 1}
            server.cache.tree.evict_for_alloc(EvictParams(**{"num_tokens": 0, "mamba_num": 0, **need}))
        left[eviction] = "long" if server.depth(long) else "short"
    assert left == {"lru": "short", "value": "long"}


# Isolation


@pytest.mark.parametrize("org", ORGS)
def test_a_salt_blocks_other_requests_and_keeps_the_same_request(org: str) -> None:
    server = PolicyServer(org, pages=80, checkpoints=12)
    tokens = prompt(5)
    first = server.begin(tokens, salt="one")
    second = server.begin(tokens, salt="two")
    assert server.matched[second.req.rid] == 0
    counts = server.policies.counts
    assert (counts.adopted_own, counts.adopted_running, counts.adopted_ended) == (0, 0, 0)
    resumed = server.resume(server.retract(second))
    assert server.matched[resumed.req.rid] == 5 * PAGE_TOKENS
    assert (counts.adopted_own, counts.adopted_running, counts.adopted_ended) == (1, 0, 0)
    shared = [server.begin((*prompt(5, seed=3), number)) for number in (1, 2)]
    assert server.matched[shared[1].req.rid] == 5 * PAGE_TOKENS
    assert counts.adopted_running == 1
    server.finish(first)


def request(extra_key: str | None, lora_id: str | None, salt: str | None = None) -> Req:
    """What the scheduler makes of a request, with the seam applied."""
    req = Req("r", "", array("q", range(20)), SamplingParams(), extra_key=extra_key, lora_id=lora_id, cache_salt=salt)
    separate_adapter(None, req)
    return req


def test_extra_key_adapter_and_salt_do_not_meet_by_concatenation() -> None:
    parts = [("ab", "c", None), ("a", "bc", None), (None, "abc", None), ("abc", None, None), ("ab", None, "c")]
    parts += [("a", None, "bc"), (None, None, "abc"), (None, "a", "bc"), ("a", "b", "c")]
    reqs = [request(*part) for part in parts]
    keys = {RadixKey(req.origin_input_ids, req.extra_key, cache_salt=req.cache_salt).child_key(16) for req in reqs}
    assert len(keys) == len(parts)
    assert request("tenant", None).extra_key == "tenant"
