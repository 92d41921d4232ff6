"""The folder of a campaign: which cells were tried, what each attempt came to, and where its records are.

    campaign.json              what campaign this is (`bench.manifest`)
    sessions.jsonl             every invocation that worked on it
    outcomes.jsonl             one `Row` a line, added when an attempt has ended and synced to the disk at once
    cells/KEY/attempt-N/       records of one attempt at one cell

Invariants: one campaign at a time works on a folder; an attempt's folder is never used twice, so no attempt overwrites
another; a row is added once per attempt, and an attempt whose process died gets its row when the folder is next opened.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from bench.atomic import write_whole
from bench.campaign.manifest import CampaignManifest, Session, differences
from bench.cells import Cell
from bench.outcome import CellOutcome
from sgl_hybrid.errors import SettingError

INTERRUPTED = "interrupted: the campaign was stopped or killed while the cell ran"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at one cell. `seconds` is from the start of its server to its stop."""

    key: str
    seconds: float
    outcome: CellOutcome


class CampaignFolder:
    """A campaign's folder, open for work. A context manager; entering takes its lock."""

    def __init__(self, path: Path, manifest: CampaignManifest) -> None:
        self.path = path
        self._manifest = manifest
        self._encoder = msgspec.json.Encoder()
        self.rows: list[Row] = []

    def __enter__(self) -> Self:
        """Make the folder or go on with it.

        Raises: SettingError if it cannot be written, holds something else or another campaign, or is in use.
        """
        try:
            self._check()
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / ".lock", "ab")
        except OSError as error:
            message = f"expected an output folder that can be written, got {self.path}: {error.strerror}"
            raise SettingError(message) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise SettingError(f"expected a folder that no other campaign works on, got {self.path}") from error
        if not (self.path / "campaign.json").is_file():
            write_whole(
                self.path / "campaign.json", msgspec.json.format(self._encoder.encode(self._manifest), indent=2) + b"\n"
            )
        self.rows = read_rows(self.path) if (self.path / "outcomes.jsonl").is_file() else []
        self._mend()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.close()

    def begin_session(self, session: Session) -> None:
        """Note that an invocation begins to work on the folder."""
        self._append("sessions.jsonl", self._encoder.encode(session))

    def pending(self, cells: list[Cell], *, retry_failed: bool) -> list[Cell]:
        """Return the cells that have no `ok` attempt, without the failed ones unless they are to be tried again."""
        ok, failed = self.ended()
        return [cell for cell in cells if cell.key not in (ok if retry_failed else ok | failed)]

    def ended(self) -> tuple[set[str], set[str]]:
        """Return the keys of the cells that have an `ok` attempt, and of the others whose last one was not cut off."""
        ok = {row.key for row in self.rows if row.outcome.status == "ok"}
        last = {row.key: row.outcome.reason for row in self.rows}
        return ok, {key for key, reason in last.items() if reason != INTERRUPTED} - ok

    def begin(self, cell: Cell) -> tuple[int, Path]:
        """Make the folder of the cell's next attempt and return its number, from 1, and the folder."""
        attempt = 1 + len(list((self.path / "cells" / cell.key).glob("attempt-*")))
        folder = self.path / "cells" / cell.key / f"attempt-{attempt}"
        folder.mkdir(parents=True)
        write_whole(folder / "condition.json", self._encoder.encode(cell))
        return attempt, folder

    def finish(self, row: Row) -> None:
        """Add the row of an attempt; it is on the disk when this returns."""
        self.rows.append(row)
        self._append("outcomes.jsonl", self._encoder.encode(row))

    def _check(self) -> None:
        """Raise SettingError if the folder holds something that is not this campaign. Touches nothing."""
        if not self.path.is_dir() or not any(name.name != ".lock" for name in self.path.iterdir()):
            return
        found = read_manifest(self.path)
        others = differences(self._manifest, found)
        if others:
            raise SettingError(f"expected a folder of this campaign, got {self.path} of another ({'; '.join(others)})")

    def _mend(self) -> None:
        """Cut off a last row that a crash left half-written, and add rows for attempts that never got theirs."""
        path = self.path / "outcomes.jsonl"
        if path.is_file():
            content = path.read_bytes()
            whole = content[: content.rfind(b"\n") + 1]
            if whole != content:
                write_whole(self.path / "outcomes.jsonl", whole)
        known = {(row.key, row.outcome.attempt) for row in self.rows}
        for condition in sorted(self.path.glob("cells/*/attempt-*/condition.json")):
            attempt = int(condition.parent.name.removeprefix("attempt-"))
            key = condition.parent.parent.name
            if (key, attempt) not in known:
                cell = msgspec.json.decode(condition.read_bytes(), type=Cell)
                self.finish(Row(key=key, seconds=0.0, outcome=outcome_of(cell, attempt, "failed", INTERRUPTED)))

    def _append(self, name: str, line: bytes) -> None:
        with open(self.path / name, "ab") as file:
            file.write(line + b"\n")
            file.flush()
            os.fsync(file.fileno())


def outcome_of(
    cell: Cell,
    attempt: int,
    status: str,
    reason: str | None = None,
    *,
    metrics: dict[str, float] | None = None,
    counters: dict[str, float] | None = None,
) -> CellOutcome:
    """Return the outcome of an attempt at a cell."""
    condition = {name: getattr(cell, name) for name in Cell.__struct_fields__ if name != "num_requests"}
    found = {
        "attempt": attempt,
        "status": status,
        "reason": reason,
        "metrics": metrics or {},
        "counters": counters or {},
    }
    return msgspec.convert({**condition, **found}, CellOutcome)


def read_manifest(folder: Path) -> CampaignManifest:
    """Return which campaign a folder holds. Raises: SettingError if it holds none."""
    try:
        return msgspec.json.decode((folder / "campaign.json").read_bytes(), type=CampaignManifest)
    except OSError as error:
        raise SettingError(f"expected a campaign's folder with campaign.json, got {folder}") from error
    except msgspec.MsgspecError as error:
        raise SettingError(f"expected campaign.json of this version in {folder}, got: {error}") from error


def read_rows(folder: Path) -> list[Row]:
    """Return the rows of a campaign in the order in which the attempts ended; a line cut off by a crash is left out.

    Raises: SettingError if there are none or a whole line does not fit the schema.
    """
    decoder = msgspec.json.Decoder(Row)
    try:
        return [decoder.decode(line) for line in (folder / "outcomes.jsonl").read_bytes().split(b"\n")[:-1]]
    except OSError as error:
        raise SettingError(f"expected a campaign's folder with finished cells, got {folder}") from error
    except msgspec.MsgspecError as error:
        raise SettingError(f"expected outcomes.jsonl of this version in {folder}, got: {error}") from error


def read_sessions(folder: Path) -> list[Session]:
    """Return every invocation that worked on a campaign. Raises: SettingError as `read_rows`."""
    decoder = msgspec.json.Decoder(Session)
    try:
        return [decoder.decode(line) for line in (folder / "sessions.jsonl").read_bytes().split(b"\n")[:-1]]
    except (OSError, msgspec.MsgspecError) as error:
        raise SettingError(f"expected a campaign's folder with sessions.jsonl, got {folder}: {error}") from error
