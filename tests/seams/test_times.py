"""The two instruments of `bench micro`: what they time is what they say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

from sgl_hybrid.seams import process, step_times, tree_times


@pytest.fixture
def _put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The process serves what it served before."""
    before = HybridReqToTokenPool.mamba_pool_cls, process._served
    yield
    HybridReqToTokenPool.mamba_pool_cls, process._served = before


class Clock:
    """A thread clock that is moved by hand [ns]."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0
        monkeypatch.setattr(step_times.time, "thread_time_ns", lambda: self.now)

    def spend(self, amount: int) -> None:
        self.now += amount


def scheduler_of(clock: Clock, log: list[str]) -> SimpleNamespace:
    """A scheduler whose parts take 1, 20, 300, 4,000 and 50,000 ns."""
    model = SimpleNamespace(forward=lambda: clock.spend(4_000))
    backend = SimpleNamespace(init_forward_metadata=lambda: clock.spend(300))
    runner = SimpleNamespace(model=model, attn_backend=backend)

    def run_batch(batch: object) -> str:
        clock.spend(10)
        backend.init_forward_metadata()
        model.forward()
        clock.spend(10)
        return "result"

    def next_batch(decode: bool) -> SimpleNamespace:
        clock.spend(1)
        mode = SimpleNamespace(is_decode=lambda: decode)
        return SimpleNamespace(batch_to_run=SimpleNamespace(forward_mode=mode, batch_size=lambda: 32))

    return SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=runner),
        run_batch=run_batch,
        process_batch_result=lambda: clock.spend(50_000),
        get_next_batch_to_run=next_batch,
    )


def test_parts_of_a_step_are_disjoint_and_only_decode_steps_are_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "steps.jsonl"
    monkeypatch.setenv(step_times.VARIABLE, str(path))
    clock = Clock(monkeypatch)
    scheduler = scheduler_of(clock, [])
    step_times.watch(None, scheduler)
    for decode in (False, True, True, False):
        scheduler.get_next_batch_to_run(decode)
        clock.spend(7)  # Between the parts: nobody's.
        assert scheduler.run_batch(None) == "result"
        scheduler.process_batch_result()
    expected = {"batch": 32, "schedule": 1, "launch": 20, "metadata": 300, "model": 4_000, "process": 50_000}
    assert [json.loads(line) for line in path.read_text().splitlines()] == [expected, expected]


def test_a_part_that_fails_is_counted_and_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    times = step_times.StepTimes(tmp_path / "steps.jsonl")

    def fail() -> None:
        clock.spend(5)
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        times.timed("launch", fail)()
    times.timed("process", lambda: clock.spend(3))()
    batch = SimpleNamespace(forward_mode=SimpleNamespace(is_decode=lambda: True), batch_size=lambda: 1)
    times.step_done(batch)
    (line,) = (tmp_path / "steps.jsonl").read_text().splitlines()
    assert (json.loads(line)["launch"], json.loads(line)["process"]) == (5, 3)


@pytest.mark.usefixtures("_put_back")
@pytest.mark.parametrize("arm", ["s0", "s1", "s2", "d0", *tree_times.STOCK_PAGES])
def test_a_turn_evicts_the_oldest_prompt_and_inserts_its_own(arm: str) -> None:
    """The pools are full before the first turn, and as full after each."""
    with tree_times.published_arguments(arm):
        built = tree_times.build(arm, 20)
        turns = tree_times.Turns(built, 20)
        assert built.tokens.available_size() < tree_times.BOUNDARY_TOKENS
        assert built.slots.available_size() == 0
        for _ in range(5):
            spent = turns.take()
            assert tuple(spent) == tree_times.OPERATIONS
            assert all(value > 0 for value in spent.values())
            assert built.slots.available_size() == 0
        built.tree.sanity_check()
        if arm not in tree_times.STOCK_PAGES:
            process.served().memory.check()
