"""Records of a run: their schema, and the folder that holds them.

    manifest.json      what was run, on what, and how it ended
    workload.jsonl     one PlannedRequest a line, written before the first request is sent
    requests.jsonl     one RequestRecord a line, in order of completion, flushed one by one
    server_before.json, server_after.json
                       what the server said about itself, its counters among it, where it says anything

Every time is in nanoseconds of the monotonic clock after the run's start; `Manifest.started_monotonic_ns` ties it to
other logs of the same machine. Invariants: a folder is filled by one run only; every planned request has exactly one
record, whatever became of it, once the run has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import msgspec

from bench.atomic import write_whole
from sgl_hybrid.errors import SettingError

SCHEMA_VERSION = 1

Ended = Literal["running", "complete", "interrupted", "server lost"]

Row = TypeVar("Row", bound=msgspec.Struct)


class PlannedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request as planned. The first `common_tokens` of the prompt are those of its context."""

    index: int
    context_id: int
    common_tokens: int
    planned_ns: int
    output_tokens: int
    salt: str | None
    prompt_ids: list[int]


class Retry(msgspec.Struct, frozen=True):
    """An attempt that failed before any byte of an answer came, and was made again."""

    at_ns: int
    reason: str


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One request as measured.

    status: `ok` answered in full; `failed` refused, broken off or aborted (`error` says why); `cancelled` in flight
    when the run was stopped; `unsent` not sent before that. `sent_ns` is when the attempt that counts was begun. Token
    times are those at which the client read the piece of the stream that carried the token. `cached_tokens`,
    `num_retractions` and `queue_ns` (in the server's waiting queue, all stays together) are None where the server does
    not report them, `output_ids` where it returns text only.
    """

    index: int
    context_id: int
    salt: str | None
    status: Literal["ok", "failed", "cancelled", "unsent"]
    planned_ns: int
    prompt_tokens: int
    target_tokens: int
    sent_ns: int | None = None
    first_token_ns: int | None = None
    last_token_ns: int | None = None
    done_ns: int | None = None
    output_tokens: int = 0
    cached_tokens: int | None = None
    num_retractions: int | None = None
    queue_ns: int | None = None
    finish_reason: str | None = None
    error: str | None = None
    retries: list[Retry] = []
    output_ids: list[int] | None = None
    token_times_ns: list[int] | None = None


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a run was. `ended` is `running` until the run is over."""

    schema_version: int = SCHEMA_VERSION
    run_id: str
    command: list[str]
    started_utc: str
    started_monotonic_ns: int
    ended: Ended = "running"
    workload: dict[str, Any]
    workload_sha256: str
    arrivals: dict[str, Any]
    seed: int
    isolate: bool
    load: dict[str, Any]
    environment: dict[str, Any]


class RunFolder:
    """The folder of one run, open for writing. A context manager; leaving it closes the files."""

    def __init__(self, path: Path) -> None:
        """Make `path`, which must be new or empty. Raises: SettingError otherwise."""
        try:
            path.mkdir(parents=True, exist_ok=True)
            if any(path.iterdir()):
                raise SettingError(f"expected a new or empty output folder, got {path}, which holds another run")
            self._requests = open(path / "requests.jsonl", "xb")  # noqa: SIM115 - closed by __exit__
        except OSError as error:
            raise SettingError(
                f"expected an output folder that can be written, got {path}: {error.strerror}"
            ) from error
        self.path = path
        self._encoder = msgspec.json.Encoder()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._requests.close()

    def write_manifest(self, manifest: Manifest) -> None:
        """Write or replace manifest.json; a reader sees the old one or the new one, never a part."""
        write_whole(self.path / "manifest.json", msgspec.json.format(self._encoder.encode(manifest), indent=2) + b"\n")

    def write_server_info(self, info: dict[str, Any], when: Literal["before", "after"]) -> None:
        """Write what the server said about itself before or after the run."""
        write_whole(
            self.path / f"server_{when}.json", msgspec.json.format(self._encoder.encode(info), indent=2) + b"\n"
        )

    def write_workload(self, requests: Iterable[PlannedRequest]) -> None:
        """Write workload.jsonl."""
        write_whole(
            self.path / "workload.jsonl", b"".join(self._encoder.encode(request) + b"\n" for request in requests)
        )

    def append(self, record: RequestRecord) -> None:
        """Add a line to requests.jsonl and hand it to the operating system at once."""
        self._requests.write(self._encoder.encode(record) + b"\n")
        self._requests.flush()


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a run. Raises: SettingError if `folder` holds none or it does not fit the schema."""
    return _read_rows(folder / "manifest.json", Manifest, lambda content: [content])[0]


def read_records(folder: Path) -> list[RequestRecord]:
    """Return the records of a run in order of completion. A last line cut off by a crash is left out.

    Raises: SettingError if the file is missing or a complete line does not fit the schema.
    """
    return _read_rows(folder / "requests.jsonl", RequestRecord, _complete_lines)


def read_workload(folder: Path) -> list[PlannedRequest]:
    """Return the planned requests of a run in order of arrival. Raises: SettingError as `read_records`."""
    return _read_rows(folder / "workload.jsonl", PlannedRequest, _complete_lines)


def _complete_lines(content: bytes) -> list[bytes]:
    return content.split(b"\n")[:-1]


def _read_rows(path: Path, kind: type[Row], split: Callable[[bytes], list[bytes]]) -> list[Row]:
    decoder = msgspec.json.Decoder(kind)
    try:
        return [decoder.decode(piece) for piece in split(path.read_bytes())]
    except OSError as error:
        raise SettingError(f"expected a run folder with {path.name}, got {path.parent}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise SettingError(f"expected records of schema {SCHEMA_VERSION} in {path}, got: {error}") from error
