"""The load generator against a loopback server: what is sent, what is recorded, and what a failure leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.arrivals import AtOnce, Poisson
from bench.cli import main
from bench.load import LoadSettings
from bench.records import RequestRecord, read_manifest, read_records, read_workload
from bench.session import LoadCase, LoadResult, run_load
from bench.workloads import Lengths, Workload, digest
from sgl_hybrid.errors import SettingError
from tests.unit.fake_server import FakeServer

SMALL = Workload(
    num_requests=10,
    num_contexts=2,
    context_tokens=80,
    question=Lengths(10, 0.5, 2, 40),
    output=Lengths(6, 0.5, 2, 20),
    limit_tokens=200,
)
CASE = LoadCase(workload=SMALL, arrivals=Poisson(100.0), seed=3)


def run(server: FakeServer, folder: Path, case: LoadCase = CASE, *, flush: bool = False, **settings: Any) -> LoadResult:
    given = LoadSettings(url=server.url, retry_delay_s=0.01, **settings)
    return run_load(case, given, folder, command=["test"], flush_cache=flush, progress=False)


def by_index(folder: Path) -> list[RequestRecord]:
    records = sorted(read_records(folder), key=lambda record: record.index)
    assert [record.index for record in records] == list(range(len(records)))  # one record for each request
    return records


@pytest.mark.parametrize("incremental", [False, True])
def test_native_requests_and_records(tmp_path: Path, incremental: bool) -> None:
    with FakeServer(incremental=incremental) as server:
        result = run(server, tmp_path / "run", keep_token_times=True)
    assert result.ended == "complete"
    planned, records = read_workload(tmp_path / "run"), by_index(tmp_path / "run")
    assert planned == CASE.requests()
    sent = {int(body["rid"].split("-")[1]): body for body in server.bodies}
    for request, record in zip(planned, records, strict=True):
        body = sent[request.index]
        assert body["input_ids"] == request.prompt_ids
        assert body["sampling_params"] == {
            "max_new_tokens": request.output_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
        }
        assert body["stream"] is True
        assert "cache_salt" not in body
        assert record.status == "ok"
        assert record.finish_reason == "length"
        assert record.output_tokens == record.target_tokens == request.output_tokens
        # What the server generates: ids that count up from the prompt's length.
        assert record.output_ids == [len(request.prompt_ids) + step for step in range(request.output_tokens)]
        assert record.prompt_tokens == len(request.prompt_ids)
        times, sent_ns = record.token_times_ns, record.sent_ns
        assert times is not None
        assert sent_ns is not None
        assert len(times) == request.output_tokens
        assert record.planned_ns <= sent_ns < times[0]
        assert times == sorted(times)
        assert (record.first_token_ns, record.last_token_ns) == (times[0], times[-1])
        assert record.queue_ns == 250_000_000 + 1_000_000 * record.index
    assert result.summary.num_preemptions == 1
    hits = [record.cached_tokens for record in records]
    assert sorted(set(hits)) == [0, 64]
    assert hits.count(0) == 2  # the first request of each context


def test_openai_requests_and_records(tmp_path: Path) -> None:
    with FakeServer() as server:
        result = run(server, tmp_path / "run", api="completions")
    records = by_index(tmp_path / "run")
    assert [record.status for record in records] == ["ok"] * 10
    assert [len(record.output_ids or []) for record in records] == [record.target_tokens for record in records]
    assert result.summary.cached_tokens == 64 * 8
    assert result.summary.num_preemptions is None  # not zero: this endpoint does not say
    assert result.summary.queue_ms is None
    body = server.bodies[0]
    assert body["model"] == "fake-nano"
    assert body["stream_options"] == {"include_usage": True}
    assert body["ignore_eos"] is True
    assert all(isinstance(token, int) for token in body["prompt"])


def test_isolation_sends_salts_and_shares_nothing(tmp_path: Path) -> None:
    with FakeServer() as server:
        result = run(server, tmp_path / "run", msgspec.structs.replace(CASE, isolate=True))
    assert len({body["cache_salt"] for body in server.bodies}) == 10
    assert result.summary.cached_tokens == 0
    assert [record.salt for record in by_index(tmp_path / "run")] == [f"seed3-request{index}" for index in range(10)]


def test_manifest_says_what_was_run_and_on_what(tmp_path: Path) -> None:
    with FakeServer() as server:
        run(server, tmp_path / "run", flush=True)
    manifest = read_manifest(tmp_path / "run")
    assert manifest.ended == "complete"
    assert manifest.workload_sha256 == digest(CASE.requests())
    assert msgspec.convert(manifest.workload, Workload) == SMALL
    assert manifest.arrivals == {"type": "poisson", "rate_per_s": 100.0}
    assert manifest.environment["machine"]["num_cores"] >= 1
    assert manifest.environment["versions"]["aiohttp"]
    assert manifest.environment["device"] == "cpu"  # of the server, as it says
    assert server.flushes == 1
    for when in ("before", "after"):
        info = msgspec.json.decode((tmp_path / "run" / f"server_{when}.json").read_bytes())
        assert info["model_path"] == "fake-nano"


def test_a_cap_bounds_what_is_in_flight(tmp_path: Path) -> None:
    with FakeServer(token_s=0.002) as server:
        run(server, tmp_path / "run", msgspec.structs.replace(CASE, arrivals=AtOnce()), max_concurrency=3)
    assert server.most_in_flight == 3
    assert len(server.bodies) == 10


def test_connection_errors_are_retried_and_recorded(tmp_path: Path) -> None:
    one = msgspec.structs.replace(CASE, workload=msgspec.structs.replace(SMALL, num_requests=1))
    with FakeServer(refuse_first=2) as server:
        result = run(server, tmp_path / "run", one)
    (record,) = by_index(tmp_path / "run")
    assert record.status == "ok"
    assert len(record.retries) == 2
    assert all("ServerDisconnected" in retry.reason for retry in record.retries)
    assert record.sent_ns is not None
    assert record.sent_ns >= record.retries[-1].at_ns  # the attempt that counts
    assert result.summary.num_retries == 2
    assert len({body["rid"] for body in server.bodies}) == 3


def test_retries_are_bounded_and_a_failed_request_is_a_row(tmp_path: Path) -> None:
    with FakeServer(refuse_first=1000) as server:
        result = run(server, tmp_path / "run", max_retries=1)
    assert result.ended == "complete"  # the server is still there
    records = by_index(tmp_path / "run")
    assert [record.status for record in records] == ["failed"] * 10
    assert all((record.error or "").startswith("connection lost: ") for record in records)
    assert [len(record.retries) for record in records] == [1] * 10
    assert result.summary.output_tokens_per_s is None
    assert result.summary.ttft_ms is None


def test_an_abort_by_the_server_is_a_failed_row_and_not_retried(tmp_path: Path) -> None:
    with FakeServer(abort_index=4) as server:
        result = run(server, tmp_path / "run")
    records = by_index(tmp_path / "run")
    assert [record.index for record in records if record.status == "failed"] == [4]
    assert records[4].error == "aborted: told to"
    assert records[4].output_tokens == 2  # kept, but not counted
    assert result.summary.output_tokens == sum(record.output_tokens for record in records if record.index != 4)
    assert len(server.bodies) == 10


def test_a_slow_answer_times_out(tmp_path: Path) -> None:
    one = msgspec.structs.replace(CASE, workload=msgspec.structs.replace(SMALL, num_requests=1))
    with FakeServer(token_s=0.5) as server:
        run(server, tmp_path / "run", one, timeout_s=0.3)
    (record,) = by_index(tmp_path / "run")
    assert (record.status, record.error) == ("failed", "no answer in full within 0.3 s")


@pytest.fixture
def server_process(tmp_path: Path) -> Any:
    """Yield a function that starts the stand-in as a process, and end what it started."""
    started = []

    def start(*flags: str) -> tuple[subprocess.Popen[bytes], str]:
        with FakeServer() as probe:
            port = probe.port
        process = subprocess.Popen([sys.executable, "-m", "tests.unit.fake_server", "--port", str(port), *flags])
        started.append(process)
        _wait_for(lambda: _is_open(port))
        return process, f"http://127.0.0.1:{port}"

    yield start
    for process in started:
        process.kill()
        process.wait()


def _is_open(port: int) -> bool:
    import socket

    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _wait_for(condition: Any, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


def test_a_server_that_dies_ends_the_run_and_the_rows_are_kept(
    tmp_path: Path, server_process: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    _, url = server_process("--token-s", "0.02", "--die-after", "5")
    folder = tmp_path / "run"
    begun = time.monotonic()
    arguments = ["load", "--url", url, "--workload", "smoke", "--requests", "300", "--rate", "2", "--out", str(folder)]
    assert main(arguments) == 1
    assert time.monotonic() - begun < 60  # 150 s were planned
    records = by_index(folder)
    assert len(records) == 300
    assert any(record.status == "failed" and "connection lost" in (record.error or "") for record in records)
    assert sum(record.status == "unsent" for record in records) > 200
    assert read_manifest(folder).ended == "server lost"
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("error: server lost after ")
    assert lines[-1].endswith(f" of 300 requests; the records so far are in {folder}")


def test_ctrl_c_stops_at_once_and_the_rows_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    with FakeServer(token_s=0.01) as server:

        def interrupt() -> None:
            _wait_for(lambda: (folder / "requests.jsonl").exists() and len(read_records(folder)) >= 3)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        arguments = ["load", "--url", server.url, "--workload", "smoke", "--requests", "200", "--rate", "20"]
        assert main([*arguments, "--out", str(folder), "--json"]) == 130
        thread.join()
    records = by_index(folder)
    assert len(records) == 200
    assert sum(record.status == "ok" for record in records) >= 3
    assert read_manifest(folder).ended == "interrupted"
    captured = capsys.readouterr()
    assert "error: interrupted after" in captured.err
    assert msgspec.json.decode(captured.out)["num_requests"] == 200
    assert main(["summary", str(folder)]) == 0  # the folder can be read again


def test_records_of_a_killed_run_are_readable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        run(server, tmp_path / "run")
    requests = tmp_path / "run" / "requests.jsonl"
    requests.write_bytes(requests.read_bytes()[:-40])  # the last line cut off
    assert len(read_records(tmp_path / "run")) == 9
    requests.write_text('{"index": 1}\n')
    with pytest.raises(SettingError, match="expected records of schema 1"):
        read_records(tmp_path / "run")


def test_nothing_listening_is_one_line_and_leaves_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        url = server.url
    assert main(["load", "--url", url, "--out", str(tmp_path / "run")]) == 2
    expected = f"error: expected a running SGLang or OpenAI-compatible server at {url}, got: no connection\n"
    assert capsys.readouterr().err == expected
    assert not (tmp_path / "run").exists()


def test_another_runs_folder_is_refused_and_untouched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        run(server, tmp_path / "run")
        before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
        assert main(["load", "--url", server.url, "--workload", "smoke", "--out", str(tmp_path / "run")]) == 2
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before
    assert "expected a new or empty output folder" in capsys.readouterr().err
    assert len(server.bodies) == 10


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--url", "localhost:30000"],
            "expected a server address such as http://127.0.0.1:30000, got 'localhost:30000'",
        ),
        (["--api", "grpc"], "expected an api of generate or completions, got 'grpc'"),
        (["--max-concurrency", "0"], "expected a concurrency cap of at least 1 request, got 0"),
        (["--retries", "-1"], "expected at least 0 retries, got -1"),
        (["--timeout-s", "0"], "expected a timeout above 0 s, got 0.0 s"),
        (["--rate", "0"], "expected a rate above 0 requests/s, got 0.0 requests/s"),
        (["--workload", "q1"], "expected a workload out of paper, probe, smoke, got 'q1'; nearest: smoke"),
        (["--q", "2"], "expected a common-prefix fraction q of 0 to 1, got 2.0"),
        (["--dataset", "none.json"], "expected a tokenizer folder (--tokenizer) with a dataset, got none"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["load", *flags, "--out", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err == f"error: {message}\n"
    assert not (tmp_path / "run").exists()


def test_an_unknown_flag_is_status_2() -> None:
    assert main(["load", "--speed", "3"]) == 2
