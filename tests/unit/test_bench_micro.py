"""Comparisons of single parts: orders, summaries, goals and gates, on times that are made up."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest

from bench.campaign.gate import GateError
from bench.cli import main
from bench.micro import step, tree
from bench.micro.rounds import new_folder, turn_order
from bench.server import ServerError
from sgl_hybrid.errors import SettingError


def step_case(**changes: Any) -> step.StepCase:
    return step.StepCase(**{"model": Path("nano"), "arms": ("s2",), "rounds": 3, "batch": 2, **changes})


def steps_of(host_us: float, model_us: float = 100.0, count: int = 4) -> list[step.Step]:
    """Steps whose host cost is spread over its four parts."""
    quarter, model = int(host_us * 250), int(model_us * 1000)
    return [step.Step(2, quarter, quarter, quarter, model, quarter) for _ in range(count)]


def test_every_arm_is_first_equally_often_and_follows_every_other() -> None:
    names = ["a", "b", "c", "d"]
    orders = [turn_order(names, number) for number in range(8)]
    assert Counter(order[0] for order in orders) == dict.fromkeys(names, 2)
    assert all(sorted(order) == names for order in orders)
    assert {(order[i], order[i + 1]) for order in orders for i in range(3)} >= {("a", "b"), ("b", "a")}


def test_a_folder_that_exists_is_not_written_into(tmp_path: Path) -> None:
    assert new_folder(tmp_path / "new").is_dir()
    with pytest.raises(SettingError, match="expected a new folder"):
        new_folder(tmp_path)


def test_host_cost_is_all_but_the_model_and_added_is_paired_by_round() -> None:
    rounds = {
        step.BASELINE: [steps_of(100.0), steps_of(200.0), steps_of(400.0)],
        "s2": [steps_of(108.0, 50.0), steps_of(216.0, 50.0), steps_of(432.0, 50.0)],
    }
    base, own = step.summarize(rounds)
    assert (base.arm, base.host, base.num_steps) == (step.BASELINE, None, 12)
    assert own.rounds_host_us == [108.0, 216.0, 432.0]
    assert own.host is not None
    assert own.host.estimate == pytest.approx(8.0)
    assert own.host.high == pytest.approx(8.0)
    assert own.rounds_step_us == [158.0, 266.0, 482.0]
    assert own.step is not None
    assert own.step.estimate < 0
    assert own.parts_us["model"] == 50.0
    assert "- s2: at most 10 % host cost over stock-extra: met" in step.table([base, own], step_case())


def test_a_goal_that_is_missed_is_said() -> None:
    rounds = {step.BASELINE: [steps_of(100.0), steps_of(100.0)], "s2": [steps_of(120.0), steps_of(121.0)]}
    assert "- s2: at most 10 % host cost over stock-extra: NOT met" in step.table(step.summarize(rounds), step_case())


def test_steps_of_other_batches_the_first_and_a_line_in_writing_are_left_out(tmp_path: Path) -> None:
    def line(batch: int, schedule: int) -> str:
        return json.dumps({"batch": batch, "schedule": schedule, "launch": 1, "metadata": 1, "model": 1, "process": 1})

    path = tmp_path / "steps.jsonl"
    before = line(2, 1) + "\n"
    lines = [line(1, 2), line(2, 3), line(2, 4), line(2, 5), line(1, 6)]
    path.write_text(before + "\n".join(lines) + "\n" + line(2, 7)[:20])
    steps, offset = step.read_steps(path, offset=len(before), batch=2)
    assert [found.schedule for found in steps] == [4, 5]
    assert path.read_bytes()[offset:] == line(2, 7)[:20].encode()


def test_all_arms_decode_the_same_prompts_and_the_first_round_is_not_kept() -> None:
    seen: dict[str, list[Any]] = {}

    def decode(name: str, prompts: list[list[int]]) -> tuple[Any, list[step.Step]]:
        seen.setdefault(name, []).append(prompts)
        return [prompt[:1] for prompt in prompts], steps_of(float(len(seen[name])))

    case = step_case(batch=3)
    rounds = step.take_rounds(case, decode, say=lambda text: None)
    assert seen["s2"] == seen[step.BASELINE]
    assert len(seen["s2"]) == case.rounds + 1
    assert seen["s2"][0] != seen["s2"][1]
    low, high = case.prompt_tokens
    assert all(low <= len(prompt) <= high for prompts in seen["s2"] for prompt in prompts)
    assert [found[0].host_ns for found in rounds["s2"]] == [2000, 3000, 4000]


def test_there_is_no_number_where_the_tokens_differ() -> None:
    def decode(name: str, prompts: list[list[int]]) -> tuple[Any, list[step.Step]]:
        return [name], steps_of(1.0)

    with pytest.raises(GateError, match="expected the tokens of stock-extra from arm s2"):
        step.take_rounds(step_case(), decode, say=lambda text: None)


class FakeTree:
    """A tree whose turns cost what its arm and size say. costs: (arm, nodes) -> microseconds."""

    core = "UnifiedTreeCore"
    costs: ClassVar[dict[tuple[str, int], float]] = {}

    def __init__(self, arm: str, nodes: int, errors: Path) -> None:
        self.arm, self.nodes = arm, nodes

    def __enter__(self) -> FakeTree:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def ready(self) -> str:
        return self.core if self.arm != "d0" else "RustUnifiedTreeCore"

    def take(self, turns: int) -> list[dict[str, int]]:
        quarter = int(self.costs[self.arm, self.nodes] * 250)
        return [dict.fromkeys(tree.OPERATIONS, quarter) for _ in range(turns)]


def run_tree(monkeypatch: pytest.MonkeyPatch, folder: Path, costs: dict[tuple[str, int], float]) -> tuple[Any, str]:
    monkeypatch.setattr(FakeTree, "costs", costs)
    case = tree.TreeCase(arms=("s2",), nodes=(10, 1000), rounds=2, turns=3)
    results = tree.measure(case, folder, start=FakeTree, say=lambda text: None)  # type: ignore[arg-type]
    return results, tree.table(results)


def test_a_tree_that_is_fast_and_flat_meets_its_goals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    costs = {("stock-512", 10): 100.0, ("s2", 10): 90.0, ("stock-512", 1000): 900.0, ("s2", 1000): 99.0}
    results, text = run_tree(monkeypatch, tmp_path / "run", costs)
    assert [(result.arm, result.nodes) for result in results] == list(costs)
    assert results[1].over_rival.estimate == pytest.approx(-10.0)
    assert "- s2: not slower than stock-512: met (worst -10.0 %)" in text
    assert "- s2: flat from 10 to 1,000 nodes: met (1.10 times)" in text
    raw = [json.loads(line) for line in (tmp_path / "run" / "turns.jsonl").read_text().splitlines()]
    assert len(raw) == 2 * 2 * 3 * 3
    record = json.loads((tmp_path / "run" / "tree.json").read_text())
    assert record["results"][1]["rounds_us"] == [90.0, 90.0]
    assert {"case", "environment", "results"} == record.keys()


def test_a_slow_or_growing_tree_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    costs = {("stock-512", 10): 100.0, ("s2", 10): 104.0, ("stock-512", 1000): 900.0, ("s2", 1000): 208.0}
    _, text = run_tree(monkeypatch, tmp_path / "run", costs)
    assert "- s2: not slower than stock-512: NOT met (worst +4.0 %)" in text
    assert "- s2: flat from 10 to 1,000 nodes: NOT met (2.00 times)" in text


def test_arms_with_different_tree_cores_are_not_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(FakeTree, "costs", {})
    case = tree.TreeCase(arms=("d0",), nodes=(10,), rounds=2)
    with pytest.raises(ServerError, match="expected one tree core in all arms"):
        tree.measure(case, tmp_path / "run", start=FakeTree, say=lambda text: None)  # type: ignore[arg-type]


def test_a_process_that_ends_is_told_with_its_last_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with (
        tree.TreeProcess("s2", 10, tmp_path / "log") as process,
        pytest.raises(ServerError, match="expected an answer of the tree of s2, got none"),
    ):
        process.ready()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("step", "--arms", "s9"), "expected"),
        (("step", "--arms", "stock-extra"), "--arms: expected arms of SGLang other than stock-extra"),
        (("step", "--rounds", "1"), "--rounds: expected at least 2, got 1"),
        (("step", "--model", "no-such"), "--model: expected"),
        (("tree", "--arms", "stock"), "--arms: expected organizations out of s0, s1, s2, d0, got 'stock'"),
        (("tree", "--nodes", "many"), "--nodes: expected whole numbers"),
        (("tree", "--nodes", "0"), "--nodes: expected at least 1, got 0"),
    ],
)
def test_a_mistake_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: Any, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    if words[0] == "step" and "--model" not in words:
        words = (*words, "--model", "model")
    assert main(["micro", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
