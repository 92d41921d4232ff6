"""All metrics of one run from its records and samples, under the names of `METRICS`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from bench.metrics.latency import LATENCIES, Limits, goodput, spread
from bench.metrics.windows import (
    NS_PER_S,
    central_arrival,
    drift,
    full_poller,
    gauge_values,
    output_tokens_in,
    request_span,
)
from bench.metrics.work import work
from bench.records import RequestRecord
from bench.samples import GaugeSample


def measure(
    records: Sequence[RequestRecord],
    samples: Sequence[GaugeSample] = (),
    *,
    episode_ns: int | None = None,
    limits: Limits | None = None,
) -> dict[str, float]:
    """Return the metrics of one run that can be formed; the others have no entry.

    records: one for every planned request, in any order. samples: the one-second samples in order of time, on the same
    clock. episode_ns: length of the ledger episode, from the start of the load to its end as the campaign noticed it,
    without the server's start and stop. limits: the user's latency limits for goodput.
    """
    found = {
        **dict(_throughput(records, episode_ns)),
        **dict(_latencies(records)),
        **dict(_reuse(records)),
        **dict(_gauges(records, samples)),
        **dict(_host(records, samples)),
        **dict(_drift(records, samples)),
        **dict(_work(samples)),
    }
    if {"output_tokens_per_s", "host_ms"} <= found.keys():
        found["output_tokens_per_host_work"] = found["output_tokens_per_s"] * found["host_ms"]
    good = goodput(records, limits) if limits is not None else None
    if good is not None:
        found |= {"goodput_tokens_per_s": good.output_tokens_per_s, "goodput_share": good.share}
    return found


def _throughput(records: Sequence[RequestRecord], episode_ns: int | None) -> Iterator[tuple[str, float]]:
    ok = [record for record in records if record.status == "ok"]
    output_tokens = sum(record.output_tokens for record in ok)
    span = request_span(records)
    if span is not None and span.seconds > 0:
        yield "request_span_s", span.seconds
        yield "output_tokens_per_s", output_tokens / span.seconds
        yield "requests_per_s", len(ok) / span.seconds
    if episode_ns is not None and ok:
        yield "ledger_episode_s", episode_ns / NS_PER_S
        yield "ledger_output_tokens_per_s", output_tokens / (episode_ns / NS_PER_S)
    central = central_arrival([record.planned_ns for record in records])
    if central is not None and central.seconds > 0 and ok:
        yield "central_output_tokens_per_s", output_tokens_in(records, central) / central.seconds


def _latencies(records: Sequence[RequestRecord]) -> Iterator[tuple[str, float]]:
    ok = [record for record in records if record.status == "ok"]
    for name, latency in LATENCIES.items():
        found = spread(map(latency, ok))
        if found is not None:
            yield f"{name}_p50_ms", found.p50
            yield f"{name}_p99_ms", found.p99


def _reuse(records: Sequence[RequestRecord]) -> Iterator[tuple[str, float]]:
    ok = [record for record in records if record.status == "ok"]
    cached = [record.cached_tokens for record in ok if record.cached_tokens is not None]
    if ok and len(cached) == len(ok):
        yield "cached_share", sum(cached) / sum(record.prompt_tokens for record in ok)
        yield "adopted_tokens_per_request", sum(cached) / len(ok)
    preemptions = [record.num_retractions for record in ok if record.num_retractions is not None]
    if ok and len(preemptions) == len(ok):
        yield "preemptions", float(sum(preemptions))


def _gauges(records: Sequence[RequestRecord], samples: Sequence[GaugeSample]) -> Iterator[tuple[str, float]]:
    span = request_span(records)
    for gauge in ("running", "waiting"):
        values = gauge_values(samples, gauge, span)
        if values.size:
            yield f"{gauge}_mean", float(values.mean())
            yield f"{gauge}_p50", float(np.percentile(values, 50))
            yield f"{gauge}_p99", float(np.percentile(values, 99))
            yield f"{gauge}_max", float(values.max())


def _host(records: Sequence[RequestRecord], samples: Sequence[GaugeSample]) -> Iterator[tuple[str, float]]:
    values = gauge_values(samples, "host_ms", request_span(records))
    if values.size:
        yield "host_ms", float(values.mean())


def _drift(records: Sequence[RequestRecord], samples: Sequence[GaugeSample]) -> Iterator[tuple[str, float]]:
    central = central_arrival([record.planned_ns for record in records])
    screens = [drift(samples, gauge, central) for gauge in ("running", "waiting")] if central is not None else []
    found = [screen.drifts for screen in screens if screen is not None]
    if len(found) == 2:
        yield "central_drift", float(any(found))


def _work(samples: Sequence[GaugeSample]) -> Iterator[tuple[str, float]]:
    done, poller = work(samples), full_poller(samples)
    if done is not None and poller is not None and poller.seconds > 0:
        yield "poller_output_tokens_per_s", done.output_tokens / poller.seconds
        yield "recorded_tokens", done.recorded_tokens
        yield "c_once_tokens", done.c_once_tokens
        if done.steps:
            yield "recorded_steps", done.steps
            yield "recorded_tokens_per_step", done.recorded_tokens / done.steps
