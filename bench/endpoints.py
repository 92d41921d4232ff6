"""The two ways to ask a server for tokens: SGLang's native `/generate` and the OpenAI `/v1/completions`.

An endpoint turns a planned request into the body of a streaming POST and folds the stream's events into an `Answer`.
Both send token ids, ask for exactly the planned number of tokens (greedy, end-of-sequence ignored) and pass the cache
salt. Pure: no sockets here. Source: SGLang 0.5.23 `entrypoints/http_server.py`, `managers/tokenizer_manager.py`,
`entrypoints/openai/protocol.py`.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from bench.records import PlannedRequest


class StreamError(RuntimeError):
    """The server ended or answered the request with an error of its own. The message is the server's."""


class Answer:
    """What one stream has brought so far. Times are those given to `grow`."""

    def __init__(self) -> None:
        self.output_ids: list[int] | None = None
        self.num_tokens = 0
        self.token_times_ns: list[int] = []
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.num_retractions: int | None = None
        self.queue_s: float | None = None
        self.finish_reason: str | None = None

    def grow(self, num_tokens: int, now_ns: int) -> None:
        """Note that `num_tokens` tokens in total have come by `now_ns`."""
        self.token_times_ns.extend([now_ns] * (num_tokens - self.num_tokens))
        self.num_tokens = max(self.num_tokens, num_tokens)


class Endpoint(Protocol):
    """One way to ask for tokens."""

    path: str

    def body(self, request: PlannedRequest, request_id: str) -> dict[str, Any]:
        """Return the JSON body of the POST."""
        ...

    def fold(self, answer: Answer, event: bytes, now_ns: int) -> None:
        """Add one event of the stream, read at `now_ns`, to `answer`. Raises: StreamError."""
        ...


class _Finish(msgspec.Struct):
    type: str
    message: str | None = None


class _Meta(msgspec.Struct):
    completion_tokens: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    num_retractions: int | None = None
    queue_time: float | None = None
    finish_reason: _Finish | None = None


class _GenerateEvent(msgspec.Struct):
    output_ids: list[int] = []
    meta_info: _Meta = msgspec.field(default_factory=_Meta)
    error: Any = None


class GenerateEndpoint:
    """SGLang's native endpoint. Takes cumulative and incremental streams (`--incremental-streaming-output`) alike."""

    path = "/generate"

    def __init__(self) -> None:
        self._decoder = msgspec.json.Decoder(_GenerateEvent)

    def body(self, request: PlannedRequest, request_id: str) -> dict[str, Any]:
        sampling = {"max_new_tokens": request.output_tokens, "temperature": 0.0, "ignore_eos": True}
        body = {"rid": request_id, "input_ids": request.prompt_ids, "sampling_params": sampling, "stream": True}
        return body if request.salt is None else {**body, "cache_salt": request.salt}

    def fold(self, answer: Answer, event: bytes, now_ns: int) -> None:
        piece = _decode(self._decoder, event)
        if piece.error is not None:
            raise StreamError(error_message(piece.error))
        meta = piece.meta_info
        known = answer.output_ids or []
        # A cumulative event carries every id so far, and may already carry ids newer than its own count.
        answer.output_ids = (
            piece.output_ids if len(piece.output_ids) >= meta.completion_tokens else known + piece.output_ids
        )
        if len(answer.output_ids) < meta.completion_tokens:
            raise StreamError(f"expected {meta.completion_tokens} token ids so far, got {len(answer.output_ids)}")
        answer.grow(len(answer.output_ids), now_ns)
        answer.prompt_tokens, answer.cached_tokens = meta.prompt_tokens, meta.cached_tokens
        answer.num_retractions, answer.queue_s = meta.num_retractions, meta.queue_time
        if meta.finish_reason is not None:
            answer.finish_reason = meta.finish_reason.type
            if meta.finish_reason.type == "abort":
                raise StreamError(f"aborted: {meta.finish_reason.message or 'no reason given'}")


class _CachedDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int = 0
    prompt_tokens_details: _CachedDetails | None = None


class _Choice(msgspec.Struct):
    text: str = ""
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _CompletionEvent(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class CompletionsEndpoint:
    """The OpenAI endpoint, as SGLang and vLLM serve it. Token ids come back where the server knows `return_token_ids`;
    cached tokens where it reports them (SGLang: `--enable-cache-report`)."""

    path = "/v1/completions"

    def __init__(self, model: str) -> None:
        self._model = model
        self._decoder = msgspec.json.Decoder(_CompletionEvent)

    def body(self, request: PlannedRequest, request_id: str) -> dict[str, Any]:
        body = {
            "model": self._model,
            "prompt": request.prompt_ids,
            "max_tokens": request.output_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        return body if request.salt is None else {**body, "cache_salt": request.salt}

    def fold(self, answer: Answer, event: bytes, now_ns: int) -> None:
        piece = _decode(self._decoder, event)
        if piece.error is not None:
            raise StreamError(error_message(piece.error))
        for choice in piece.choices:
            if choice.token_ids is not None:
                answer.output_ids = (answer.output_ids or []) + choice.token_ids
                answer.grow(len(answer.output_ids), now_ns)
            elif choice.text:
                answer.grow(answer.num_tokens + 1, now_ns)  # corrected by the usage, which comes last
            answer.finish_reason = choice.finish_reason or answer.finish_reason
        if piece.usage is not None:
            answer.prompt_tokens = piece.usage.prompt_tokens
            if answer.output_ids is None:
                answer.num_tokens = piece.usage.completion_tokens
            if piece.usage.prompt_tokens_details is not None:
                answer.cached_tokens = piece.usage.prompt_tokens_details.cached_tokens
        if answer.finish_reason == "abort":
            raise StreamError("aborted: no reason given")


def _decode(decoder: msgspec.json.Decoder[Any], event: bytes) -> Any:
    try:
        return decoder.decode(event)
    except msgspec.MsgspecError as error:
        raise StreamError(f"expected an event of the stream, got {event[:80]!r}: {error}") from error


def error_message(content: object) -> str:
    """Return the message inside an error answer, whichever shape it has, on one line of at most 300 characters."""
    for key in ("error", "message", "detail"):
        if isinstance(content, dict) and key in content:
            content = content[key]
    return " ".join(str(content).split())[:300]


def split_events(buffer: bytearray) -> list[bytes]:
    """Take the complete `data:` events out of `buffer`, leaving the unfinished rest; `[DONE]` is dropped."""
    *lines, rest = bytes(buffer).split(b"\n")
    buffer[:] = rest
    events = [line[5:].strip() for line in lines if line.startswith(b"data:")]
    return [event for event in events if event != b"[DONE]"]
