"""One load run from end to end: ask the server who it is, plan, drive, keep the records, sum them up."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
from tqdm import tqdm

from bench.arrivals import ArrivalProcess
from bench.dataset import DatasetTokens
from bench.endpoints import CompletionsEndpoint, Endpoint, GenerateEndpoint
from bench.environment import describe_environment
from bench.load import LoadRun, LoadSettings
from bench.records import Ended, Manifest, PlannedRequest, RequestRecord, RunFolder
from bench.summary import Summary, summarize
from bench.workloads import Workload, digest, plan
from sgl_hybrid.errors import SettingError


class LoadCase(msgspec.Struct, frozen=True, kw_only=True):
    """What is sent: equal cases plan equal requests. `dataset` and `tokenizer` replace the random tokens."""

    workload: Workload
    arrivals: ArrivalProcess
    seed: int = 0
    isolate: bool = False
    dataset: Path | None = None
    tokenizer: Path | None = None

    def requests(self) -> list[PlannedRequest]:
        """Return the planned requests. Reads the dataset, if any. Raises: SettingError."""
        tokens = None
        if self.dataset is not None:
            if self.tokenizer is None:
                raise SettingError("expected a tokenizer folder (--tokenizer) with a dataset, got none")
            tokens = DatasetTokens(self.workload, self.seed, self.dataset, self.tokenizer)
        return plan(self.workload, self.arrivals, seed=self.seed, isolate=self.isolate, tokens=tokens)


class LoadResult(NamedTuple):
    """How a run ended and what it measured; `folder` holds the records."""

    ended: Ended
    summary: Summary
    folder: Path


class ServerFacts(NamedTuple):
    """What a server says about itself: the name of its model and, if it is SGLang, its settings."""

    model: str
    info: dict[str, Any] | None


def run_load(
    case: LoadCase,
    settings: LoadSettings,
    folder: Path,
    *,
    command: Sequence[str],
    flush_cache: bool = False,
    progress: bool = True,
    keep_prompts: bool = True,
    beside: Callable[[int], AbstractContextManager[None]] = lambda start_ns: contextlib.nullcontext(),
) -> LoadResult:
    """Drive `case` against the server of `settings` and leave the records in `folder`.

    Returns once every request has its record or the run was stopped (Ctrl-C) or the server is gone.
    keep_prompts: write workload.jsonl; without it the manifest's digest is what is left of the prompts. beside: what is
    to go on while requests are sent, entered with the run's zero on the monotonic clock [ns].
    Raises: SettingError if the case is malformed, the server cannot be reached or the folder holds another run; nothing
    has been sent then.
    """
    requests = case.requests()
    facts = asyncio.run(probe(settings.url, flush_cache=flush_cache))
    endpoint: Endpoint = GenerateEndpoint() if settings.api == "generate" else CompletionsEndpoint(facts.model)
    with RunFolder(folder) as run_folder:
        manifest = Manifest(
            run_id=uuid.uuid4().hex[:12],
            command=list(command),
            started_utc=datetime.now(UTC).isoformat(timespec="milliseconds"),
            started_monotonic_ns=time.monotonic_ns(),
            workload=_plain(case.workload),
            workload_sha256=digest(requests),
            arrivals=_plain(case.arrivals),
            seed=case.seed,
            isolate=case.isolate,
            load=_plain(settings),
            environment={**describe_environment(), "model": facts.model, "device": (facts.info or {}).get("device")},
        )
        if keep_prompts:
            run_folder.write_workload(requests)
        if facts.info is not None:
            run_folder.write_server_info(facts.info, "before")
        # The run's clock starts here: everything that takes time before the first request is done.
        manifest = msgspec.structs.replace(manifest, started_monotonic_ns=time.monotonic_ns())
        run_folder.write_manifest(manifest)
        records: list[RequestRecord] = []
        with _progress_bar(len(requests), progress) as bar:

            def keep(record: RequestRecord) -> None:
                records.append(record)
                run_folder.append(record)
                if record.status == "ok":
                    bar.update()
                bar.set_postfix(_postfix(records), refresh=False)

            run = LoadRun(requests, endpoint, settings, run_id=manifest.run_id, on_record=keep)
            with beside(manifest.started_monotonic_ns):
                ended = asyncio.run(run.run(manifest.started_monotonic_ns))
        if facts.info is not None and ended == "complete":
            with contextlib.suppress(SettingError):  # gone or busy: the run itself is complete
                run_folder.write_server_info(asyncio.run(probe(settings.url)).info or {}, "after")
        run_folder.write_manifest(msgspec.structs.replace(manifest, ended=ended))
    return LoadResult(ended, summarize(records), folder)


async def probe(url: str, *, flush_cache: bool = False) -> ServerFacts:
    """Ask the server for its model and settings; optionally have it empty its prefix cache.

    Raises: SettingError if nothing answers at `url`, or the flush is refused.
    """
    base = url.rstrip("/")
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
            async with session.get(f"{base}/v1/models") as response:
                response.raise_for_status()
                model = str((await response.json(content_type=None))["data"][0]["id"])
            if flush_cache:
                async with session.post(f"{base}/flush_cache") as response:
                    if response.status != 200:
                        raise SettingError(f"expected an idle server to flush, got HTTP {response.status} from {base}")
            async with session.get(f"{base}/server_info") as response:
                info = await response.json(content_type=None) if response.status == 200 else None
    except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
        if isinstance(error, SettingError):
            raise
        refused = isinstance(error, aiohttp.ClientConnectorError)
        reason = "no connection" if refused else str(error) or type(error).__name__
        raise SettingError(f"expected a running SGLang or OpenAI-compatible server at {base}, got: {reason}") from error
    return ServerFacts(model, info)


def _plain(struct: msgspec.Struct) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(struct)
    return plain


def _progress_bar(total: int, show: bool) -> tqdm[None]:
    # disable=None: no bar where stderr is not a terminal. leave=None: a bar below another one goes when it is done.
    return tqdm(total=total, unit="req", dynamic_ncols=True, leave=None, disable=None if show else True)


def _postfix(records: Sequence[RequestRecord]) -> dict[str, str]:
    tokens = sum(record.output_tokens for record in records)
    latest_ns = max((record.done_ns or 0) for record in records)
    failed = sum(record.status == "failed" for record in records)
    rate = {"tok/s": f"{tokens / (latest_ns / 1e9):.0f}"} if latest_ns > 0 else {}
    return {**rate, **({"failed": str(failed)} if failed else {})}
