"""A loopback stand-in for an SGLang server: real sockets, no model.

It answers `/generate` and `/v1/completions` as SGLang 0.5.23 streams them, with tokens that count up from the prompt's
length, and can misbehave on purpose. `python -m tests.unit.fake_server --port P` runs it as a process of its own, for
the tests that start and kill a server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Self

from aiohttp import web

MODEL = "fake-nano"


class FakeServer:
    """A server in a thread of its own; a context manager. Every request body it got is in `bodies`."""

    def __init__(
        self,
        *,
        port: int = 0,
        token_s: float = 0.0,
        incremental: bool = False,
        refuse_first: int = 0,
        abort_index: int | None = None,
        die_after: int | None = None,
        state: dict[str, Any] | None = None,
        forgetful: bool = False,
        mute_after: int | None = None,
        falling: bool = False,
        no_cache: bool = False,
        max_total_tokens: int | None = None,
    ) -> None:
        self.token_s = token_s
        self.incremental = incremental
        self.refuse_first = refuse_first
        self.abort_index = abort_index
        self.die_after = die_after
        self.state = state
        self.forgetful = forgetful
        self.mute_after = mute_after
        self.falling = falling
        self.no_cache = no_cache
        self.max_total_tokens = max_total_tokens
        self.port = port
        self.bodies: list[dict[str, Any]] = []
        self.flushes = 0
        self.in_flight = 0
        self.most_in_flight = 0
        self.computed_tokens = 1
        self.decoded_tokens = 1
        self.first_tokens = 1
        self._seen_prefixes: set[tuple[str | None, tuple[int, ...]]] = set()
        self._ready = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(client_max_size=2**26)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.get("/server_info", self._server_info),
                web.get("/v1/loads", self._loads),
                web.get("/metrics", self._metrics),
                web.post("/flush_cache", self._flush),
                web.post("/generate", self._generate),
                web.post("/v1/completions", self._completions),
                web.post("/pause_generation", self._pause),
                web.post("/continue_generation", self._continue),
            ]
        )
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self.port)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        self._ready.set()
        await self._stop.wait()
        for _ in range(
            10
        ):  # take what is still in the backlog: closing under an accept leaks its socket (CPython 3.11)
            await asyncio.sleep(0.002)
        await runner.cleanup()

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _pause(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _continue(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": MODEL}]})

    async def _server_info(self, _: web.Request) -> web.Response:
        if self.mute_after is not None and len(self.bodies) >= self.mute_after:
            return web.json_response([], status=500)
        states = {} if self.state is None else {"internal_states": [self.state]}
        facts = {"model_path": MODEL, "version": "0.0", "device": "cpu"}
        return web.json_response({**facts, "max_total_num_tokens": self.max_total_tokens, **states})

    async def _loads(self, _: web.Request) -> web.Response:
        waiting = max(0, self.in_flight - 4)
        load = {"num_running_reqs": self.in_flight - waiting, "num_waiting_reqs": waiting}
        return web.json_response({"loads": [load]})

    async def _metrics(self, _: web.Request) -> web.Response:
        """Two ranks' counters: readers have to add them up."""
        lines = [
            f'sglang:realtime_tokens_total{{mode="{mode}",rank="{rank}"}} {count}'
            for mode, count in (("prefill_compute", self.computed_tokens), ("decode", self.decoded_tokens))
            for rank, count in ((0, count - 1), (1, 1))
        ]
        first = ["# TYPE sglang:time_to_first_token_seconds histogram"]
        for stream, count in (("true", self.first_tokens - 1), ("false", 1)):
            first.append(f'sglang:time_to_first_token_seconds_count{{is_streaming="{stream}"}} {count}')
        return web.Response(text="\n".join(["# TYPE sglang:realtime_tokens counter", *lines, *first]) + "\n")

    async def _flush(self, _: web.Request) -> web.Response:
        self.flushes += 1
        return web.Response()

    async def _accept(self, request: web.Request) -> dict[str, Any]:
        """Take a request, or misbehave: hang up without an answer, or die with every connection."""
        body: dict[str, Any] = await request.json()
        self.bodies.append(body)
        if self.die_after is not None and len(self.bodies) > self.die_after:
            os._exit(9) if __name__ == "__main__" else self._vanish(request)
        if len(self.bodies) <= self.refuse_first:
            assert request.transport is not None
            request.transport.abort()
        return body

    def _vanish(self, request: web.Request) -> None:
        self._stop.set()
        assert request.transport is not None
        request.transport.abort()

    def _cached(self, ids: list[int], salt: str | None) -> int:
        """Return how many of the first 64 tokens were seen under this salt: all of them, or none."""
        prefix = (salt, tuple(ids[:64]))
        hit = prefix in self._seen_prefixes and not self.no_cache
        self._seen_prefixes.add(prefix)
        return len(ids[:64]) if hit else 0

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await self._accept(request)
        ids, count = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        if not ids:
            return web.json_response({"error": {"message": "input_ids is empty"}}, status=400)
        cached = self._cached(ids, body.get("cache_salt"))
        self.computed_tokens += -1 if self.falling else len(ids) - cached
        self.decoded_tokens += count - 1
        self.first_tokens += 1
        outputs = [(len(ids) + step + (cached if self.forgetful else 0)) % 500 for step in range(count)]
        if not body.get("stream"):
            meta = {"id": body["rid"], "completion_tokens": count, "cached_tokens": cached}
            return web.json_response({"output_ids": outputs, "meta_info": meta})
        index = int(body["rid"].split("-")[1])

        def event(step: int) -> dict[str, Any]:
            finish = None if step + 1 < count else {"type": "length", "length": count}
            if index == self.abort_index and step == 1:
                finish = {"type": "abort", "message": "told to"}
            meta = {
                "id": body["rid"],
                "prompt_tokens": len(ids),
                "completion_tokens": step + 1,
                "cached_tokens": cached,
                "num_retractions": 1 if index == 0 else 0,
                "queue_time": 0.25 + index / 1000,  # seconds, as with --enable-metrics
                "finish_reason": finish,
            }
            return {"text": "x", "output_ids": outputs[step if self.incremental else 0 : step + 1], "meta_info": meta}

        return await self._stream(request, (event(step) for step in range(count)))

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await self._accept(request)
        ids, count = body["prompt"], body["max_tokens"]
        cached = self._cached(ids, body.get("cache_salt"))

        def events() -> Any:
            for step in range(count):
                finish = "length" if step + 1 == count else None
                tokens = {"token_ids": [step]} if body.get("return_token_ids") else {}
                yield {"choices": [{"index": 0, "text": "x", "finish_reason": finish, **tokens}]}
            usage = {"prompt_tokens": len(ids), "completion_tokens": count, "total_tokens": len(ids) + count}
            yield {"choices": [], "usage": {**usage, "prompt_tokens_details": {"cached_tokens": cached}}}

        return await self._stream(request, events())

    async def _stream(self, request: web.Request, events: Any) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            with contextlib.suppress(ConnectionError):  # the client may be gone
                await response.prepare(request)
                for event in events:
                    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
                    await asyncio.sleep(self.token_s)
                await response.write(b"data: [DONE]\n\n")
        finally:
            self.in_flight -= 1
        return response


