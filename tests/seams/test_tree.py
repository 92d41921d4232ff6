"""The prefix cache of every organization: what it publishes, finds and protects.

`ShadowedServer` compares each call with the naive tree; `check` verifies every ledger, byte and recency. Faults of the
kind `bNN` are named by their number.
"""

from __future__ import annotations

import pytest
import torch

from sgl_hybrid.memory import ORGANIZATIONS
from tests.seams.request_flow import TinyServer, prompt
from tests.seams.shadow import Serve, ShadowedServer
from tests.seams.tree_fixture import start, tiny_plan
from tests.tiny_layouts import PAGE_TOKENS

ORGS = sorted(ORGANIZATIONS)
pytestmark = pytest.mark.usefixtures("published")


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
    assert server.depths(prompt(3)) == [3]
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
    assert server.depths(flight.running.tokens) == [2, 4, 6, 8]
    server.finish(flight)
    assert server.depths(flight.running.tokens) == [2, 4, 6, 8]
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
    assert server.depths(flight.running.tokens) == [1, 2, 3, 4, 5]
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
            patch.setattr(server.cache.slots, "take", lambda: None)
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
    assert server.depths(twins[0].running.tokens) == [3, 4]


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
    assert server.depths(prompt(5)) == list(range(1, chunks + 1))[:5]
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
