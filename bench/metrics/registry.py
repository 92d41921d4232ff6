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


def _gauge(name: str, higher_is_better: bool | None) -> list[Metric]:
    statistics = {"mean": "mean", "p50": "median", "p99": "99th percentile", "max": "largest"}
    return [
        Metric(f"{name}_{short}", "requests", higher_is_better, f"{name} requests, {long} of the samples in the span")
        for short, long in statistics.items()
    ]


_ALL = (
    Metric(
        "output_tokens_per_s", "tokens/s", True, "output tokens of requests answered in full, over the request span"
    ),
    Metric("ledger_output_tokens_per_s", "tokens/s", True, "the same tokens over the ledger episode"),
    Metric("central_output_tokens_per_s", "tokens/s", True, "tokens that came in the central-arrival window, over it"),
    Metric(
        "poller_output_tokens_per_s", "tokens/s", True, "growth of the server's output counter, first to last sample"
    ),
    Metric(
        "central_drift", "1", False, "1 where running or waiting differ between early and late central window, else 0"
    ),
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
    *_gauge("running", None),
    *_gauge("waiting", False),
    Metric("host_ms", "ms", None, "processor time of a fixed piece of work, mean of the samples in the span"),
    Metric(
        "output_tokens_per_host_work",
        "tokens",
        True,
        "output_tokens_per_s times host_ms: output tokens in the time of a thousand pieces of that work",
    ),
    Metric("cached_share", "1", True, "share of prompt tokens that the server did not compute again"),
    Metric(
        "adopted_tokens_per_request", "tokens/request", True, "prompt tokens not computed again, mean over requests"
    ),
    Metric("preemptions", "1", False, "preemptions reported for the requests answered in full"),
    Metric("recorded_tokens", "tokens", None, "H: input and output tokens that the server's counters recorded"),
    Metric("c_once_tokens", "tokens", False, "C_once: recorded tokens less output tokens; not all submitted input"),
    Metric("recorded_steps", "1", None, "K: forward passes that the server counted"),
    Metric("recorded_tokens_per_step", "tokens", None, "H / K; not a batch width"),
)

METRICS = {metric.name: metric for metric in _ALL}