def main() -> None:
    """Run a server until it is stopped."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--token-s", type=float, default=0.0)
    parser.add_argument("--die-after", type=int)
    parser.add_argument("--fail", action="store_true", help="end at start, as a server with a bad flag does")
    parser.add_argument("--child", type=Path, help="start a child that does not end by itself; write its id here")
    parser.add_argument("--forgetful", action="store_true", help="answer cached prompts with other tokens")
    parser.add_argument("--mute-after", type=int, help="no /server_info after so many requests")
    parser.add_argument("--falling", action="store_true", help="an input counter that falls with every request")
    parser.add_argument("--no-cache", action="store_true", help="compute every prompt anew")
    parser.add_argument("--max-total-tokens", type=int)
    parser.add_argument("--memory-org")
    parser.add_argument("--total-bytes", type=int, help="state memory to report for --memory-org")
    parser.add_argument("--max-mamba-cache-size", type=int)
    parser.add_argument("--mamba-radix-cache-strategy", default="extra_buffer")
    known, _ = parser.parse_known_args()
    print("fake server starting", flush=True)
    if known.fail:
        print("error: expected a budget above 0 bytes, got 0 bytes", file=sys.stderr)
        sys.exit(2)
    if known.child is not None:
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        known.child.write_text(str(child.pid))
    state: dict[str, Any] = {"effective_max_running_requests_per_dp": 4}
    if known.memory_org is None:
        names = ("max_mamba_cache_size", "mamba_radix_cache_strategy")
        state |= {name: getattr(known, name) for name in names}
    else:
        slabs = {"slabs": 1, "live_slots": 3, "active_or_referenced_slots": 2, "occupancy": [0, 0, 0, 1]}
        units = {"total_bytes": known.total_bytes, "budget": "b63"}
        state["memory_organization"] = {"organization": known.memory_org, "units": units, "slabs": slabs}
    names = ("token_s", "die_after", "forgetful", "mute_after", "falling", "no_cache", "max_total_tokens")
    options = {name: getattr(known, name) for name in names}
    with FakeServer(port=known.port, state=state, **options):
        while True:
            time.sleep(1)


if __name__ == "__main__":
    main()
