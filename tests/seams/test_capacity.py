"""A request near the size of the pool, alone: it completes or is refused at once, whatever is cached."""

from __future__ import annotations

from array import array

import msgspec
import pytest
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from sgl_hybrid.errors import SettingError
from sgl_hybrid.memory import ORGANIZATIONS
from sgl_hybrid.seams import exact
from tests.seams.request_flow import TinyServer
from tests.seams.tree_fixture import start, tiny_plan
from tests.tiny_layouts import PAGE_TOKENS

ORGS = sorted(ORGANIZATIONS)
PAGES = 24
MEMORY_OPTIONS = {"token_capacity": 0, "sliding_window_size": None, "chunk_size": None}
pytestmark = pytest.mark.usefixtures("published")


def prompt(length: int, *, seed: int = 0) -> tuple[int, ...]:
    return tuple(range(1000 * seed, 1000 * seed + length))


def serve(server: TinyServer, tokens: tuple[int, ...], new_tokens: int) -> bool:
    """Serve a request alone, to its last token; False if it had to wait, or was taken back."""
    admitted = server.admit((None, tokens), new_tokens=new_tokens)
    if not admitted:
        return False
    (running,) = admitted
    assert server.extend(running)
    server.publish(running)
    for token in range(new_tokens - 1):
        if not server.decode(running, token):
            server.abort(running)
            return False
    server.finish(running)
    return True


@pytest.mark.parametrize("org", ORGS)
@pytest.mark.parametrize("cached_blocks", [0, 1, 3])
def test_b5_near_the_capacity_a_request_completes_or_is_refused(org: str, cached_blocks: int) -> None:
    """Prompts of the last two blocks before the capacity, each asking for as many tokens as it may; part of the prompt
    is cached, and so are other prompts."""
    plan = tiny_plan(org, pages=PAGES, checkpoints=4)
    outcomes = []
    for missing in range(2 * PAGE_TOKENS + 4):
        cache = start(plan)
        server = TinyServer(cache)
        limit = cache.tokens.max_new_tokens_for_memory(1, 1 << 30, **MEMORY_OPTIONS) + 1
        length = limit + 2 - missing
        for seed in (0, 1, 2):
            assert serve(server, prompt(cached_blocks * PAGE_TOKENS + 1, seed=seed), 2)
        room = cache.tokens.max_new_tokens_for_memory(length, 1 << 30, **MEMORY_OPTIONS)
        outcomes.append(room)
        assert room is None or serve(server, prompt(length), room)
        cache.memory.check()
    assert outcomes == [None, None, None, *range(1, len(outcomes) - 2)]


@pytest.mark.parametrize(("is_exact", "expected"), [(True, 2 * PAGE_TOKENS), (False, 3 * PAGE_TOKENS)])
def test_a_prompt_is_cut_at_boundaries_where_states_are_stored_in_fewer_bits(is_exact: bool, expected: int) -> None:
    """A pass has room for three blocks, and the grid is of two: the first chunk and those that go on from it."""
    plan = tiny_plan("s2", pages=PAGES, checkpoints=4, grid_blocks=2)
    settings = msgspec.structs.replace(plan.settings, no_exact_continuation=not is_exact)
    server = TinyServer(start(plan._replace(settings=settings)))
    adder = server._adder(chunk_tokens=3 * PAGE_TOKENS)
    req = Req("a", "", array("q", prompt(6 * PAGE_TOKENS)), SamplingParams(max_new_tokens=4))
    req.init_next_round_input(server.cache.tree)
    adder.add_one_req(req, has_chunked_req=False, truncation_align_size=None)
    assert (adder.can_run_list, req.extend_end) == ([req], expected)
    assert adder.floor_chunked_tokens(3 * PAGE_TOKENS, 6 * PAGE_TOKENS) == expected
    server.cache.tree.unlock(req.lock)


