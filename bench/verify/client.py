"""Requests of a verification: SGLang's native `/generate` with log-probabilities, one answer at a time or many at once.

`logprob_start_len` caps the prefix that SGLang reuses for a request: it cannot reuse what it is asked to score. Every
run of a request, cold or warm, therefore asks for the same start at or behind the deepest boundary, and gets the
log-probabilities of the prompt's tail and of the output.
Source: SGLang 0.5.23, `managers/schedule_batch.py` (`max_prefix_len`), `managers/tokenizer_manager.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

import aiohttp
import msgspec

from bench.endpoints import error_message
from bench.server import ServerError
from bench.verify.compare import Scores
from bench.verify.records import Request

FLUSH_WAIT_S = 20.0

_Entry = tuple[float | None, int, Any]


class _Finish(msgspec.Struct):
    type: str
    message: str | None = None


class _Meta(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    finish_reason: _Finish
    output_token_logprobs: list[_Entry]
    input_token_logprobs: list[_Entry] = []
    num_retractions: int = 0
    hidden_states: Any = None


class _Answer(msgspec.Struct):
    output_ids: list[int]
    meta_info: _Meta


class Answer(NamedTuple):
    """One answer: its scores, and what the server did for it. hidden_states: as SGLang returns them, if asked for."""

    scores: Scores
    cached_tokens: int
    num_retractions: int
    finish_reason: str
    hidden_states: Any


class Client:
    """One server. An asynchronous context manager."""

    def __init__(self, url: str, *, timeout_s: float = 600.0) -> None:
        self.url = url.rstrip("/")
        self.num_requests = 0
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._decoder = msgspec.json.Decoder(_Answer)

    async def __aenter__(self) -> Self:
        # A connection for each request: SGLang's server closes one that idles for five seconds, and a request that is
        # sent at that moment is lost.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(timeout=self._timeout, connector=connector)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def info(self) -> dict[str, Any]:
        """Return `/server_info`. Raises: ServerError."""
        status, content = await self._call("GET", "/server_info", None)
        if status != 200:
            raise ServerError(f"expected /server_info of {self.url}, got HTTP status {status}")
        info: dict[str, Any] = msgspec.json.decode(content)
        return info

    async def flush(self) -> None:
        """Empty the prefix cache; wait while requests run. Raises: ServerError if it stays busy."""
        for _ in range(int(FLUSH_WAIT_S / 0.1)):
            status, _content = await self._call("POST", "/flush_cache", None)
            if status == 200:
                return
            await asyncio.sleep(0.1)
        raise ServerError(f"expected {self.url} to be idle and flush its cache within {FLUSH_WAIT_S:.0f} s, got none")

    async def take_back(self) -> None:
        """Have the server retract every running request and go on; it lacks no memory for that. Raises: ServerError."""
        for path, body in (("/pause_generation", {"mode": "retract"}), ("/continue_generation", {})):
            status, _content = await self._call("POST", path, body)
            if status != 200:
                raise ServerError(f"expected {path} of {self.url}, got HTTP status {status}")

    async def generate(self, request: Request, *, salt: str | None = None, hidden_states: bool = False) -> Answer:
        """Ask for one answer, greedy. Raises: ServerError if it is refused, aborted or of another length."""
        body: dict[str, Any] = {
            "input_ids": request.prompt_ids,
            "sampling_params": {
                "max_new_tokens": request.max_new_tokens,
                "temperature": 0.0,
                "ignore_eos": request.ignore_eos,
            },
            "return_logprob": True,
            "logprob_start_len": request.first_scored,
        }
        if salt is not None:
            body["cache_salt"] = salt
        if hidden_states:
            body["return_hidden_states"] = True
        self.num_requests += 1
        status, content = await self._call("POST", "/generate", body)
        if status != 200:
            raise ServerError(f"expected an answer from {self.url}, got HTTP status {status}: {_reason(content)}")
        try:
            answer = self._decoder.decode(content)
        except msgspec.MsgspecError as error:
            raise ServerError(f"expected an answer of /generate with log-probabilities, got: {error}") from error
        return _read(answer, request)

    async def generate_all(
        self, requests: Sequence[Request], *, max_concurrency: int, salts: Sequence[str] | None = None
    ) -> list[Answer]:
        """Ask for all answers, at most `max_concurrency` in flight, begun in order. Raises: ServerError."""
        slots = asyncio.Semaphore(max_concurrency)

        async def one(index: int) -> Answer:
            async with slots:
                return await self.generate(requests[index], salt=None if salts is None else salts[index])

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(index)) for index in range(len(requests))]
        except* ServerError as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _call(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, bytes]:
        try:
            async with self._session.request(method, self.url + path, json=body) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            raise ServerError(f"expected {self.url}{path} to answer, got: {reason}") from error


def _read(answer: _Answer, request: Request) -> Answer:
    meta = answer.meta_info
    if meta.finish_reason.type == "abort":
        raise ServerError(f"expected an answer, got an abort: {meta.finish_reason.message or 'no reason given'}")
    expected = request.max_new_tokens
    if request.ignore_eos and len(answer.output_ids) != expected:
        raise ServerError(f"expected {expected} tokens, got {len(answer.output_ids)}")
    if len(meta.output_token_logprobs) != len(answer.output_ids):
        raise ServerError(
            f"expected a log-probability for each of {len(answer.output_ids)} tokens, "
            f"got {len(meta.output_token_logprobs)}"
        )
    # The first scored token of a prompt has none: what comes before it is not computed again.
    inputs = meta.input_token_logprobs[1:]
    scores = Scores(
        prompt_tokens=len(request.prompt_ids),
        first_scored=len(request.prompt_ids) - len(inputs),
        input_logprobs=[entry[0] for entry in inputs],
        output_ids=answer.output_ids,
        output_logprobs=[entry[0] for entry in meta.output_token_logprobs],
    )
    return Answer(scores, meta.cached_tokens, meta.num_retractions, meta.finish_reason.type, meta.hidden_states)


def _reason(content: bytes) -> str:
    try:
        return error_message(msgspec.json.decode(content))
    except msgspec.MsgspecError:
        return content[:200].decode(errors="replace")
