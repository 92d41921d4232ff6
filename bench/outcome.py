"""What one cell of a campaign came to: the row that the statistics, the figures and the report are made from.

A cell is one arm at one condition with one seed. A campaign keeps one `CellOutcome` for every attempt at a cell, the
failed ones too; `adopted` picks the attempt that counts. Nothing here reads or writes files.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

import msgspec


class Condition(NamedTuple):
    """All that is equal between the two sides of a paired comparison of arms, but for the seed."""

    case: str
    budget: str
    q: float
    rate: float
    cap: int | None
    headroom: float
    variant: str


class CellIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Which cell: one arm at one condition with one seed.

    budget: label or bytes, as given. q: common-prefix fraction. rate: offered requests/s. cap: most requests that run
    at once, None where the server chose. headroom: admission headroom f. variant: what else sets cells of one case
    apart (`isolate`, `share`, `onoff`, `split=0.477`, `pin=2`), empty where nothing does.
    """

    case: str
    arm: str
    budget: str
    seed: int
    q: float
    rate: float
    cap: int | None = None
    headroom: float = 0.0
    variant: str = ""

    @property
    def condition(self) -> Condition:
        """Return what this cell has in common with its partner in a comparison of arms."""
        return Condition(self.case, self.budget, self.q, self.rate, self.cap, self.headroom, self.variant)


class CellOutcome(CellIdentity, frozen=True, kw_only=True):
    """One attempt at one cell.

    metrics: keys of `bench.metrics.METRICS`, without those that could not be formed. counters: what client, server and
    gauges counted, by name. status: `slow` is a measured attempt that does not count, because the host was slower than
    the campaign's limit. reason: why a cell does not count, or what numbers a measured one lacks and why, in one line.
    attempt: 1 for the first.
    """

    metrics: dict[str, float] = {}
    counters: dict[str, float] = {}
    status: Literal["ok", "failed", "refused", "slow"] = "ok"
    reason: str | None = None
    attempt: int = 1


def adopted(outcomes: Iterable[CellOutcome]) -> list[CellOutcome]:
    """Return one outcome for every cell: its first `ok` attempt, or the last attempt where none is.

    The first, so that running a cell again cannot choose the better number. Order: first appearance of the cell.
    Source: paper appendices B.5 and E.14 (documented attempts, adoption).
    """
    chosen: dict[tuple[Condition, str, int], CellOutcome] = {}
    for outcome in outcomes:
        key = (outcome.condition, outcome.arm, outcome.seed)
        held = chosen.get(key)
        if held is None or _rank(outcome) > _rank(held):
            chosen[key] = outcome
    return list(chosen.values())


def _rank(outcome: CellOutcome) -> tuple[bool, int]:
    ok = outcome.status == "ok"
    return ok, -outcome.attempt if ok else outcome.attempt
