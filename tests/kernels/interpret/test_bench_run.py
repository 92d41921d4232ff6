"""The GPU run of the kernel benchmark, driven on the CPU: real kernels in the interpreter, an invented clock.

Only the calls of the CUDA runtime are replaced; what is recorded, on which pages, and what is written is real.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.micro import kernels
from bench.micro.gpu_gate import Check, run_gate
from bench.micro.gpu_pool import Pool, allocate_pool, working_sets
from bench.micro.rivals import Rival
from bench.micro.shapes import Shape

TINY = Shape("tiny", num_layers=2, H=4, P=8, N=16, G=2, C=24, W=4, member_bytes=512, slot_bytes=256)
TIMES = {"paged": 10.0, "contiguous": 10.0, "paged, 4 rows": 9.0, "paged, 8 rows": 9.0, "oracle": 20.0}


def small_pool(shape: Shape, dtype: torch.dtype) -> Pool:
    slots = torch.randn(140, shape.H, shape.P, shape.N).to(dtype)
    return Pool(slots.view(-1, shape.heads_per_member(dtype), shape.P, shape.N), slots)


def run_first(steps: Sequence[Any]) -> Sequence[Any]:
    steps[0]()
    return steps


def canned_samples(arms: Mapping[str, Any], launches: int, *, rounds: int, sample_ms: float) -> dict[str, list[float]]:
    assert all(len(steps) == launches for steps in arms.values())
    return {name: [TIMES.get(name, 15.0)] * rounds for name in arms}


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "no device")
    monkeypatch.setattr(kernels, "FALCON_H1_7B", TINY)
    monkeypatch.setattr(kernels, "UNCACHED_BYTES", 0)
    monkeypatch.setattr(kernels, "QUICK_BATCHES", (1, 64))
    monkeypatch.setattr(kernels, "STATES", {"bf16": torch.bfloat16})
    monkeypatch.setattr(kernels, "ORDERS", ("random",))
    monkeypatch.setattr(kernels, "allocate_pool", small_pool)
    monkeypatch.setattr(kernels, "record", run_first)
    monkeypatch.setattr(kernels, "time_interleaved", canned_samples)
    monkeypatch.setattr(kernels, "copy_bandwidth", lambda rounds: [4e12] * rounds)
    monkeypatch.setattr(kernels, "run_gate", lambda shape, rivals: run_gate(shape, rivals, device="cpu", batches=(2,)))


@pytest.mark.usefixtures("on_the_cpu")
def test_a_run_writes_the_table_the_goals_and_the_raw_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(arguments: Any) -> Any:
        raise RuntimeError("no such kernel")

    rivals = [Rival("stock", None, "sglang is not installed"), Rival("flashinfer", broken, "")]
    monkeypatch.setattr(kernels, "load_rivals", lambda stock_file: rivals)
    output = tmp_path / "kernels.md"
    assert kernels.main(["--quick", "--rounds", "3", "--output", str(output)]) == 0
    table = output.read_text()
    assert table.endswith(capsys.readouterr().out.split("random pages\n")[-1].rstrip("\n") + "\n")
    assert "| bf16 | 64 | random | paged | 10.00 (10.00 to 10.00) |" in table
    assert "| bf16 | 1 | random | stock | absent: sglang is not installed |" in table
    assert "| bf16 | 1 | random | flashinfer | absent: RuntimeError: no such kernel |" in table
    assert "paged within 2 % of contiguous from batch 8 on: met (worst 1.000)" in table
    assert "85 % of the copy bandwidth at batch 64: NOT met" in table
    assert "not slower than stock anywhere: not measured" in table
    records = [json.loads(line) for line in output.with_suffix(".jsonl").read_text().splitlines()]
    assert len(records[0]["copy_bytes_per_second"]) == 10
    assert [r["samples_us"] for r in records[1:] if r["arm"] == "contiguous"] == [[10.0] * 3, [10.0] * 3]


@pytest.mark.usefixtures("on_the_cpu")
def test_a_closed_gate_prints_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = [Check("informs", False, required=False), Check("bits", False)]
    monkeypatch.setattr(kernels, "load_rivals", lambda stock_file: [])
    monkeypatch.setattr(kernels, "run_gate", lambda shape, rivals: iter(checks))
    output = tmp_path / "kernels.md"
    assert kernels.main(["--quick", "--output", str(output)]) == 1
    text = output.read_text()
    assert "- bits: FAILED" in text
    assert "- informs: differs (informs only)" in text
    assert text.endswith("The gate is closed: no times.\n")


@pytest.mark.usefixtures("on_the_cpu")
def test_the_deadline_skips_cases_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "load_rivals", lambda stock_file: [])
    monkeypatch.setattr(kernels, "run_gate", lambda shape, rivals: iter(()))
    output = tmp_path / "kernels.md"
    assert kernels.main(["--quick", "--seconds", "-1", "--output", str(output)]) == 0
    assert "2 cases were not measured" in output.read_text()


def test_working_sets_are_disjoint_and_name_the_same_bytes() -> None:
    pool = small_pool(TINY, torch.bfloat16)
    for order in ("sequential", "random"):
        sets = working_sets(pool, 5, 6, order)
        pages = torch.cat([ids.pages.flatten() for ids in sets])
        slots = torch.cat([ids.slots.flatten() for ids in sets])
        assert len(sets) == 6
        assert pages.unique().numel() == pages.numel() == 6 * 5 * 2
        assert slots.unique().numel() == slots.numel() == 6 * 5
        assert bool((pages.diff() == 1).all()) == (order == "sequential")
    assert len(working_sets(pool, 64, 44, "random")) == 2
    with pytest.raises(ValueError, match="expected a pool of at least 141 slots, got 140"):
        working_sets(pool, 141, 1, "random")


def test_the_pool_is_bounded_by_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10_000_000, 0))
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda size, **kwargs: empty(size, **kwargs | {"device": "cpu"}))
    pool = allocate_pool(TINY, torch.bfloat16)
    assert pool.slots.shape == (4_000_000 // 1024, 4, 8, 16)
    assert pool.pages.shape == (2 * pool.slots.shape[0], 2, 8, 16)
    assert pool.pages.data_ptr() == pool.slots.data_ptr()
