"""What is reported of each organization: units by kind, hits, evictions, waiting requests, bytes moved."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from sgl_hybrid.errors import InvariantError
from sgl_hybrid.memory import ORGANIZATIONS
from sgl_hybrid.memory.dual_pool import Pool
from sgl_hybrid.seams import admission, allocators, process, status, strict
from tests.seams.request_flow import prompt
from tests.seams.shadow import ShadowedServer
from tests.seams.tree_fixture import tiny_plan
from tests.tiny_layouts import PAGE_TOKENS

ORGS = sorted(ORGANIZATIONS)
PAGES, CHECKPOINTS = 48, 12
pytestmark = pytest.mark.usefixtures("published")


def serve(org: str, **options: Any) -> ShadowedServer:
    return ShadowedServer(tiny_plan(org, **{"pages": PAGES, "checkpoints": CHECKPOINTS, **options}))


def report(server: ShadowedServer) -> dict[str, Any]:
    return status.report(SimpleNamespace(tree_cache=server.cache.tree, max_running_requests=8))


@pytest.mark.parametrize("org", ORGS)
def test_pages_by_kind_are_those_of_what_is_held(org: str) -> None:
    """Two cached prompts of two blocks, a state each, and a running request of one block that has published it."""
    server = serve(org)
    for seed in (1, 2):
        server.serve(prompt(2, seed=seed))
    (running,) = server.admit((None, prompt(1, seed=3)))
    assert server.extend(running)
    attention = 2 * 2 + 2
    store = server.cache.memory.store
    states = store.num_active + len(server.naive.states)
    assert len(server.naive.states) == 3
    slabs = 0 if store.slabs is None else -(-states // store.slabs.slots_per_slab)
    expected = {
        "s0": {"shared": {"attention": attention, "member": states, "conv": 0, "slab": 0}},
        "s1": {"shared": {"attention": attention, "member": 2 * states, "conv": states, "slab": 0}},
        "s2": {"shared": {"attention": attention, "member": 2 * states, "conv": 0, "slab": slabs}},
        "d0": {"attention": {"attention": attention}, "recurrent": {"member": states}},
    }[org]
    found = report(server)["pages"]
    for pool, kinds in expected.items():
        total = CHECKPOINTS if pool == "recurrent" else PAGES
        assert found[pool] == {**kinds, "free": total - sum(kinds.values())}
    assert sum(sum(kinds.values()) for kinds in found.values()) == sum(
        pool["total"] for pool in report(server)["pools"].values()
    )


@pytest.mark.parametrize("org", ORGS)
def test_b51_hits_and_hits_lost_to_a_missing_checkpoint_are_told_apart(org: str) -> None:
    server = serve(org)
    reuse = process.served().activity.reuse
    server.serve(prompt(4))
    assert (reuse.joint_hits, reuse.missing_checkpoint_hits) == (0, 0)
    assert server.serve(prompt(4)) == 4 * PAGE_TOKENS
    assert (reuse.joint_hits, reuse.joint_tokens) == (1, 4 * PAGE_TOKENS)
    assert reuse.missing_checkpoint_hits == 0
    # Two of its blocks are a prefix without a state of its own: the whole hit is lost.
    assert server.serve(prompt(2, rest=0) + prompt(1, seed=9)) == 0
    assert (reuse.missing_checkpoint_hits, reuse.missing_checkpoint_tokens) == (1, 2 * PAGE_TOKENS)
    assert reuse.joint_hits == 1


@pytest.mark.parametrize("org", ORGS)
def test_b45_a_hit_is_shorter_by_an_evicted_checkpoint(org: str) -> None:
    """States at each block; that of the third is evicted, its attention stays."""
    server = serve(org, placement="all")
    reuse = process.served().activity.reuse
    server.serve(prompt(4), chunk=PAGE_TOKENS)
    server.evict_state((None, prompt(3, rest=0)))
    server.probe(prompt(3, rest=0))
    assert (reuse.joint_hits, reuse.missing_checkpoint_hits) == (0, 0), "a probe admits nothing"
    assert server.serve(prompt(3, rest=0) + prompt(1, seed=9)) == 2 * PAGE_TOKENS
    assert (reuse.joint_hits, reuse.joint_tokens) == (1, 2 * PAGE_TOKENS)
    assert (reuse.missing_checkpoint_hits, reuse.missing_checkpoint_tokens) == (1, PAGE_TOKENS)


@pytest.mark.parametrize("org", ORGS)
@pytest.mark.parametrize("slots", [False, True])
def test_evictions_are_counted_in_every_organization(org: str, slots: bool) -> None:
    """A chain of prompts, each with a state, and a shortage that takes everything."""
    server = serve(org)
    for blocks in (1, 2, 3):
        server.serve(prompt(blocks))
    pages, states = len(server.naive.blocks), len(server.naive.states)
    server.run_dry(slots=slots)
    found = report(server)
    gone = {"attention_pages": pages - len(server.naive.blocks), "checkpoints": states - len(server.naive.states)}
    assert found["evicted"] == gone
    assert gone["checkpoints"] == 3
    assert sum(found["evictions"].values()) > 0
    if org == "d0":
        assert found["evictions"] == {"attention": 0 if slots else 3, "checkpoint": 3 if slots else 0, "slab": 0}
    else:
        assert found["evictions"] == {kind.value: count for kind, count in server.victims.items()} | {
            name: 0 for name in found["evictions"] if name not in {kind.value for kind in server.victims}
        }


@pytest.mark.parametrize("org", ORGS)
def test_a_request_that_waits_is_deferred_once(org: str) -> None:
    """Three rounds turn it down while others hold all pages; the fourth admits it."""
    server = serve(org)
    requests, tokens = process.served().activity.requests, server.cache.tokens
    pages = tokens.alloc(tokens.available_size())
    waiting = Req("waiting", "", array("q", prompt(3)), SamplingParams(max_new_tokens=8))

    def admitted() -> bool:
        adder = server.server._adder()
        waiting.init_next_round_input(server.cache.tree)
        adder.add_one_req(waiting, has_chunked_req=False, truncation_align_size=None)
        return adder.can_run_list == [waiting]

    assert [admitted() for _ in range(3)] == [False] * 3
    assert requests.deferred == 1
    tokens.free(pages)
    assert admitted()
    assert requests.deferred == 1


def test_requests_taken_back_and_given_up_are_counted() -> None:
    serve("s2")
    requests = process.served().activity.requests
    batch = SimpleNamespace(tree_cache=None)  # as of a server without a prefix cache
    admission.count_retractions((["a", "b"], 0.5, ["c"]), batch)
    admission.count_retractions(([], 0.5, []), batch)
    assert (requests.retracted, requests.aborted) == (2, 1)


@pytest.mark.parametrize("org", ORGS)
def test_adopting_crossing_and_publishing_move_no_byte(org: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planes before and after each act of the scheduler differ by what the model wrote between, which is nothing
    here: `Contents` writes only in `extend` and `decode`."""
    monkeypatch.setattr(allocators, "POISON_FREED", False)
    server = serve(org, grid_blocks=2 if org == "d0" else 1)
    server.serve(prompt(4))
    pool = server.cache.memory.pool
    contents = server.cache.contents
    monkeypatch.setattr(contents, "write_state", lambda slot, number: None)
    monkeypatch.setattr(contents, "write_tokens", lambda ids, numbers: None)
    monkeypatch.setattr(server.server, "_read", lambda running, length: None)
    before = pool.attention_planes.clone(), pool.recurrent_planes.clone()
    (flight,) = server.admit((None, prompt(4)), new_tokens=40)
    assert flight.running.req.prefix_len == 4 * PAGE_TOKENS
    server.server.extend(flight.running)
    server.server.publish(flight.running)
    for token in range(2 * PAGE_TOKENS):
        assert server.server.decode(flight.running, token)
    server.server.finish(flight.running)
    assert torch.equal(before[0], pool.attention_planes)
    assert torch.equal(before[1], pool.recurrent_planes)
    copied = server.cache.memory.copied
    assert (copied.prefill_gather, copied.prefill_scatter, copied.slab_migration) == (0, 0, 0)


