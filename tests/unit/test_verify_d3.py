"""The page of the paper's correctness checks: every check has its paper value, and the tests behind it exist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.cli import main
from bench.verify import d3
from bench.verify.client import Answer
from bench.verify.compare import Scores
from bench.verify.d3_table import PAPER, Check, page

ROOT = Path(__file__).parents[2]
ENVIRONMENT: dict[str, Any] = {
    "git": {"commit": "0123abc", "dirty": True},
    "versions": {"torch": "2.0", "sglang": "0.5.23"},
    "machine": {"cpu": "a processor", "num_cores": 2, "memory_gib": 23.5, "accelerators": []},
}


def test_the_page_has_a_row_for_each_check_and_says_where_it_was_made() -> None:
    check = Check(name="isolation", paper=PAPER["isolation"], passed=3, total=4, scope="pairs", command="bench d3")
    text = page([check], command="python -m bench d3", environment=ENVIRONMENT)
    assert "| isolation | 1 of 5 pairs eligible (S2), 0 of 5 (PGK); not compared | 3 | 4 | pairs | `bench d3` |" in text
    assert "- Commit: `0123abc`, with uncommitted changes" in text
    assert "sglang 0.5.23, torch 2.0" in text
    assert "CPU run (a processor, 2 cores, 23.5 GiB)" in text


def test_every_test_behind_a_check_exists() -> None:
    for name, _, _, arguments in d3.TESTS:
        assert name in PAPER
        files = [argument for argument in arguments if argument.startswith("tests/")]
        assert files
        assert all((ROOT / file).is_file() for file in files)


def test_outside_a_checkout_it_is_a_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["d3"]) == 2
    assert "expected to run in a checkout of the project" in capsys.readouterr().err


def answer(hidden_states: list[Any]) -> Answer:
    scores = Scores(prompt_tokens=4, first_scored=4, input_logprobs=[], output_ids=[1], output_logprobs=[-1.0])
    return Answer(scores, 0, 0, "length", hidden_states)


def test_hidden_states_are_compared_behind_the_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cold prefill lists four rows and a warm one two; one row a decode step follows. Two output tokens need one."""
    monkeypatch.setattr(d3, "NEW_TOKENS", 2)
    cold = answer([[[1.0], [2.0], [3.0], [4.0]], [5.0]])
    assert d3._digest(cold, 2) == d3._digest(answer([[[3.0], [4.0]], [5.0]]), 2)
    assert d3._digest(cold, 2) != d3._digest(answer([[[3.0], [4.0000005]], [5.0]]), 2)
    assert d3._digest(cold, 2) != d3._digest(answer([[[3.0], [4.0]], [6.0]]), 2)