@pytest.mark.parametrize("short_of", ["memory", "share", "decodes"])
def test_a_prompt_that_goes_on_reaches_the_next_place_to_be_cut(short_of: str) -> None:
    """Less is left than from one place to the next: in the pool, of the pass for shorter requests, or by decodes."""
    server = TinyServer(start(tiny_plan("s2", pages=PAGES, checkpoints=4, grid_blocks=2)))
    adder = server._adder(chunk_tokens=PAGE_TOKENS if short_of == "decodes" else 3 * PAGE_TOKENS)
    req = Req("a", "", array("q", prompt(6 * PAGE_TOKENS)), SamplingParams(max_new_tokens=4))
    req.init_next_round_input(server.cache.tree)
    if short_of == "memory":
        adder.memory_budget.total_offset += adder.memory_budget.remaining_total - PAGE_TOKENS
    elif short_of == "share":
        adder.chunked_req_limit = PAGE_TOKENS
    adder.add_chunked_req(req)
    assert req.extend_end == 2 * PAGE_TOKENS


def test_without_a_cache_a_prompt_of_a_known_length_is_cut_where_others_are() -> None:
    """SGLang has a way of its own for it; with less than a cut left in the pass the prompt waits for the next."""
    server = TinyServer(start(tiny_plan("s2", pages=PAGES, checkpoints=4, grid_blocks=2)))
    for left, cut in ((PAGE_TOKENS, None), (3 * PAGE_TOKENS, 2 * PAGE_TOKENS)):
        adder = server._adder(chunk_tokens=3 * PAGE_TOKENS)
        adder.rem_chunk_tokens = left
        req = Req("a", "", array("q", prompt(6 * PAGE_TOKENS)), SamplingParams(max_new_tokens=4, ignore_eos=True))
        req.init_next_round_input(server.cache.tree)
        adder.add_one_req_ignore_eos(req)
        assert [found.extend_end for found in adder.can_run_list] == ([] if cut is None else [cut])


def test_chunks_without_a_place_to_cut_are_refused() -> None:
    start(tiny_plan("s2", pages=PAGES, checkpoints=4, grid_blocks=2))
    for fine in (None, -1, 2 * PAGE_TOKENS):
        exact.check_chunked_prefill_size(fine)
    with pytest.raises(SettingError, match="--chunked-prefill-size: expected at least 32 tokens"):
        exact.check_chunked_prefill_size(2 * PAGE_TOKENS - 1)


@pytest.mark.parametrize("org", ORGS)
def test_b7b_what_is_cached_keeps_no_request_waiting(org: str) -> None:
    """Many cached checkpoints, in many slabs; nothing runs. The largest request is let in."""
    cache = start(tiny_plan(org, pages=90, checkpoints=20))
    server = TinyServer(cache)
    for seed in range(1, 25):
        assert serve(server, prompt(PAGE_TOKENS + 1, seed=seed), 1)
    assert cache.memory.store.num_cached > 15
    room = cache.tokens.max_new_tokens_for_memory(PAGE_TOKENS, 1 << 30, **MEMORY_OPTIONS)
    assert server.admit((None, prompt(PAGE_TOKENS)), new_tokens=room)


def test_b1_the_state_that_a_request_continues_from_is_no_room_for_it() -> None:
    """No state free and one cached, which the request would lock: it waits until another request has ended."""
    server = TinyServer(start(tiny_plan("d0", pages=PAGES, checkpoints=2)))
    assert serve(server, prompt(40), 1)
    (other,) = server.admit((None, prompt(5, seed=1)))
    assert server.extend(other)
    store = server.cache.memory.store
    assert (store.num_active, store.num_cached, store.num_free_ids) == (1, 1, 0)
    assert server.admit((None, prompt(50))) == []
    server.finish(other)
    assert serve(server, prompt(50), 1)


def test_b7b_a_hit_keeps_no_request_waiting_where_there_are_two_states() -> None:
    """D0 with the states that its least budget buys: the next turn locks the checkpoint of the first and takes one."""
    server = TinyServer(start(tiny_plan("d0", pages=PAGES, checkpoints=2)))
    assert serve(server, prompt(40), 12)
    assert server.cache.memory.store.num_cached > 0
    assert serve(server, prompt(40) + tuple(range(20)), 1)
