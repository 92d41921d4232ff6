"""The load generator: sends planned requests at their planned times and records what came back.

Open loop: a request starts at its planned time whatever became of earlier ones, unless a concurrency cap makes it wait
(its `sent_ns` says so). Only a connection that failed before any byte of an answer is retried, a bounded number of
times, each with its reason. Every request ends as one record, written as soon as it is known; a lost server or a stop
by the user ends the run and keeps what was measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

import aiohttp
import msgspec

from bench.endpoints import Answer, Endpoint, StreamError, error_message, split_events
from bench.records import Ended, PlannedRequest, RequestRecord, Retry
from sgl_hybrid.errors import SettingError


class LoadSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How the load is sent. `max_concurrency` None sends every request at its planned time."""

    url: str = "http://127.0.0.1:30000"
    api: str = "generate"
    max_concurrency: int | None = None
    max_retries: int = 2
    retry_delay_s: float = 0.5
    timeout_s: float = 600.0
    keep_token_times: bool = False

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise SettingError(f"expected a server address such as http://127.0.0.1:30000, got {self.url!r}")
        if self.api not in ("generate", "completions"):
            raise SettingError(f"expected an api of generate or completions, got {self.api!r}")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise SettingError(f"expected a concurrency cap of at least 1 request, got {self.max_concurrency}")
        if self.max_retries < 0:
            raise SettingError(f"expected at least 0 retries, got {self.max_retries}")
        if not self.timeout_s > 0:
            raise SettingError(f"expected a timeout above 0 s, got {self.timeout_s} s")


class _Trial:
    """What is known of one request while it runs."""

    def __init__(self) -> None:
        self.sent_ns: int | None = None
        self.answer = Answer()
        self.retries: list[Retry] = []
        self.answering = False


class _Outcome(NamedTuple):
    status: Literal["ok", "failed", "cancelled", "unsent"]
    error: str | None = None


