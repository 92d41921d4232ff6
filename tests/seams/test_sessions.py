"""Sessions that the prefix cache knows (`--enable-session-radix-cache`): what an open one refers to is evicted last.

Source: SGLang 0.5.23, `sglang/srt/mem_cache/unified_cache/session_ref_tracker.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sgl_hybrid.memory import ORGANIZATIONS
from tests.seams.request_flow import TinyServer, prompt
from tests.seams.tree_fixture import start, tiny_plan

ORGS = sorted(ORGANIZATIONS)
Serve = Callable[..., TinyServer]
pytestmark = pytest.mark.usefixtures("published")


@pytest.fixture
def begin() -> Iterator[Serve]:
    """Start servers; at the end of a test each is sound, and empty once flushed."""
    servers = []

    def begin(org: str, *, pages: int = 48, checkpoints: int = 12) -> TinyServer:
        servers.append(TinyServer(start(tiny_plan(org, pages=pages, checkpoints=checkpoints), sessions=True)))
        return servers[-1]

    yield begin
    for server in servers:
        check(server)
        server.flush()
        memory = server.cache.memory
        assert memory.pages.num_free == memory.pages.num_pages
        assert memory.store.num_free_ids == memory.store.num_virtual


def check(server: TinyServer) -> None:
    server.cache.memory.check()
    server.cache.tree.sanity_check()


def serve(server: TinyServer, tokens: Sequence[int], session: str | None = None) -> int:
    """Serve a prompt and one token of output; return the tokens it found cached."""
    (running,) = server.admit((None, tuple(tokens)), session=session)
    found = running.req.prefix_len
    assert server.extend(running)
    server.publish(running)
    server.finish(running)
    check(server)
    return found


def depth(server: TinyServer, tokens: Sequence[int]) -> int:
    """Tokens of a prefix that a request would find."""
    return server.match(tokens).device_prefix_len


def evict_one(server: TinyServer, *, slots: bool) -> None:
    """Take all that is free and one more, and give it back."""
    cache, taken = server.cache, []
    free = cache.slots.available_size() if slots else cache.memory.pages.num_free
    for _ in range(free + 1):
        if slots:
            taken.append(torch.tensor([cache.tree.checkpoints.slot_or_none(evict=True)]))
        else:
            cache.tokens.evict_to_free_tokens(cache.tree, server.block)
            taken.append(cache.tokens.alloc(server.block))
    for unit in taken:
        (cache.slots if slots else cache.tokens).free(unit)
    check(server)


@pytest.mark.parametrize("is_open", [True, False], ids=["open", "closed"])
@pytest.mark.parametrize("slots", [True, False], ids=["states", "attention"])
@pytest.mark.parametrize("org", ORGS)
def test_what_an_open_session_refers_to_outlives_what_was_used_later(
    begin: Serve, org: str, slots: bool, is_open: bool
) -> None:
    """After the session recency decides again."""
    server, told, other = begin(org), prompt(3), prompt(3, seed=1)
    server.cache.tree.open_radix_session("talk")
    serve(server, told, "talk")
    serve(server, other)
    if not is_open:
        server.cache.tree.release_radix_session("talk")
    evict_one(server, slots=slots)
    kept, evicted = (told, other) if is_open else (other, told)
    assert depth(server, evicted) < 48
    assert depth(server, kept) == 48


@pytest.mark.parametrize("org", ORGS)
def test_a_session_refers_to_its_last_turn_and_gives_way_where_nothing_else_is_left(begin: Serve, org: str) -> None:
    """The state after the first turn is no longer preferred: the second goes on from its own. Where only the session
    has something cached, an allocation takes it all the same."""
    server, first = begin(org), prompt(3)
    second = first + prompt(3, seed=2)
    server.cache.tree.open_radix_session("talk")
    assert serve(server, first, "talk") == 0
    assert serve(server, second, "talk") == 48
    component = server.cache.tree.checkpoints
    referred = {component.depth_of(node) for node in component.node_of.values() if component.session_ref(node)}
    assert referred == {max(component.depth_of(node) for node in component.node_of.values())}
    for missing in (EvictParams(num_tokens=1000 * server.block), EvictParams(num_tokens=0, mamba_num=1000)):
        server.cache.tree.evict_for_alloc(missing)
    assert component.node_of == {}


@pytest.mark.parametrize("org", ORGS)
def test_a_turn_that_ends_after_its_session_or_is_aborted_is_not_referred_to(begin: Serve, org: str) -> None:
    server = begin(org)
    tree = server.cache.tree
    for tokens, end in ((prompt(3), "closed"), (prompt(3, seed=1), "aborted")):
        tree.open_radix_session(end)
        (running,) = server.admit((None, tokens), session=end)
        assert server.extend(running)
        server.publish(running)
        if end == "closed":
            tree.release_radix_session(end)
            server.finish(running)
        else:
            server.abort(running)
        check(server)
    assert not any(tree.checkpoints.session_ref(node) for node in tree.checkpoints.node_of.values())
    assert len(tree.checkpoints.node_of) == 2
