"""The numbers of one run, from its records.

Throughput counts the output tokens of requests answered in full, over the request span: from the first request sent to
the last token of the last request answered in full. TTFT is first token minus sent, TPOT the mean gap between the
tokens of one request, E2E last token minus sent, queue what the server reports of its waiting queue; percentiles are
over the requests answered in full, by linear interpolation. A number that cannot be formed is None, not zero.
Source: paper section 4.1 (throughput, request span, latencies).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
from rich.table import Table

from bench.metrics.latency import NS_PER_MS, Spread, e2e_ms, queue_ms, spread, tpot_ms, ttft_ms
from bench.metrics.windows import known, request_span
from bench.records import RequestRecord

__all__ = ["Spread", "Summary", "summarize", "summary_table"]


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One run in numbers. `num_short` counts answers in full with another number of tokens than was asked for."""

    num_requests: int
    num_ok: int
    num_failed: int
    num_cancelled: int
    num_unsent: int
    num_short: int
    num_retries: int
    span_s: float | None
    output_tokens: int
    output_tokens_per_s: float | None
    prompt_tokens: int
    cached_tokens: int | None
    num_preemptions: int | None
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    e2e_ms: Spread | None
    queue_ms: Spread | None
    start_lag_ms: Spread | None


def summarize(records: Sequence[RequestRecord]) -> Summary:
    """Return the numbers of a run. The records may come in any order."""
    status = Counter(record.status for record in records)
    ok = [record for record in records if record.status == "ok"]
    sent = [record for record in records if record.sent_ns is not None]
    output_tokens = sum(record.output_tokens for record in ok)
    span = request_span(records)
    span_s = span.seconds if span else None
    return Summary(
        num_requests=len(records),
        num_ok=status["ok"],
        num_failed=status["failed"],
        num_cancelled=status["cancelled"],
        num_unsent=status["unsent"],
        num_short=sum(record.output_tokens != record.target_tokens for record in ok),
        num_retries=sum(len(record.retries) for record in records),
        span_s=span_s,
        output_tokens=output_tokens,
        output_tokens_per_s=output_tokens / span_s if span_s else None,
        prompt_tokens=sum(record.prompt_tokens for record in ok),
        cached_tokens=_total([record.cached_tokens for record in ok]),
        num_preemptions=_total([record.num_retractions for record in ok]),
        ttft_ms=spread(map(ttft_ms, ok)),
        tpot_ms=spread(map(tpot_ms, ok)),
        e2e_ms=spread(map(e2e_ms, ok)),
        queue_ms=spread(map(queue_ms, ok)),
        start_lag_ms=spread((known(r.sent_ns) - r.planned_ns) / NS_PER_MS for r in sent),
    )


def summary_table(summary: Summary, title: str) -> Table:
    """Return the summary as a table of two columns."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_row("requests ok / sent / planned", f"{summary.num_ok} / {_num_sent(summary)} / {summary.num_requests}")
    if summary.num_failed or summary.num_short or summary.num_retries:
        table.add_row("failed, short, retries", f"{summary.num_failed}, {summary.num_short}, {summary.num_retries}")
    table.add_row("request span", _text(summary.span_s, "s", 1))
    table.add_row("output throughput", _text(summary.output_tokens_per_s, "tokens/s", 1))
    table.add_row("output tokens", f"{summary.output_tokens:,}")
    table.add_row("prompt tokens", f"{summary.prompt_tokens:,}")
    table.add_row("cached prompt tokens", _cached_text(summary))
    table.add_row("preemptions", "not reported" if summary.num_preemptions is None else f"{summary.num_preemptions:,}")
    for name, times in (
        ("TTFT p50 / p99", summary.ttft_ms),
        ("TPOT p50 / p99", summary.tpot_ms),
        ("E2E p50 / p99", summary.e2e_ms),
        ("queue p50 / p99", summary.queue_ms),
        ("start lag p50 / p99", summary.start_lag_ms),
    ):
        table.add_row(name, "-" if times is None else f"{times.p50:,.1f} / {times.p99:,.1f} ms")
    return table


def _num_sent(summary: Summary) -> int:
    return summary.num_requests - summary.num_unsent


def _cached_text(summary: Summary) -> str:
    if summary.cached_tokens is None:
        return "not reported"
    share = 100 * summary.cached_tokens / max(1, summary.prompt_tokens)
    return f"{summary.cached_tokens:,} ({share:.1f} %)"


def _text(value: float | None, unit: str, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f} {unit}"


def _total(values: Sequence[int | None]) -> int | None:
    """Return the sum, or None where nothing or not everything was reported."""
    reported = [value for value in values if value is not None]
    return sum(reported) if reported and len(reported) == len(values) else None
