"""Any settings, any sequence of requests on small caches: what is read is right, ledgers add up, nothing stays behind.

`TinyServer` verifies the contents of everything that a step reads, and freed units are filled with NaN; so a protected
unit that was evicted, or one that was freed under a reader, fails in the step that reads it.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sgl_hybrid.memory import ORGANIZATIONS
from sgl_hybrid.seams.status import report
from tests.seams.policy_flow import PolicyServer
from tests.tiny_layouts import PAGE_TOKENS

NEW_TOKENS = 40
pytestmark = pytest.mark.usefixtures("published")


policies = st.fixed_dictionaries(
    {
        "admission_headroom": st.sampled_from([0.0, 0.1, 0.5, "auto"]),
        "checkpoint_lifetime": st.sampled_from(["transient", "cached", "retained"]),
        "preempt_pin_k": st.sampled_from([None, 1, 2]),
        "protection_budget": st.sampled_from([0.1, 0.5, 1.0]),
        "checkpoint_eviction": st.sampled_from(["lru", "value"]),
    }
)
steps = st.lists(
    st.tuples(
        st.sampled_from(["begin", "begin", "decode", "decode", "finish", "retract", "resume", "give_up", "evict"]),
        st.integers(0, 9),
    ),
    max_size=30,
)


class Script:
    """Carries out steps on one server; `waiting` are the requests that were taken back."""

    def __init__(self, server: PolicyServer) -> None:
        self.server = server
        self.waiting: list[Req] = []
        self.serial = 0

    def begin(self, number: int) -> None:
        self.serial += 1
        context = 1000 * (number % 3)
        tokens = [*range(context, context + PAGE_TOKENS * (1 + number % 4)), 90_000 + self.serial]
        self.server.begin(tokens, salt="salted" if number == 9 else None, new_tokens=NEW_TOKENS)

    def decode(self, number: int) -> None:
        """A few tokens of one request; when no page can be had, the youngest is taken back, or the last one aborted."""
        if not self.server.running:
            return
        running = self.server.running[number % len(self.server.running)]
        for token in range(1 + number):
            if len(running.req.output_ids) + 2 > NEW_TOKENS:
                return
            if self.server.decode(running, token):
                continue
            if len(self.server.running) > 1:
                self.retract(-1)
            else:
                self.server.abort(running)
            return

    def finish(self, number: int) -> None:
        if self.server.running:
            running = self.server.running[number % len(self.server.running)]
            if running.req.output_ids:
                self.server.finish(running)
            else:
                self.server.abort(running)

    def retract(self, number: int) -> None:
        if self.server.running:
            self.waiting.append(self.server.retract(self.server.running[number % len(self.server.running)]))

    def resume(self, number: int) -> None:
        if self.waiting:
            req = self.waiting[number % len(self.waiting)]
            if self.server.resume(req) is not None:
                self.waiting.remove(req)

    def give_up(self, number: int) -> None:
        if self.waiting:
            req = self.waiting.pop(number % len(self.waiting))
            self.server.cache.tree.release_aborted_request(req.cache_request_handle)

    def evict(self, number: int) -> None:
        self.server.cache.tree.evict_for_alloc(EvictParams(num_tokens=(1 + number) * PAGE_TOKENS, mamba_num=number % 3))


@pytest.mark.parametrize("org", sorted(ORGANIZATIONS))
def test_a_resumed_request_keeps_the_slot_that_its_prefill_tracks_in(org: str) -> None:
    """It crossed a boundary, and was taken back before another step; what it held then is no slot of it now."""
    server = PolicyServer(org, pages=40, checkpoints=7, checkpoint_lifetime="transient")
    play = Script(server)
    begun = [("begin", 0), ("begin", 0), ("decode", 4), ("begin", 0), ("decode", 9), ("finish", 1)]
    for action, number in [*begun, ("retract", 0), ("resume", 0), ("decode", 1), ("finish", 0), ("finish", 0)]:
        getattr(play, action)(number)
    server.memory.check()
    assert server.memory.store.num_active == 0


@pytest.mark.parametrize("org", sorted(ORGANIZATIONS))
@settings(max_examples=25, deadline=None)
@given(chosen=policies, script=steps)
def test_b37_any_sequence_keeps_the_bounds_and_leaves_nothing(
    org: str, chosen: dict[str, object], script: list[tuple[str, int]]
) -> None:
    server = PolicyServer(org, pages=40, checkpoints=7, **chosen)
    play = Script(server)
    for action, number in script:
        getattr(play, action)(number)
        server.memory.check()
        json.dumps(report(SimpleNamespace(tree_cache=server.cache.tree, max_running_requests=1)))
        used = server.policies.budget.used
        assert all(units <= limit for units, limit in zip(used, server.policies.budget.limits, strict=True))
        assert server.protection.num_retained == len(server.policies.retention.protected)
        assert set(server.policies.pins.held) == {req.rid for req in play.waiting} & set(server.policies.pins.held)
    for step in ("give_up", "finish"):
        while play.waiting if step == "give_up" else server.running:
            getattr(play, step)(0)
    assert set(server.policies.budget.used) == {0}
    assert server.memory.store.num_referenced == server.memory.store.num_active == 0
    server.flush()
    assert server.memory.pages.num_free == server.memory.pages.num_pages
