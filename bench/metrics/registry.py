"""The metrics of a run: one name, one unit, one direction. `CellOutcome.metrics` has these keys and no others."""

from __future__ import annotations

from typing import NamedTuple


class Metric(NamedTuple):
    """One number of one run. `higher_is_better` is None where neither direction is."""

    name: str
    unit: str
    higher_is_better: bool | None
    meaning: str


def _latencies(name: str, meaning: str) -> list[Metric]:
    return [Metric(f"{name}_p{p}_ms", "ms", False, f"{meaning}, {p}th percentile of the run") for p in (50, 99)]


_ALL = (
    Metric(
        "output_tokens_per_s", "tokens/s", True, "output tokens of requests answered in full, over the request span"
    ),
    Metric("ledger_output_tokens_per_s", "tokens/s", True, "the same tokens over the ledger episode"),
    Metric("central_output_tokens_per_s", "tokens/s", True, "tokens that came in the central-arrival window, over it"),
    Metric("requests_per_s", "requests/s", True, "requests answered in full, over the request span"),
    Metric("request_span_s", "s", False, "first request sent to the last token of the last request answered in full"),
    Metric("ledger_episode_s", "s", False, "load begun to the end of the load noticed: orchestration and polling in"),
    *_latencies("ttft", "first token minus sent"),
    *_latencies("tpot", "mean gap between the tokens of one request"),
    *_latencies("e2e", "last token minus sent"),
    *_latencies("queue", "first scheduled minus sent, as the server reports it"),
    Metric(
        "goodput_tokens_per_s",
        "tokens/s",
        True,
        "output tokens of requests within the given latency limits, over the request span",
    ),
    Metric("goodput_share", "1", True, "share of all planned requests within the given latency limits"),
    Metric("running_mean", "requests", None, "running requests, mean of the one-second samples in the request span"),
    Metric("running_p50", "requests", None, "running requests, median of the same samples"),
    Metric("running_max", "requests", None, "running requests, largest of the same samples"),
    Metric("waiting_mean", "requests", False, "waiting requests, mean of the one-second samples in the request span"),
    Metric("waiting_p50", "requests", False, "waiting requests, median of the same samples"),
    Metric("waiting_p99", "requests", False, "waiting requests, 99th percentile of the samples; not a queue delay"),
    Metric("waiting_max", "requests", False, "waiting requests, largest of the same samples"),
    Metric("cached_share", "1", True, "share of prompt tokens that the server did not compute again"),
    Metric("preemptions", "1", False, "preemptions reported for the requests answered in full"),
    Metric("c_once_tokens", "tokens", False, "recorded input tokens: all recorded tokens less output tokens"),
    Metric("recorded_tokens_per_step", "tokens", None, "recorded tokens over recorded steps; not a batch width"),
)

METRICS = {metric.name: metric for metric in _ALL}
