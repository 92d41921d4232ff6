"""A tiny server with policies: requests that are taken back and resume, and pressure on what is cached."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang.srt.managers.schedule_batch import Req, release_req

from sgl_hybrid.config import MemorySettings
from sgl_hybrid.memory.state_memory import StateMemory
from sgl_hybrid.seams import process
from sgl_hybrid.seams.protection import Protection, pin_before_release
from tests.seams.request_flow import Running, TinyServer
from tests.seams.tree_fixture import start, tiny_plan
from tests.tiny_layouts import PAGE_TOKENS


class PolicyServer(TinyServer):
    """`TinyServer` on a new cache with the given policies (fields of `MemorySettings`)."""

    def __init__(self, org: str, *, pages: int, checkpoints: int, grid_blocks: int = 1, **policies: Any) -> None:
        plan = tiny_plan(org, pages=pages, checkpoints=checkpoints, grid_blocks=grid_blocks)
        super().__init__(
            start(plan._replace(settings=MemorySettings(memory_org=org, **{"admission_headroom": 0.0, **policies})))
        )
        self._pressed = 0
        self.matched: dict[str, int] = {}
        """Depth that each request continued from when it was last admitted, by its id."""

    @property
    def memory(self) -> StateMemory:
        return self.cache.memory

    @property
    def protection(self) -> Protection:
        return self.cache.tree.protection

    @property
    def policies(self) -> Any:
        return process.served().policies

    def begin(self, tokens: Sequence[int], *, salt: str | None = None, new_tokens: int = 24) -> Running | None:
        """Admit and prefill one request; None if it has to wait."""
        admitted = self.admit((salt, tokens), new_tokens=new_tokens)
        if not admitted:
            return None
        self.matched[admitted[0].req.rid] = admitted[0].req.prefix_len
        assert self.extend(admitted[0])
        self.publish(admitted[0])
        return admitted[0]

    def serve(self, tokens: Sequence[int], *, salt: str | None = None) -> None:
        """Serve a request to its end; afterwards its boundaries are cached."""
        running = self.begin(tokens, salt=salt, new_tokens=2)
        assert running is not None
        self.finish(running)

    def pressure(self, requests: int) -> None:
        """Serve requests in text of their own, each of four blocks: they push out what may go."""
        for _ in range(requests):
            self._pressed += 1
            start_token = 50_000 + 100 * self._pressed
            self.serve(range(start_token, start_token + 4 * PAGE_TOKENS + 1))

    def retract(self, running: Running) -> Req:
        """Take a request back, as SGLang does when a decode step is short."""
        self.running.remove(running)
        pin_before_release(
            release_req,
            req=running.req,
            remaing_req_count=len(self.running),
            req_to_token_pool=self.cache.requests,
            token_to_kv_pool_allocator=self.cache.tokens,
            tree_cache=self.cache.tree,
            hisparse_coordinator=None,
        )
        return running.req

    def resume(self, req: Req) -> Running | None:
        """Admit a request again that was taken back; None if it has to wait."""
        req.init_next_round_input(self.cache.tree)
        adder = self._adder()
        adder.add_one_req(req, has_chunked_req=False, truncation_align_size=None)
        if not adder.can_run_list:
            return None
        self.running.append(Running(req))
        self.matched[req.rid] = req.prefix_len
        assert self.extend(self.running[-1])
        return self.running[-1]

    def depth(self, tokens: Sequence[int], salt: str | None = None) -> int:
        """Deepest joint boundary of a prefix now. A lookup refreshes what it finds."""
        return self.match(tokens, salt).device_prefix_len
