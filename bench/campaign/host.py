"""How fast the host is at this moment: the processor time that a fixed piece of work takes.

On a shared host the same steps of the same requests can take half as long again for minutes, while nothing else runs in
the machine. The time is the thread's own, so waiting for a core does not count; only work that takes longer does.
"""

from __future__ import annotations

import time

ROUNDS = 20_000
"""About 2 ms of a processor, once a second."""


def host_ms() -> float:
    """Do the work once and return the processor time that it took [ms]."""
    begun_ns = time.thread_time_ns()
    total = 0
    for number in range(ROUNDS):
        total += number * number
    return (time.thread_time_ns() - begun_ns) / 1e6