class LoadRun:
    """One run of planned requests against one endpoint. `on_record` gets each record once, in order of completion."""

    def __init__(
        self,
        requests: Sequence[PlannedRequest],
        endpoint: Endpoint,
        settings: LoadSettings,
        *,
        run_id: str,
        on_record: Callable[[RequestRecord], None],
    ) -> None:
        self._unrecorded = {request.index: request for request in requests}
        self._endpoint = endpoint
        self._settings = settings
        self._run_id = run_id
        self._on_record = on_record
        self._encode = msgspec.json.Encoder().encode

    async def run(self, start_ns: int) -> Ended:
        """Send everything and return how the run ended. `start_ns` is the run's zero on the monotonic clock."""
        self._start_ns = start_ns
        self._stop: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        cap = self._settings.max_concurrency
        self._slots = contextlib.nullcontext() if cap is None else asyncio.Semaphore(cap)
        timeout = aiohttp.ClientTimeout(total=self._settings.timeout_s)
        # One connection per request: a kept-alive one can be closed under a request and look like a failure.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        with self._stop_on_signals():
            async with aiohttp.ClientSession(connector=connector, timeout=timeout) as self._session:
                tasks = [asyncio.create_task(self._record(request)) for request in self._unrecorded.values()]
                try:
                    ended = await self._stop
                finally:
                    for task in tasks:
                        task.cancel()
                    await asyncio.wait(tasks)
        for request in self._unrecorded.values():  # tasks that were cancelled before their first step
            self._on_record(self._finish(request, _Trial(), _Outcome("unsent")))
        return ended

    @contextlib.contextmanager
    def _stop_on_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)
        for number in signals:
            loop.add_signal_handler(number, self._end, "interrupted")
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    def _end(self, how: Ended) -> None:
        if not self._stop.done():
            self._stop.set_result(how)

    def _now_ns(self) -> int:
        return time.monotonic_ns() - self._start_ns

    async def _record(self, request: PlannedRequest) -> None:
        trial = _Trial()
        outcome = _Outcome("unsent")
        try:
            # A timer of the event loop may fire a fraction of a millisecond early; a request never starts early.
            while (wait_ns := request.planned_ns - self._now_ns()) > 0:
                await asyncio.sleep(wait_ns / 1e9)
            async with self._slots:
                outcome = _Outcome("cancelled", "the run was stopped")
                outcome = await self._attempts(request, trial)
        finally:
            self._keep(self._finish(request, trial, outcome))

    def _keep(self, record: RequestRecord) -> None:
        """Hand out one record; the last one ends the run, and so does a record that cannot be kept."""
        del self._unrecorded[record.index]
        try:
            self._on_record(record)
        except Exception as error:
            if not self._stop.done():
                self._stop.set_exception(error)
        if not self._unrecorded:
            self._end("complete")

    async def _attempts(self, request: PlannedRequest, trial: _Trial) -> _Outcome:
        """Try until answered or out of retries. Ends the run if the server turns out to be gone."""
        for attempt in range(self._settings.max_retries + 1):
            trial.sent_ns = self._now_ns()
            try:
                await self._stream(request, trial, f"{self._run_id}-{request.index}-{attempt}")
            except StreamError as error:
                return _Outcome("failed", str(error))
            except TimeoutError:
                return _Outcome("failed", f"no answer in full within {self._settings.timeout_s} s")
            except (aiohttp.ClientError, OSError) as error:
                reason = f"{type(error).__name__}: {error}"
                if trial.answering or attempt == self._settings.max_retries:
                    if not await is_listening(self._settings.url):
                        self._end("server lost")
                    return _Outcome("failed", f"connection lost: {reason}")
                trial.retries.append(Retry(self._now_ns(), reason))
                await asyncio.sleep(self._settings.retry_delay_s * (attempt + 1))
            else:
                return _Outcome("ok")
        raise AssertionError("the last attempt returns")

    async def _stream(self, request: PlannedRequest, trial: _Trial, request_id: str) -> None:
        """Send one attempt and fold its stream into the trial. Raises: StreamError and aiohttp's errors."""
        url = self._settings.url.rstrip("/") + self._endpoint.path
        body = self._encode(self._endpoint.body(request, request_id))
        headers = {"Content-Type": "application/json"}
        async with self._session.post(url, data=body, headers=headers) as response:
            trial.answering = True
            if response.status != 200:
                raise StreamError(f"HTTP {response.status}: {error_message(await _json_or_text(response))}")
            pending = bytearray()
            async for piece in response.content.iter_any():
                now_ns = self._now_ns()
                pending += piece
                for event in split_events(pending):
                    self._endpoint.fold(trial.answer, event, now_ns)
        if trial.answer.finish_reason is None:
            raise StreamError(f"the stream ended after {trial.answer.num_tokens} tokens without a finish reason")
        if not trial.answer.token_times_ns:
            raise StreamError("the stream ended without a token")

    def _finish(self, request: PlannedRequest, trial: _Trial, outcome: _Outcome) -> RequestRecord:
        answer, times = trial.answer, trial.answer.token_times_ns
        return RequestRecord(
            index=request.index,
            context_id=request.context_id,
            salt=request.salt,
            status=outcome.status,
            error=outcome.error,
            planned_ns=request.planned_ns,
            prompt_tokens=len(request.prompt_ids),
            target_tokens=request.output_tokens,
            sent_ns=trial.sent_ns,
            first_token_ns=times[0] if times else None,
            last_token_ns=times[-1] if times else None,
            done_ns=self._now_ns(),
            output_tokens=answer.num_tokens,
            cached_tokens=answer.cached_tokens,
            num_retractions=answer.num_retractions,
            queue_ns=None if answer.queue_s is None else round(answer.queue_s * 1e9),
            finish_reason=answer.finish_reason,
            retries=trial.retries,
            output_ids=answer.output_ids,
            token_times_ns=times if self._settings.keep_token_times else None,
        )


async def _json_or_text(response: aiohttp.ClientResponse) -> object:
    content = await response.read()
    try:
        return msgspec.json.decode(content)
    except msgspec.MsgspecError:
        return content.decode(errors="replace")


async def is_listening(url: str) -> bool:
    """Return whether something accepts connections at the address, within five seconds."""
    address = urlsplit(url)
    port = address.port or (443 if address.scheme == "https" else 80)
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(address.hostname, port), 5)
    except OSError:  # TimeoutError is one
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True
