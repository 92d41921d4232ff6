"""A loopback server with a prefix cache of states on a grid, and faults on purpose: what `verify` must tell apart.

Its model is a rule: output tokens and numbers follow from the prompt. The cache is a list of states in order of
use; a request continues from the deepest one that is a prefix of it, leaves the deepest boundary of its prompt, and
those that its output crosses.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any

from aiohttp import web

from bench.verify.paths import RESUME_NEW_TOKENS
from tests.unit.fake_server import MODEL, FakeServer

GRID = 16


class FakeCacheServer(FakeServer):
    """A server of organization s2 with a grid of 16 tokens.

    capacity: states it can hold. hit_error, cold_noise, batch_noise: what is added to the last log-probability of an
    answer that was a hit, of every second answer without one, of an answer while others run. wrong_token: hits answer
    another last token. wrong_depth: states are found one boundary deeper than they are. forgets_after: visits to one
    state after which its answers change. retracts: requests that may end early are taken back once. resume_error: what
    is added to the last log-probability of an answer that was taken back on request; None: it takes none back.
    organized: it says what it serves, as ours does.
    """

    def __init__(
        self,
        *,
        capacity: int = 40,
        hit_error: float = 0.0,
        cold_noise: float = 0.0,
        batch_noise: float = 0.0,
        wrong_token: bool = False,
        wrong_depth: bool = False,
        forgets_after: int | None = None,
        retracts: bool = True,
        resume_error: float | None = 0.0,
        organized: bool = True,
        missing_numbers: bool = False,
    ) -> None:
        super().__init__()
        self.capacity = capacity
        self.hit_error, self.cold_noise, self.batch_noise = hit_error, cold_noise, batch_noise
        self.wrong_token, self.wrong_depth, self.forgets_after = wrong_token, wrong_depth, forgets_after
        self.retracts, self.organized, self.missing_numbers = retracts, organized, missing_numbers
        self.resume_error = resume_error
        self.pauses = 0
        self.evictions = 0
        self.colds = 0
        self._states: OrderedDict[tuple[str | None, tuple[int, ...]], int] = OrderedDict()

    async def _server_info(self, _: web.Request) -> web.Response:
        info: dict[str, Any] = {"model_path": MODEL, "dtype": "float32", "internal_states": [{}]}
        if self.organized:
            info["internal_states"][0]["memory_organization"] = {
                "organization": "s2",
                "page_tokens": GRID,
                "checkpoint_interval": GRID,
                "units": {"pages": 4 * self.capacity, "attention_pages": 0, "checkpoints": 0},
                "pools": {"shared": {}},
                "evictions": {"checkpoint": self.evictions},
                "running_requests_cap": 4,
            }
        return web.json_response(info)

    async def _flush(self, request: web.Request) -> web.Response:
        self._states.clear()
        return await super()._flush(request)

    async def _pause(self, request: web.Request) -> web.Response:
        assert (await request.json()) == {"mode": "retract"}
        self.pauses += 1
        return web.Response()

    async def _generate(self, request: web.Request) -> web.Response:
        body = await self._accept(request)
        ids, sampling = body["input_ids"], body["sampling_params"]
        salt, start = body.get("cache_salt"), body["logprob_start_len"]
        self.in_flight += 1
        cached, visits = self._look_up(ids, start, salt)
        outputs = [(sum(ids) + step) % 500 for step in range(sampling["max_new_tokens"])]
        logprobs = [-1.0 - (position % 7) / 8 for position in range(len(ids) + len(outputs))]
        self._publish(ids, outputs, salt)
        self.colds += cached == 0
        logprobs[-1] += self.hit_error if cached else self.cold_noise * (self.colds % 2)
        if self.forgets_after is not None and visits > self.forgets_after:
            logprobs[-1] += 0.5
        retractions, pauses = int(self.retracts and not sampling["ignore_eos"]), self.pauses
        await asyncio.sleep(0.05 if sampling["max_new_tokens"] == RESUME_NEW_TOKENS else 0.001)
        if self.pauses > pauses and self.resume_error is not None:
            retractions += 1
            logprobs[-1] += self.resume_error
        logprobs[-1] += self.batch_noise if self.in_flight > 1 else 0.0
        self.in_flight -= 1
        if cached and self.wrong_token:
            outputs[-1] = (outputs[-1] + 1) % 500
        numbers: list[float | None] = list(logprobs)
        if self.missing_numbers and cached:
            numbers[-1] = None
        first, tokens = max(start, cached), ids + outputs
        meta = {
            "prompt_tokens": len(ids),
            "completion_tokens": len(outputs),
            "cached_tokens": cached,
            "num_retractions": retractions,
            "finish_reason": {"type": "length", "length": len(outputs)},
            "input_token_logprobs": [
                [None if position == first else numbers[position], tokens[position], None]
                for position in range(first, len(ids))
            ],
            "output_token_logprobs": [
                [numbers[position], tokens[position], None] for position in range(len(ids), len(tokens))
            ],
        }
        return web.json_response({"text": "x", "output_ids": outputs, "meta_info": meta})

    def _look_up(self, ids: list[int], start: int, salt: str | None) -> tuple[int, int]:
        """Return the depth of the deepest state that a request can use, and how often it was used."""
        shift = GRID if self.wrong_depth else 0
        for depth in range(min(len(ids) - 1, start) // GRID * GRID, 0, -GRID):
            key = (salt, tuple(ids[: depth - shift]))
            if depth > shift and key in self._states:
                self._states[key] += 1
                self._states.move_to_end(key)
                return depth, self._states[key]
        return 0, 0

    def _publish(self, ids: list[int], outputs: list[int], salt: str | None) -> None:
        tokens = ids + outputs[:-1]
        depths = {len(ids) // GRID * GRID, *range(len(ids) // GRID * GRID + GRID, len(tokens) + 1, GRID)} - {0}
        for depth in sorted(depths):
            key = (salt, tuple(tokens[:depth]))
            self._states[key] = self._states.get(key, 0)
            self._states.move_to_end(key)
        while len(self._states) > self.capacity:
            self._states.popitem(last=False)
            self.evictions += 1
