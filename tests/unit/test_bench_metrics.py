"""Every metric against a case worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from bench.metrics import METRICS, Limits, measure
from bench.metrics.latency import Goodput, empirical_limits, goodput
from bench.metrics.qualified import Qualified, qualified
from bench.metrics.windows import (
    Drift,
    Window,
    central_arrival,
    drift,
    full_poller,
    output_tokens_in,
    request_span,
)
from bench.metrics.work import Work, fallen, work
from bench.records import RequestRecord
from bench.samples import GaugeSample

S = 1_000_000_000
MS = 1_000_000


def record(index: int = 0, **changes: Any) -> RequestRecord:
    """Sent at 1 s, first token at 2 s, last of 5 at 4 s."""
    values: dict[str, Any] = {
        "index": index,
        "context_id": 0,
        "salt": None,
        "status": "ok",
        "planned_ns": 1 * S,
        "prompt_tokens": 100,
        "target_tokens": 5,
        "output_tokens": 5,
        "sent_ns": 1 * S,
        "first_token_ns": 2 * S,
        "last_token_ns": 4 * S,
        "done_ns": 4 * S,
        "cached_tokens": 60,
        "num_retractions": 1,
        "queue_ns": 250 * MS,
    }
    return RequestRecord(**{**values, **changes})


def failed(index: int, **changes: Any) -> RequestRecord:
    gone = {"first_token_ns": None, "last_token_ns": None, "output_tokens": 3, "cached_tokens": None}
    return record(index, status="failed", **{**gone, **changes})


def sample(at_s: float, **changes: float) -> GaugeSample:
    return GaugeSample(at_ns=round(at_s * S), **changes)


RUN = [
    record(0),
    record(1, sent_ns=2 * S, first_token_ns=6 * S, last_token_ns=11 * S, output_tokens=11, cached_tokens=0),
    failed(2, sent_ns=0, done_ns=30 * S),
]
SAMPLES = [
    sample(-1, running=9, waiting=9, input_tokens=1_000, output_tokens=500, steps=100),
    sample(1, running=1, waiting=0, input_tokens=1_040, output_tokens=500, steps=101),
    sample(6, running=2, waiting=4, input_tokens=1_140, output_tokens=508, steps=105),
    sample(9, running=3, waiting=2, input_tokens=1_140, output_tokens=514, steps=110),
    sample(19, running=0, waiting=0, input_tokens=1_140, output_tokens=516, steps=112),
]


def test_one_run_by_hand() -> None:
    found = measure(RUN, SAMPLES, episode_ns=16 * S, limits=Limits(ttft_ms=1_000))
    expected = {
        "request_span_s": 11,  # the failed request was sent first, at 0; the last success ends at 11
        "output_tokens_per_s": 16 / 11,
        "requests_per_s": 2 / 11,
        "ledger_episode_s": 16,
        "ledger_output_tokens_per_s": 1,
        "ttft_p50_ms": 2_500,  # 1,000 and 4,000
        "ttft_p99_ms": 3_970,
        "tpot_p50_ms": 500,  # 2 s over 4 gaps; 5 s over 10 gaps
        "tpot_p99_ms": 500,
        "e2e_p50_ms": 6_000,  # 3,000 and 9,000
        "e2e_p99_ms": 8_940,
        "queue_p50_ms": 250,
        "queue_p99_ms": 250,
        "cached_share": 60 / 200,
        "adopted_tokens_per_request": 30,
        "preemptions": 2,
        "goodput_tokens_per_s": 5 / 11,
        "goodput_share": 1 / 3,
        "running_mean": 2,  # the samples at 1, 6 and 9 s; those at -1 and 19 s are outside the span
        "running_p50": 2,
        "running_p99": 2.98,
        "running_max": 3,
        "waiting_mean": 2,
        "waiting_p50": 2,
        "waiting_p99": 3.96,
        "waiting_max": 4,
        "poller_output_tokens_per_s": 16 / 20,
        "recorded_tokens": 140 + 16,
        "c_once_tokens": 140,
        "recorded_steps": 12,
        "recorded_tokens_per_step": 13,
    }
    assert found == pytest.approx(expected)
    assert found.keys() <= METRICS.keys()


def test_a_metric_that_cannot_be_formed_is_absent() -> None:
    assert measure([]) == {}
    assert measure([failed(0)], [sample(0, running=1)]) == {
        "running_mean": 1,
        **dict.fromkeys(("running_p50", "running_p99", "running_max"), 1),
    }
    silent = measure([record(cached_tokens=None, num_retractions=None, queue_ns=None, output_tokens=1)])
    for name in ("cached_share", "preemptions", "queue_p50_ms", "tpot_p50_ms", "ledger_episode_s", "goodput_share"):
        assert name not in silent
    assert silent["ttft_p50_ms"] == 1_000
    mixed = measure([record(0), record(1, cached_tokens=None)])
    assert "cached_share" not in mixed  # one request without it: no share of all


def test_all_metrics_of_the_list_can_be_formed() -> None:
    arrivals = [record(index, planned_ns=index * S) for index in range(11)]
    polled = [sample(t, running=4, waiting=2, input_tokens=t, output_tokens=t, steps=t, host_ms=t) for t in range(12)]
    assert measure(arrivals, polled, episode_ns=S, limits=Limits()).keys() == METRICS.keys()


def test_the_span_is_first_sent_to_last_success() -> None:
    assert request_span(RUN) == Window(0, 11 * S)
    assert request_span([failed(0)]) is None
    with pytest.raises(ValueError, match="expected a record with its times"):
        request_span([record(last_token_ns=None)])


def test_the_central_window_is_cut_from_the_arrivals_and_not_from_the_run() -> None:
    # 11 arrivals at 0, 1, ..., 10 s: the 20th percentile is 2 s, the 80th 8 s.
    assert central_arrival([index * S for index in range(11)]) == Window(2 * S, 8 * S)
    assert central_arrival([0, 10 * S]) == Window(2 * S, 8 * S)  # interpolated
    assert central_arrival([5]) is None


def test_tokens_in_a_window() -> None:
    window = Window(3 * S, 10 * S)
    # Times kept: 5 tokens at 2, 2.5, 3, 3.5, 4 s; three lie in the window, its begin included.
    kept = record(token_times_ns=[2 * S, 2_500 * MS, 3 * S, 3_500 * MS, 4 * S])
    assert output_tokens_in([kept], window) == 3
    # Not kept: the first token is outside, the four others are spread over 2 to 4 s: half of them.
    assert output_tokens_in([record()], window) == pytest.approx(2)
    assert output_tokens_in([record()], Window(0, 10 * S)) == pytest.approx(5)
    assert output_tokens_in([record()], Window(5 * S, 10 * S)) == 0
    assert output_tokens_in([record(output_tokens=1, last_token_ns=2 * S)], Window(0, 2 * S)) == 1
    assert output_tokens_in([failed(0)], Window(0, 90 * S)) == 0
    eleven = [record(index, planned_ns=index * S, token_times_ns=[3 * S]) for index in range(11)]
    assert measure(eleven)["central_output_tokens_per_s"] == pytest.approx(11 / 6)


def test_drift_compares_the_halves_of_the_window() -> None:
    window = Window(0, 10 * S)
    rising = [sample(at_s, waiting=at_s) for at_s in range(11)]
    # 0..5 s: mean 2.5; 6..10 s: mean 8.
    assert drift(rising, "waiting", window) == Drift(2.5, 8.0, drifts=True)
    assert drift(rising, "waiting", window, tolerance=0.7) == Drift(2.5, 8.0, drifts=False)  # 5.5 of 8 is 69 %
    level = [sample(at_s, running=5) for at_s in range(11)]
    assert drift(level, "running", window) == Drift(5.0, 5.0, drifts=False)
    assert drift([sample(at_s, running=0) for at_s in range(11)], "running", window) == Drift(0.0, 0.0, drifts=False)
    assert drift(level[:3], "running", window) is None  # nothing late
    assert drift(level, "waiting", window) is None  # not reported


def test_a_slow_host_is_taken_out_of_the_throughput() -> None:
    # 21 tokens over 11 s. The samples in the span took 4, 4 and 7 ms for the work; the one after it does not count.
    given = [(0, 4.0), (5, 4.0), (11, 7.0), (12, 99.0)]
    polled = [sample(6), *(sample(at_s, host_ms=ms) for at_s, ms in given)]
    found = measure(RUN, polled)
    assert found["host_ms"] == pytest.approx(5.0)
    assert found["output_tokens_per_host_work"] == pytest.approx(5.0 * found["output_tokens_per_s"])
    assert "host_ms" not in measure(RUN, [sample(5)])


def test_a_run_drifts_when_either_gauge_does() -> None:
    arrivals = [record(index, planned_ns=index * S) for index in range(11)]
    level = [sample(at_s, running=5, waiting=1) for at_s in range(11)]
    assert measure(arrivals, level)["central_drift"] == 0
    filling = [sample(at_s, running=5, waiting=at_s) for at_s in range(11)]
    assert measure(arrivals, filling)["central_drift"] == 1


def test_the_full_poller_view_needs_two_samples() -> None:
    assert full_poller(SAMPLES) == Window(-1 * S, 19 * S)
    assert full_poller(SAMPLES[:1]) is None


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        (Limits(), 2),
        (Limits(ttft_ms=1_000), 1),
        (Limits(ttft_ms=999.9), 0),
        (Limits(tpot_ms=500), 2),
        (Limits(tpot_ms=499), 0),
        (Limits(e2e_ms=3_000), 1),
        (Limits(ttft_ms=5_000, tpot_ms=500, e2e_ms=8_999), 1),
    ],
)
def test_goodput_counts_requests_within_every_limit(limits: Limits, kept: int) -> None:
    tokens = {0: 0, 1: 5, 2: 16}[kept]
    assert goodput(RUN, limits) == Goodput(pytest.approx(tokens / 11), pytest.approx(kept / 3))


def test_a_single_token_has_no_tpot_to_fail_and_a_failure_is_never_good() -> None:
    one = record(output_tokens=1, last_token_ns=2 * S)
    assert Limits(tpot_ms=0.001).hold(one)
    assert not Limits().hold(failed(0))
    assert goodput([failed(0)], Limits()) is None


def test_empirical_limits_come_from_the_comparator_or_the_union() -> None:
    fast = [record(index, last_token_ns=(3 + index) * S) for index in range(3)]  # E2E 2, 3, 4 s; TPOT 0.25, 0.5, 0.75 s
    slow = [record(index, last_token_ns=9 * S) for index in range(3)]  # E2E 8 s, TPOT 1.75 s
    comparator = empirical_limits(fast, percentile=50)
    assert comparator == Limits(e2e_ms=3_000, tpot_ms=500)
    assert empirical_limits([*fast, *slow], percentile=50) == Limits(e2e_ms=6_000, tpot_ms=1_250)
    assert sum(map(comparator.hold, fast)) == 2
    assert sum(map(comparator.hold, slow)) == 0
    assert empirical_limits(fast).e2e_ms == pytest.approx(3_980)  # 99th percentile of 2, 3, 4 s
    assert empirical_limits([record(output_tokens=1)]).tpot_ms is None
    with pytest.raises(ValueError, match="answered in full"):
        empirical_limits([failed(0)])


def test_qualified_goodput_under_the_comparators_limits_and_under_those_of_both() -> None:
    """The comparator's two requests end after 2 and 3 s, ours after 1 and 4 s; 5 tokens each, limits at the p99."""
    comparator = [record(0, sent_ns=0, first_token_ns=0, last_token_ns=at * S) for at in (2, 3)]
    ours = [record(0, sent_ns=0, first_token_ns=0, last_token_ns=at * S) for at in (1, 4)]
    found = qualified(ours, comparator)
    assert found is not None
    # p99 of (1, 4) is 3.97 s, of (2, 3) 2.99 s; TPOT is a quarter of each.
    assert found.e2e_p99_ratio == found.tpot_p99_ratio == pytest.approx(3.97 / 2.99)
    # Limit 2.99 s: one of ours over 4 s, one of theirs over 3 s: 5/4 against 5/3.
    assert found.comparator_pct == pytest.approx(-25.0)
    # Limit of the union, p99 of (1, 2, 3, 4) = 3.97 s: one of ours, both of theirs: 5/4 against 10/3.
    assert found.union_pct == pytest.approx(100 * (5 / 4 / (10 / 3) - 1))
    assert qualified(ours, [failed(0)]) is None
    assert qualified([failed(0)], comparator) is None
    single = [record(0, output_tokens=1, last_token_ns=2 * S)]
    assert qualified(single, single) == Qualified(
        e2e_p99_ratio=1.0, tpot_p99_ratio=None, comparator_pct=0.0, union_pct=0.0
    )


