"""A proxy that passes requests through to a server and measures them on the way, as the load generator would.

A request's first token is counted where SGLang's client counts it: at the first event that brings text. The load
generator counts the first token id, which may come some steps earlier, because a token can be part of a character.

Every `/generate` becomes a `RequestRecord` made by the load generator's own endpoint, so another client's requests are
put through this project's arithmetic at the moment they happen.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Self

import aiohttp
from aiohttp import web

from bench.endpoints import Answer, GenerateEndpoint, split_events
from bench.records import RequestRecord


class RecordingProxy:
    """A proxy in a thread of its own; a context manager. `records` holds the requests in order of completion."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._ready = threading.Event()
        self._endpoint = GenerateEndpoint()
        self.records: list[RequestRecord] = []
        self.port = 0

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self._pass)
        timeout = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as self._session:
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
            self._start_ns = time.monotonic_ns()
            self._ready.set()
            await self._stop.wait()
            await runner.cleanup()

    def _now_ns(self) -> int:
        return time.monotonic_ns() - self._start_ns

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        sent_ns, answer, pending, first_text_ns = self._now_ns(), Answer(), bytearray(), None
        kept = {name: value for name, value in request.headers.items() if name.lower() == "content-type"}
        url = f"{self._target}/{request.match_info['path']}"
        async with self._session.request(request.method, url, data=body, headers=kept) as reply:
            kind = reply.headers.get("Content-Type", "application/json")
            response = web.StreamResponse(status=reply.status, headers={"Content-Type": kind})
            await response.prepare(request)
            async for piece in reply.content.iter_any():
                now_ns = self._now_ns()
                await response.write(piece)
                if "event-stream" in kind:
                    pending += piece
                    for event in split_events(pending):
                        self._endpoint.fold(answer, event, now_ns)
                        if first_text_ns is None and json.loads(event).get("text"):
                            first_text_ns = now_ns
        if request.path == "/generate" and answer.token_times_ns:
            self._keep(sent_ns, first_text_ns or answer.token_times_ns[-1], answer)
        return response

    def _keep(self, sent_ns: int, first_text_ns: int, answer: Answer) -> None:
        self.records.append(
            RequestRecord(
                index=len(self.records),
                context_id=0,
                salt=None,
                status="ok" if answer.finish_reason is not None else "failed",
                planned_ns=sent_ns,
                prompt_tokens=answer.prompt_tokens or 0,
                target_tokens=answer.num_tokens,
                sent_ns=sent_ns,
                first_token_ns=first_text_ns,
                last_token_ns=answer.token_times_ns[-1],
                done_ns=self._now_ns(),
                output_tokens=answer.num_tokens,
                cached_tokens=answer.cached_tokens,
                finish_reason=answer.finish_reason,
            )
        )
