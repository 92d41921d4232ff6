"""The numbers of a run, each against a case worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from bench.endpoints import Answer, CompletionsEndpoint, GenerateEndpoint, StreamError, error_message, split_events
from bench.records import RequestRecord, Retry
from bench.summary import Spread, summarize, summary_table

MS = 1_000_000


def record(index: int, **changes: Any) -> RequestRecord:
    values: dict[str, Any] = {
        "index": index,
        "context_id": 0,
        "salt": None,
        "status": "ok",
        "planned_ns": 0,
        "prompt_tokens": 100,
        "target_tokens": 5,
        "output_tokens": 5,
        "sent_ns": 10 * MS,
        "first_token_ns": 110 * MS,
        "last_token_ns": 210 * MS,
        "done_ns": 211 * MS,
        "cached_tokens": 64,
        "num_retractions": 0,
        "queue_ns": 30 * MS,
        "finish_reason": "length",
    }
    return RequestRecord(**{**values, **changes})


def test_one_request_by_hand() -> None:
    summary = summarize([record(0)])
    assert summary.span_s == pytest.approx(0.2)  # 10 ms to 210 ms
    assert summary.output_tokens_per_s == pytest.approx(25.0)  # 5 tokens in 0.2 s
    assert summary.ttft_ms == Spread(100.0, 100.0)
    assert summary.tpot_ms == Spread(25.0, 25.0)  # 100 ms over 4 gaps
    assert summary.e2e_ms == Spread(200.0, 200.0)
    assert summary.start_lag_ms == Spread(10.0, 10.0)
    assert summary.queue_ms == Spread(30.0, 30.0)


def test_the_span_starts_with_the_first_request_sent_and_ends_with_the_last_success() -> None:
    failed = {"status": "failed", "first_token_ns": None, "last_token_ns": None, "output_tokens": 3}
    records = [
        record(0, sent_ns=5 * MS, **failed),  # sent first, failed: it starts the span, its tokens do not count
        record(1, sent_ns=20 * MS, last_token_ns=505 * MS),
        record(2, sent_ns=30 * MS, **failed, done_ns=9_000 * MS),  # failed last: it does not end the span
        record(3, status="unsent", sent_ns=None, first_token_ns=None, last_token_ns=None, output_tokens=0),
    ]
    summary = summarize(records)
    assert summary.span_s == pytest.approx(0.5)
    assert summary.output_tokens == 5
    assert summary.output_tokens_per_s == pytest.approx(10.0)
    assert (summary.num_requests, summary.num_ok, summary.num_failed, summary.num_unsent) == (4, 1, 2, 1)


def test_percentiles_interpolate_between_requests() -> None:
    # TTFTs of 0, 10, ..., 1000 ms: the median is 500, the 99th percentile 990.
    records = [record(index, first_token_ns=(10 + 10 * index) * MS, last_token_ns=2_000 * MS) for index in range(101)]
    ttft = summarize(records).ttft_ms
    assert ttft is not None
    assert (ttft.p50, ttft.p99) == pytest.approx((500.0, 990.0))
    two = summarize([record(0, first_token_ns=10 * MS), record(1, first_token_ns=110 * MS)]).ttft_ms
    assert two is not None
    assert (two.p50, two.p99) == pytest.approx((50.0, 99.0))


def test_a_single_token_has_no_tpot() -> None:
    summary = summarize([record(0, output_tokens=1, target_tokens=1, last_token_ns=110 * MS)])
    assert summary.tpot_ms is None
    assert summary.ttft_ms is not None


def test_what_the_server_does_not_report_is_none_and_not_zero() -> None:
    assert summarize([record(0), record(1, cached_tokens=None)]).cached_tokens is None
    assert summarize([record(0, num_retractions=None)]).num_preemptions is None
    assert summarize([record(0, num_retractions=2), record(1, num_retractions=1)]).num_preemptions == 3
    assert summarize([record(0), record(1)]).cached_tokens == 128


def test_no_answer_at_all_has_no_throughput() -> None:
    empty = summarize([])
    assert (empty.num_requests, empty.span_s, empty.output_tokens_per_s, empty.e2e_ms) == (0, None, None, None)


def test_short_answers_and_retries_are_counted() -> None:
    records = [record(0, output_tokens=4), record(1, retries=[Retry(1, "x"), Retry(2, "y")])]
    summary = summarize(records)
    assert (summary.num_short, summary.num_retries) == (1, 2)


def test_a_record_without_its_times_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a record with its times"):
        summarize([record(0, first_token_ns=None)])


def test_the_table_shows_the_numbers() -> None:
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(summary_table(summarize([record(0), record(1, num_retractions=3)]), "a run"))
    console.file.close()
    text = console.export_text()
    for part in (
        "2 / 2 / 2",
        "50.0 tokens/s",
        "128 (64.0 %)",
        "100.0 / 100.0 ms",
        "25.0 / 25.0 ms",
        "30.0 / 30.0 ms",
        "preemptions",
        "3",
    ):
        assert part in text


def test_events_split_across_reads_come_out_whole() -> None:
    stream = b'data: {"a": 1}\n\ndata: {"b": 2}\r\n\r\n: comment\n\ndata: [DONE]\n\n'
    for cut in range(len(stream)):
        buffer = bytearray(stream[:cut])
        events = split_events(buffer)
        buffer += stream[cut:]
        events += split_events(buffer)
        assert events == [b'{"a": 1}', b'{"b": 2}'], cut
        assert not buffer


def _generate_event(ids: list[int], count: int) -> bytes:
    return b'{"output_ids": %s, "meta_info": {"completion_tokens": %d, "finish_reason": null}}' % (
        str(ids).encode(),
        count,
    )


def test_a_cumulative_event_may_be_ahead_of_its_own_count() -> None:
    answer = Answer()
    endpoint = GenerateEndpoint()
    endpoint.fold(answer, _generate_event([7], 1), 10)
    endpoint.fold(answer, _generate_event([7, 8, 9], 2), 20)
    endpoint.fold(answer, _generate_event([7, 8, 9, 10], 4), 30)
    assert answer.output_ids == [7, 8, 9, 10]
    assert answer.token_times_ns == [10, 20, 20, 30]


def test_lost_tokens_are_an_error_and_not_a_short_answer() -> None:
    answer = Answer()
    GenerateEndpoint().fold(answer, _generate_event([7], 1), 10)
    with pytest.raises(StreamError, match="expected 5 token ids so far, got 3"):
        GenerateEndpoint().fold(answer, _generate_event([8, 9], 5), 20)


def test_text_only_completions_take_their_count_from_the_usage() -> None:
    answer, endpoint = Answer(), CompletionsEndpoint("m")
    for now_ns, text in ((10, "ab"), (20, ""), (30, "c")):
        endpoint.fold(answer, b'{"choices": [{"text": "%s"}]}' % text.encode(), now_ns)
    endpoint.fold(answer, b'{"choices": [{"text": "", "finish_reason": "length"}]}', 40)
    endpoint.fold(answer, b'{"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 5}}', 50)
    assert (answer.num_tokens, answer.output_ids, answer.finish_reason) == (5, None, "length")
    assert (answer.token_times_ns[0], answer.token_times_ns[-1]) == (10, 30)
    assert answer.cached_tokens is None


@pytest.mark.parametrize("endpoint", [GenerateEndpoint(), CompletionsEndpoint("m")])
@pytest.mark.parametrize(
    ("event", "message"),
    [
        (b'{"error": {"message": "too long", "code": 400}}', "too long"),
        (b'{"error": "too\\n long"}', "too long"),
        (b"{not json", "expected an event of the stream"),
    ],
)
def test_an_error_inside_the_stream_is_the_requests_error(endpoint: Any, event: bytes, message: str) -> None:
    with pytest.raises(StreamError, match=message):
        endpoint.fold(Answer(), event, 0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"error": {"message": "a"}}, "a"),
        ({"object": "error", "message": "b"}, "b"),
        ({"detail": "c"}, "c"),
        ("plain\ntext", "plain text"),
        ("x" * 1000, "x" * 300),
    ],
)
def test_error_answers_of_any_shape_become_one_line(content: object, message: str) -> None:
    assert error_message(content) == message
