"""How fast the host is at this moment: the processor time that a fixed piece of work takes.

On a shared host the same steps of the same requests can take half as long again for minutes, while nothing else runs in
the machine. The time is the thread's own, so waiting for a core does not count; only work that takes longer does.
"""

from __future__ import annotations

import time

import msgspec

from bench.campaign.folder import Row

ROUNDS = 20_000
"""About 2 ms of a processor, once a second."""
HOST_ATTEMPTS = 3
"""An invocation measures a cell so often at most until the host is fast enough."""


def host_ms() -> float:
    """Do the work once and return the processor time that it took [ms]."""
    begun_ns = time.thread_time_ns()
    total = 0
    for number in range(ROUNDS):
        total += number * number
    return (time.thread_time_ns() - begun_ns) / 1e6


def judge_host(row: Row, limit_ms: float | None) -> Row:
    """Return the row of an attempt, as one that does not count if the host was slower than the limit on the average.

    Its numbers stay in the row. They are not looked at: the time of the fixed work alone decides.
    """
    found_ms = row.outcome.metrics.get("host_ms")
    if row.outcome.status != "ok" or limit_ms is None or found_ms is None or found_ms <= limit_ms:
        return row
    reason = f"slow host: {found_ms:.2f} ms for the fixed work, more than --host-limit {limit_ms:g}"
    return msgspec.structs.replace(row, outcome=msgspec.structs.replace(row.outcome, status="slow", reason=reason))