def test_work_is_the_growth_of_the_counters_and_input_is_what_output_leaves() -> None:
    done = work(SAMPLES)
    assert done == Work(recorded_tokens=156, output_tokens=16, steps=12)
    assert done is not None
    assert done.c_once_tokens + done.output_tokens == done.recorded_tokens  # H = C_once + O_ctr
    assert done.recorded_tokens_per_step == 13
    assert work(SAMPLES, Window(0, 9 * S)) == Work(114, 14, 9)
    assert work(SAMPLES[:1]) is None
    assert work([sample(0, output_tokens=1), sample(1, output_tokens=2)]) is None
    without = work([sample(0, input_tokens=0, output_tokens=0), sample(1, input_tokens=4, output_tokens=2)])
    assert without == Work(6, 2, None)
    assert without.recorded_tokens_per_step is None


def test_a_counter_that_falls_is_named_and_costs_the_work_alone() -> None:
    """vLLM's prompts less hits: 3,336 tokens, then 1,672."""
    falling = [sample(0, input_tokens=3336, output_tokens=1), sample(1, input_tokens=1672, output_tokens=2)]
    assert fallen(falling) == ["input_tokens"]
    assert fallen(SAMPLES) == []
    assert fallen([sample(0, steps=3), sample(1), sample(2, steps=2)]) == ["steps"]
    assert work(falling) is None
    found = measure([record(0)], falling)
    assert "output_tokens_per_s" in found
    assert not {"recorded_tokens", "c_once_tokens", "poller_output_tokens_per_s"} & found.keys()
