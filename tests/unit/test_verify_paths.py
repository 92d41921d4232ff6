"""`bench verify` against a loopback server with a cache of states: what it calls equal, different and not exercised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.cli import main
from bench.verify.compare import Verdict
from bench.verify.records import VerifyResult
from tests.unit.fake_cache import FakeCacheServer

COUNTED = ["warm", "eviction", "decode boundary", "restore", "resume", "concurrent", "retraction"]


class Checked:
    """What one `bench verify` came to: exit status, result file, and what it printed as JSON."""

    def __init__(self, status: int, file: Path, printed: str) -> None:
        self.status = status
        self.result = msgspec.json.decode(file.read_bytes(), type=VerifyResult)
        self.printed: dict[str, Any] = json.loads(printed)
        self.paths = {path.path: path for path in self.result.arms[0].paths}

    def verdicts(self, verdict: Verdict) -> list[str]:
        return [name for name, path in self.paths.items() if path.verdict is verdict]


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(server: FakeCacheServer, *options: str) -> Checked:
        with server:
            file = tmp_path / "result.json"
            status = main(["verify", "--url", server.url, "--quick", "--json", "--out", str(file), *options])
        return Checked(status, file, capsys.readouterr().out)

    return run


def test_a_faithful_cache_is_equal_on_every_path(check: Any) -> None:
    found = check(FakeCacheServer())
    assert found.status == 0
    assert found.result.verdict is Verdict.EQUAL
    assert found.verdicts(Verdict.EQUAL) == ["cold", *COUNTED[:5], "cold, concurrent", *COUNTED[5:]]
    assert all(path.counts["not exercised"] == 0 for path in found.paths.values())
    [arm] = found.result.arms
    assert (arm.arm, arm.organization, arm.grid_tokens) == ("s2", "s2", 16)


def test_every_boundary_before_the_last_token_is_visited(check: Any) -> None:
    """Quick prompts have 2 * 16 + 37 and 2 * 16 + 1 tokens: boundaries 16 to 64, and 16 and 32."""
    found = check(FakeCacheServer(), "--only", "warm")
    [arm] = found.result.arms
    assert [finding.cached_tokens for finding in arm.findings] == [16, 32, 48, 64, 16, 32]
    assert {len(request.prompt_ids) for request in arm.requests} == {69, 33}
    assert {request.first_scored for request in arm.requests} == {64, 32}


def test_the_file_keeps_tokens_and_numbers_of_every_run(check: Any) -> None:
    found = check(FakeCacheServer(), "--only", "cold", "--only", "warm")
    [arm] = found.result.arms
    colds = [run for run in arm.runs if run.path == "cold"]
    assert len(colds) == 2 * 5
    prompt = arm.requests[colds[0].request].prompt_ids
    assert colds[0].scores.output_ids == [(sum(prompt) + step) % 500 for step in range(8)]
    # The prompt of 69 tokens is scored behind its boundary at 64; the first scored token has no number.
    assert colds[0].scores.first_scored == 65
    assert len(colds[0].scores.logprobs()) == 4 + 8
    assert found.printed["arms"][0]["num_runs"] == len(arm.runs) == 10 + 6
    assert "runs" not in found.printed["arms"][0]


def test_a_last_bit_in_a_hit_is_different_and_located(check: Any) -> None:
    found = check(FakeCacheServer(hit_error=1e-7), "--only", "warm", "--only", "restore")
    assert found.status == 1
    assert found.verdicts(Verdict.DIFFERENT) == ["warm", "restore"]
    first = found.paths["warm"].first_difference
    assert (first.position, first.kind, first.cached_tokens) == (69 + 8 - 1, "log-probability", 16)
    assert first.max_logprob_difference == pytest.approx(1e-7)


def test_other_tokens_are_different_under_load_too(check: Any) -> None:
    found = check(FakeCacheServer(wrong_token=True), "--only", "concurrent")
    assert found.status == 1
    assert found.paths["concurrent"].first_difference.kind == "token"


def test_rounding_under_load_is_within_and_its_size_reported(check: Any) -> None:
    found = check(FakeCacheServer(batch_noise=1e-6))
    assert found.status == 0
    assert found.result.verdict is Verdict.WITHIN
    # Whether hits in a batch equal the batch without hits or only lie within depends on who is last in the batch.
    assert set(found.verdicts(Verdict.WITHIN)) - {"concurrent"} == {"cold, concurrent", "retraction"}
    assert found.paths["cold, concurrent"].max_logprob_difference == pytest.approx(1e-6)


def test_more_than_rounding_under_load_is_different(check: Any) -> None:
    found = check(FakeCacheServer(hit_error=1e-3), "--only", "concurrent")
    assert found.status == 1


def test_a_reference_that_does_not_repeat_itself_is_measured(check: Any) -> None:
    """Its repeats are 1/8 apart; hits that are off by 1/16 cannot be told from it, hits that are off by 1/2 can."""
    found = check(FakeCacheServer(cold_noise=0.125, hit_error=0.0625), "--only", "cold", "--only", "warm")
    assert (found.status, found.result.verdict) == (0, Verdict.WITHIN)
    assert found.paths["cold"].max_logprob_difference == pytest.approx(0.125)
    assert check(FakeCacheServer(cold_noise=0.125, hit_error=0.5), "--only", "cold", "--only", "warm").status == 1


def test_a_missing_number_in_a_hit_is_different(check: Any) -> None:
    assert check(FakeCacheServer(missing_numbers=True), "--only", "warm").status == 1


def test_a_state_that_changes_after_many_visits_is_caught(check: Any) -> None:
    found = check(FakeCacheServer(forgets_after=5), "--only", "restore")
    assert found.status == 1
    assert found.paths["restore"].first_difference.step == "visit 1 again after 10"
    assert check(FakeCacheServer(forgets_after=5), "--only", "restore", "--restores", "4").status == 0


def test_a_hit_at_another_depth_is_not_exercised(check: Any) -> None:
    """States that are found one boundary too deep: nothing hits where it was prepared."""
    found = check(FakeCacheServer(wrong_depth=True), "--only", "warm")
    assert found.status == 3
    assert found.paths["warm"].verdict is Verdict.NOT_EXERCISED
    assert "expected a hit of 16 tokens, got" in found.paths["warm"].reason


def test_without_retraction_that_path_is_not_exercised(check: Any) -> None:
    found = check(FakeCacheServer(retracts=False, resume_error=None), "--only", "warm", "--only", "retraction")
    assert (found.status, found.result.verdict) == (0, Verdict.EQUAL)
    assert found.verdicts(Verdict.NOT_EXERCISED) == ["retraction"]
    assert "--memory-budget" in found.paths["retraction"].reason


def test_a_resumed_request_with_another_bit_is_different(check: Any) -> None:
    found = check(FakeCacheServer(resume_error=1e-7), "--only", "resume")
    assert found.status == 1
    assert found.paths["resume"].counts["different"] == 2 * 2
    assert "taken back 1 times" in found.paths["resume"].first_difference.step


def test_a_server_that_takes_nothing_back_on_request_is_not_exercised(check: Any) -> None:
    found = check(FakeCacheServer(resume_error=None), "--only", "warm", "--only", "resume")
    assert (found.status, found.verdicts(Verdict.NOT_EXERCISED)) == (0, ["resume"])
    assert "could be taken back" in found.paths["resume"].reason


def test_eviction_of_the_deep_state_is_brought_about(check: Any) -> None:
    found = check(FakeCacheServer(capacity=6), "--only", "eviction")
    [arm] = found.result.arms
    assert [finding.step for finding in arm.findings][:2] == ["states behind 16 evicted", "published again"]
    assert found.status == 0


def test_a_server_that_never_hits_gives_no_verdict(check: Any) -> None:
    assert check(FakeCacheServer(capacity=0)).status == 3


def test_stock_needs_a_grid_where_its_model_is_not_local(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeCacheServer(organized=False) as server:
        options = ["verify", "--url", server.url, "--quick", "--out", str(tmp_path / "result.json")]
        assert main(options) == 2
        assert "expected --grid" in capsys.readouterr().err
        assert main([*options, "--grid", "16", "--only", "warm"]) == 0


def test_own_prompts(check: Any, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt_ids": [9] * 40}) + "\n" + json.dumps({"prompt_ids": [8] * 10}) + "\n")
    found = check(FakeCacheServer(), "--prompts", str(prompts), "--only", "cold", "--only", "warm")
    assert [len(request.prompt_ids) for request in found.result.arms[0].requests] == [40, 10]
    assert found.paths["warm"].counts["equal"] == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "expected either --url or --serve, got none"),
        (["--url", "http://127.0.0.1:9", "--serve", "--memory-org s2"], "got both"),
        (["--url", "http://127.0.0.1:9", "--stock"], "expected --stock with --serve"),
        (["--url", "http://127.0.0.1:9"], "expected a running SGLang"),
        (["--serve", "--memory-org s2 --port 7"], "got --port"),
        (["--url", "http://127.0.0.1:9", "--only", "hot"], "expected paths out of cold, warm"),
        (["--url", "http://127.0.0.1:9", "--restores", "1"], "expected --restores of at least 2, got 1"),
        (["--url", "http://127.0.0.1:9", "--prompts", "absent.jsonl"], "expected a file of prompts"),
    ],
)
def test_mistakes_are_one_line_and_status_2(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", *options, "--out", str(tmp_path / "result.json")]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1


def test_a_server_that_goes_away_gives_no_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = FakeCacheServer()
    server.die_after = 6
    with server:
        assert main(["verify", "--url", server.url, "--quick", "--out", str(tmp_path / "result.json")]) == 3
    assert "error: expected http://127.0.0.1" in capsys.readouterr().err
