"""One-second samples of a server's gauges and counters: `gauges.jsonl`, one `GaugeSample` a line.

Invariant: times are on the clock of the run's records (nanoseconds after its start) and rise from line to line.
"""

from __future__ import annotations

import msgspec


class GaugeSample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the server said at one moment. None: not reported, which is not zero.

    running, waiting: requests. input_tokens: prompt tokens computed since the server's start (cached ones are not);
    output_tokens: tokens generated since; steps: forward passes since; preemptions: requests taken back since.
    host_ms: processor time of a fixed piece of work on this machine (`bench.campaign.host`).
    other: further gauges by their own name.
    """

    at_ns: int
    running: float | None = None
    waiting: float | None = None
    input_tokens: float | None = None
    output_tokens: float | None = None
    steps: float | None = None
    preemptions: float | None = None
    host_ms: float | None = None
    other: dict[str, float] = {}
