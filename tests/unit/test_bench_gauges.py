"""The poller: what it reads from either engine, and that a slow or silent server shows as a gap."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bench.campaign import gauges
from bench.campaign.gauges import Snapshot, numbers, polling, read_samples, read_sglang, read_vllm
from tests.unit.fake_server import FakeServer

VLLM_METRICS = b"""# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 5.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0"} 2.0
# TYPE vllm:prompt_tokens counter
vllm:prompt_tokens_total{engine="0"} 1000.0
# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total{engine="0"} 9000.0
# TYPE vllm:prompt_tokens_by_source counter
vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 700.0
vllm:prompt_tokens_by_source_total{engine="0",source="local_cache_hit"} 300.0
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{engine="0"} 70.0
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{engine="0"} 1.0
"""


def test_sglangs_counters_are_summed_over_ranks_and_kept_apart_by_mode() -> None:
    memory = {"organization": "s2", "work": {"records": 9}, "pools": {"shared": {"free": 3}}, "slabs": {"slabs": 1}}
    with FakeServer(state={"memory_organization": memory}) as server:
        server.computed_tokens, server.decoded_tokens, server.first_tokens = 40, 7, 3
        found = read_sglang(server.url)
    assert found.sample["running"] == found.sample["waiting"] == 0
    assert (found.sample["input_tokens"], found.sample["output_tokens"]) == (40, 10)  # the first of 3 requests too
    assert found.sample["preemptions"] is None  # not in the fake's metrics: not reported, which is not zero
    assert found.sample["steps"] == 9
    assert found.sample["other"] == {"work.records": 9.0, "pools.shared.free": 3.0, "slabs.slabs": 1.0}
    assert found.slabs == {"slabs": 1}


def test_vllms_cached_tokens_are_no_computed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gauges, "_get", lambda url, path: VLLM_METRICS)
    assert read_vllm("http://server").sample == {
        "running": 5.0,
        "waiting": 2.0,
        "input_tokens": 700.0,
        "output_tokens": 70.0,
        "preemptions": 1.0,
        "other": {},
    }


def test_numbers_of_a_nested_report() -> None:
    nested = {"a": 1, "b": {"c": 2.5, "d": {"e": 3}}, "name": "s2", "list": [1], "flag": True, "none": None}
    assert numbers(nested) == {"a": 1.0, "b.c": 2.5, "b.d.e": 3.0}


def test_a_slow_answer_skips_ticks_and_a_failed_one_is_left_out(tmp_path: Path) -> None:
    """Ticks of 20 ms; the second answer takes 90 ms, the third is an error. No burst makes up for what was missed."""
    calls: list[float] = []

    def read(url: str) -> Snapshot:
        calls.append(time.monotonic())
        if len(calls) == 2:
            time.sleep(0.09)
        if len(calls) == 3:
            raise ConnectionRefusedError
        if len(calls) == 5:
            raise KeyError("a field that is gone")
        sample: dict[str, Any] = {"running": float(len(calls))}
        return Snapshot(sample)

    start_ns = time.monotonic_ns()
    with polling(read, "http://server", tmp_path, start_ns, period_s=0.02):
        deadline = time.monotonic() + 10
        while len(calls) < 7 and time.monotonic() < deadline:
            time.sleep(0.005)
    samples = read_samples(tmp_path)
    assert [sample.running for sample in samples][:4] == [1.0, 2.0, 4.0, 6.0]
    assert [sample.at_ns for sample in samples] == sorted(sample.at_ns for sample in samples)
    assert all(sample.host_ms is not None and sample.host_ms > 0 for sample in samples)
    gaps = [after - before for before, after in pairwise(calls[1:])]
    assert gaps[0] > 0.09
    assert min(gaps) > 0.001
    assert not (tmp_path / "slabs.jsonl").exists()


def test_a_half_written_last_sample_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "gauges.jsonl").write_bytes(b'{"at_ns":1,"running":2.0}\n{"at_ns":2,"runn')
    assert [sample.running for sample in read_samples(tmp_path)] == [2.0]
    assert read_samples(tmp_path / "none") == []
