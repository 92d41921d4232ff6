"""Latencies of the requests of one run, and the latency-qualified part of its output.

Over several runs, percentiles of runs are averaged; requests of different runs are never pooled.
Source: paper section 4.1 (run-level percentiles), appendices B.4 and E.8 (goodput), B.12 (request TPOT).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np

from bench.metrics.windows import known, request_span
from bench.records import RequestRecord

NS_PER_MS = 1_000_000


class Spread(msgspec.Struct, frozen=True):
    """Median and 99th percentile."""

    p50: float
    p99: float


def ttft_ms(record: RequestRecord) -> float:
    """Return first token minus sent."""
    return (known(record.first_token_ns) - known(record.sent_ns)) / NS_PER_MS


def tpot_ms(record: RequestRecord) -> float | None:
    """Return the mean gap between the tokens of the request, or None for a single token."""
    if record.output_tokens < 2:
        return None
    return (known(record.last_token_ns) - known(record.first_token_ns)) / (record.output_tokens - 1) / NS_PER_MS


def e2e_ms(record: RequestRecord) -> float:
    """Return last token minus sent."""
    return (known(record.last_token_ns) - known(record.sent_ns)) / NS_PER_MS


def queue_ms(record: RequestRecord) -> float | None:
    """Return the time in the server's waiting queue as it reports it, or None where it does not."""
    return None if record.queue_ns is None else record.queue_ns / NS_PER_MS


LATENCIES: dict[str, Callable[[RequestRecord], float | None]] = {
    "ttft": ttft_ms,
    "tpot": tpot_ms,
    "e2e": e2e_ms,
    "queue": queue_ms,
}


def spread(values: Iterable[float | None]) -> Spread | None:
    """Return median and 99th percentile of the values that are not None (linear interpolation); None if none is."""
    present = [value for value in values if value is not None]
    if not present:
        return None
    p50, p99 = np.percentile(np.asarray(present, dtype=np.float64), [50, 99]).tolist()
    return Spread(p50, p99)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Largest latency allowed of one request [ms]; None does not limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def __str__(self) -> str:
        named = {"TTFT": self.ttft_ms, "TPOT": self.tpot_ms, "E2E": self.e2e_ms}
        return " and ".join(f"{name} {limit:g} ms" for name, limit in named.items() if limit is not None) or "none"

    def hold(self, record: RequestRecord) -> bool:
        """Return whether a request was answered in full and within every limit. A single token has no TPOT to fail."""
        if record.status != "ok":
            return False
        pairs = (
            (ttft_ms(record), self.ttft_ms),
            (tpot_ms(record), self.tpot_ms),
            (e2e_ms(record), self.e2e_ms),
        )
        return all(value is None or limit is None or value <= limit for value, limit in pairs)


class Goodput(msgspec.Struct, frozen=True):
    """Output tokens of the requests within limits over the request span, and their share of all planned requests."""

    output_tokens_per_s: float
    share: float


def goodput(records: Sequence[RequestRecord], limits: Limits) -> Goodput | None:
    """Return the latency-qualified goodput of one run, or None if no request was answered in full."""
    span = request_span(records)
    if span is None or span.seconds <= 0:
        return None
    good = [record for record in records if limits.hold(record)]
    return Goodput(sum(record.output_tokens for record in good) / span.seconds, len(good) / len(records))


def empirical_limits(records: Iterable[RequestRecord], *, percentile: float = 99.0) -> Limits:
    """Return the E2E and TPOT limits that a share of the given requests kept.

    Give a comparator's records for its limits, or those of both sides for the limits of their union. Such limits come
    from the requests they are applied to: they show how a difference depends on the definition of good, and are no
    service objective. percentile: the paper does not state its own; the default is ours.

    Raises: ValueError if no request was answered in full.
    """
    ok = [record for record in records if record.status == "ok"]
    if not ok:
        raise ValueError("expected at least one request answered in full to take limits from, got none")
    tpots = [value for record in ok if (value := tpot_ms(record)) is not None]
    return Limits(
        e2e_ms=float(np.percentile([e2e_ms(record) for record in ok], percentile)),
        tpot_ms=float(np.percentile(tpots, percentile)) if tpots else None,
    )