@pytest.mark.parametrize("org", ORGS)
def test_a_decode_step_is_checked_with_what_it_needs(org: str) -> None:
    """Two of three requests open a page. With all pages held elsewhere the check fails and is a preemption."""
    server = serve(org)
    tokens, counts = server.cache.tokens, process.served().ledger.counts[Pool.ATTENTION]
    asked: list[list[int] | None] = []

    def needed(selected: list[int] | None) -> int:
        asked.append(selected)
        return 2 * PAGE_TOKENS

    batch = SimpleNamespace(
        reqs=["a", "b", "c"],
        new_tokens_required_next_decode=needed,
        token_to_kv_pool_allocator=tokens,
        tree_cache=server.cache.tree,
        spec_algorithm=None,
    )
    granted = counts.granted
    assert admission.check_decode(batch)
    assert (counts.granted, counts.preempted) == (granted + 1, 0)
    pages = tokens.alloc(tokens.available_size())
    assert not admission.check_decode(batch, [0, 2])
    assert (counts.exhausted, counts.preempted) == (1, 1)
    assert asked == [None, [0, 2]]
    tokens.free(pages)


@pytest.mark.parametrize("org", ORGS)
def test_strict_mode_verifies_every_ledger_and_counts_the_steps(org: str) -> None:
    """A state slot that is lost to the ledger of checkpoints, or a page to that of pages, ends the scheduler."""
    server = serve(org)
    server.serve(prompt(2))
    strict.check_ledgers(None, None)
    assert report(server)["ledger_checks"] == 1
    memory = server.cache.memory
    for ids in (memory.pages._free, memory.store._free):
        lost = ids.pop()
        with pytest.raises(InvariantError):
            strict.check_ledgers(None, None)
        ids.append(lost)
    assert report(server)["ledger_checks"] == 1
