"""Bookkeeping of D0's two static pools: what each allocation check found, and how many bytes were stranded.

A check compares the units a pool must hand out (`need`) with the units it could hand out (`free`, which includes cached
units that may be evicted). It succeeds when `need <= free`. The pools are separate: capacity never moves between them,
so a request waits as soon as either check fails.

Source: paper sections 3.5, B.4 and E.2 (table E-10).
"""

from __future__ import annotations

import enum

import msgspec

from sgl_hybrid.errors import InvariantError


class Pool(enum.StrEnum):
    ATTENTION = "attention"
    RECURRENT = "recurrent"


class Outcome(enum.StrEnum):
    """What the scheduler did after a check: went on, left the request waiting, or took a running request back."""

    GRANTED = "granted"
    DEFERRED = "deferred"
    PREEMPTED = "preempted"


class PoolCounts(msgspec.Struct):
    """Counts of allocation checks of one pool.

    granted: need <= free, free > 0. granted_with_none_free: need = 0 and free = 0 (a full pool alone is no shortage).
    short: need > free > 0. exhausted: need > free = 0. deferred, preempted: outcomes of failed checks of this pool.
    """

    granted: int = 0
    granted_with_none_free: int = 0
    short: int = 0
    exhausted: int = 0
    deferred: int = 0
    preempted: int = 0


class DualPoolLedger:
    """Counters of D0 since start.

    units: units of each pool. unit_bytes: bytes of one unit over all layers.
    """

    def __init__(self, units: dict[Pool, int], unit_bytes: dict[Pool, int]) -> None:
        self.units = dict(units)
        self.unit_bytes = dict(unit_bytes)
        self.counts = {pool: PoolCounts() for pool in Pool}
        self.steps = 0
        self.stranded_byte_steps = 0

    def record_check(self, pool: Pool, *, need: int, free: int, outcome: Outcome) -> None:
        """Count one check. `outcome` is counted only if this pool failed the check: the other pool's shortage is not
        this pool's.

        Raises:
            ValueError: need or free is negative.
        """
        if need < 0 or free < 0:
            raise ValueError(f"expected need and free from 0 on, got need={need}, free={free} {pool} units")
        counts = self.counts[pool]
        if need <= free:
            if free > 0:
                counts.granted += 1
            else:
                counts.granted_with_none_free += 1
            return
        if free > 0:
            counts.short += 1
        else:
            counts.exhausted += 1
        if outcome is Outcome.DEFERRED:
            counts.deferred += 1
        elif outcome is Outcome.PREEMPTED:
            counts.preempted += 1

    def record_step(self, free: dict[Pool, int]) -> None:
        """Count one scheduler step: the free bytes of a pool are stranded while the other pool has none free."""
        self.steps += 1
        if free[Pool.ATTENTION] == 0:
            self.stranded_byte_steps += free[Pool.RECURRENT] * self.unit_bytes[Pool.RECURRENT]
        elif free[Pool.RECURRENT] == 0:
            self.stranded_byte_steps += free[Pool.ATTENTION] * self.unit_bytes[Pool.ATTENTION]

    @property
    def configured_bytes(self) -> int:
        return sum(self.units[pool] * self.unit_bytes[pool] for pool in Pool)

    @property
    def stranded_fraction(self) -> float:
        """Stranded bytes over configured bytes, both summed over the same steps (step-weighted, not time-weighted).
        Source: paper section B.4."""
        if self.steps == 0:
            return 0.0
        return self.stranded_byte_steps / (self.steps * self.configured_bytes)

    def check(self, free: dict[Pool, int], held: dict[Pool, int], cached: dict[Pool, int]) -> None:
        """Verify free + held by requests + cached = total for each pool.

        Raises:
            InvariantError: a pool's ledger does not balance.
        """
        for pool in Pool:
            found = free[pool] + held[pool] + cached[pool]
            if found != self.units[pool]:
                raise InvariantError(
                    f"{pool} pool: free {free[pool]} + held {held[pool]} + cached {cached[pool]} = {found}, "
                    f"expected {self.units[pool]} units"
                )

    def snapshot(self, shared: bool) -> dict[str, object]:
        """The counters as plain values, for `/server_info` and for metrics. A shared pool strands nothing by
        construction: the field is absent there, not zero."""
        checks = {pool.value: msgspec.structs.asdict(self.counts[pool]) for pool in Pool}
        if shared:
            return {"checks": checks}
        return {"steps": self.steps, "stranded_byte_fraction": self.stranded_fraction, "checks": checks}
