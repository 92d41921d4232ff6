"""A request near the size of the pool, alone: it completes or is refused at once, whatever is cached."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sgl_hybrid.memory import ORGANIZATIONS
from tests.seams.request_flow import TinyServer
from tests.seams.tree_fixture import published_arguments, start, tiny_plan
from tests.tiny_layouts import PAGE_TOKENS

ORGS = sorted(ORGANIZATIONS)
PAGES = 24
MEMORY_OPTIONS = {"token_capacity": 0, "sliding_window_size": None, "chunk_size": None}


@pytest.fixture(scope="module", autouse=True)
def _arguments() -> Iterator[None]:
    with published_arguments():
        yield


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
