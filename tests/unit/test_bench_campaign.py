"""Campaigns against stand-in servers that are real processes: what is kept, gone on with, refused and gated."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import zstandard

from bench.arm_plan import Policy, Serving, plan_arm
from bench.arms import arm_of
from bench.campaign.cell import real_launcher
from bench.campaign.folder import INTERRUPTED, CampaignFolder, outcome_of, read_manifest, read_rows, read_sessions
from bench.campaign.gate import GateError, check_answers, check_server
from bench.campaign.gauges import read_samples
from bench.campaign.manifest import CampaignManifest
from bench.campaign.run import CampaignResult
from bench.cases import case_of
from bench.cells import Changes, cells_of
from bench.cli import main
from bench.metrics.latency import Limits
from bench.outcome import adopted
from bench.records import read_manifest as read_run
from bench.records import read_records
from sgl_hybrid.errors import SettingError
from tests.unit.campaigns import REQUESTS, StandIn, campaign, write_shapes
from tests.unit.fake_server import FakeServer


@pytest.fixture(autouse=True)
def _stand_ins_come_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.server.POLL_S", 0.05)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shapes(tmp_path_factory.mktemp("model") / "falcon-h1-nano")


def test_a_campaign_keeps_everything_about_every_cell(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    launch = StandIn(s2="--token-s 0.002")
    assert campaign(model, tmp_path / "q1", launch, arms="s2 stock-tuned") == CampaignResult(2, 0, 0, False)
    rows = {row.outcome.arm: row for row in read_rows(tmp_path / "q1")}
    assert set(rows) == set(launch.started) == {"s2", "stock-tuned"}
    outcome = rows["s2"].outcome
    assert (outcome.case, outcome.budget, outcome.seed, outcome.q, outcome.rate) == ("q1", "b63", 42000, 1.0, 200.0)
    assert (outcome.cap, outcome.attempt, outcome.status) == (63, 1, "ok")
    assert outcome.metrics["output_tokens_per_s"] > outcome.metrics["ledger_output_tokens_per_s"] > 0
    assert outcome.counters["num_ok"] == REQUESTS
    assert outcome.counters["slabs.live_slots"] == 3
    assert outcome.counters["num_samples"] >= 2
    assert outcome.counters["running_requests_cap"] == 4
    assert rows["stock-tuned"].outcome.counters["mamba_share"] == 0.7
    folder = tmp_path / "q1" / "cells" / rows["s2"].key / "attempt-1"
    assert len(read_records(folder / "load")) == REQUESTS
    samples = read_samples(folder)
    assert len(samples) >= 2
    assert [s.at_ns for s in samples] == sorted(s.at_ns for s in samples)
    assert samples[-1].input_tokens is not None
    assert samples[-1].input_tokens > 4900  # the gate's three prompts, once
    slabs = [json.loads(line) for line in (folder / "slabs.jsonl").read_text().splitlines()]
    assert len(slabs) == len(samples)
    assert slabs[0]["occupancy"] == [0, 0, 0, 1]
    assert "fake server starting" in (folder / "server.log").read_text()
    cell = json.loads((folder / "cell.json").read_text())
    assert cell["plan"]["units"] == {"pages of 262,144 B": 193}
    assert cell["tree_core"] == "Python"
    assert cell["environment_variables"]["OMP_NUM_THREADS"] == "1"
    assert cell["command"][0] == Path(sys.executable).name
    assert str(model) not in (folder / "cell.json").read_text()
    # Both arms were asked the same, which is kept once, token for token.
    runs = [read_run(path) for path in (tmp_path / "q1").glob("cells/*/attempt-1/load")]
    [kept] = (tmp_path / "q1" / "workloads").iterdir()
    assert {run.workload_sha256 for run in runs} == {kept.name.removesuffix(".jsonl.zst")}
    lines = zstandard.ZstdDecompressor().decompress(kept.read_bytes(), max_output_size=2**24).splitlines()
    asked = [json.loads(line) for line in lines]
    assert len(asked) == REQUESTS
    assert [len(line["prompt_ids"]) for line in asked] == [
        record.prompt_tokens for record in sorted(read_records(folder / "load"), key=lambda record: record.index)
    ]
    manifest = read_manifest(tmp_path / "q1")
    assert (manifest.case, manifest.num_requests, len(manifest.model_sha256)) == ("q1", REQUESTS, 64)
    assert manifest.tokenizer_sha256 != manifest.model_sha256
    [session] = read_sessions(tmp_path / "q1")
    assert {"git", "machine", "versions"} <= set(session.environment)


def test_a_campaign_goes_on_and_grows_without_repeating_what_is_finished(model: Path, tmp_path: Path) -> None:
    launch = StandIn()
    campaign(model, tmp_path, launch)
    assert campaign(model, tmp_path, launch, seeds=2) == CampaignResult(2, 0, 0, False)
    assert launch.started == ["s2", "s2"]
    assert [row.outcome.seed for row in read_rows(tmp_path)] == [42000, 42001]
    assert len(read_sessions(tmp_path)) == 2


def test_a_dead_server_is_a_row_with_its_reason_and_a_second_attempt_leaves_the_first(
    model: Path, tmp_path: Path
) -> None:
    dying = StandIn(s2="--die-after 9")  # six of the gate, three of the load
    assert campaign(model, tmp_path, dying) == CampaignResult(0, 1, 0, False)
    [row] = read_rows(tmp_path)
    assert row.outcome.status == "failed"
    assert (
        row.outcome.reason
        == "expected a running server, got one that ended with status 9; its log ends: fake server starting"
    )
    first = (tmp_path / "cells" / row.key / "attempt-1" / "load" / "requests.jsonl").read_bytes()
    assert len(first.splitlines()) == REQUESTS
    # Not tried again unless asked to, and then beside the first attempt.
    assert campaign(model, tmp_path, StandIn()) == CampaignResult(0, 1, 0, False)
    assert campaign(model, tmp_path, StandIn(), retry_failed=True) == CampaignResult(1, 0, 0, False)
    assert (tmp_path / "cells" / row.key / "attempt-1" / "load" / "requests.jsonl").read_bytes() == first
    rows = read_rows(tmp_path)
    assert [(r.outcome.attempt, r.outcome.status) for r in rows] == [(1, "failed"), (2, "ok")]
    assert [outcome.attempt for outcome in adopted(r.outcome for r in rows)] == [2]


def test_a_load_that_was_answered_is_kept_without_what_the_server_did_not_say(model: Path, tmp_path: Path) -> None:
    launch = StandIn(s1="--mute-after 12", s2="--falling --token-s 0.002")  # six of the gate, six of the load
    assert campaign(model, tmp_path, launch, arms="s1 s2") == CampaignResult(2, 0, 0, False)
    mute, falling = sorted((row.outcome for row in read_rows(tmp_path)), key=lambda outcome: outcome.arm)
    assert mute.reason is not None
    assert mute.reason.startswith("no counters of the server after the load: expected /server_info of http://127.0.0.1")
    assert mute.counters["num_ok"] == REQUESTS
    assert "slabs.live_slots" not in mute.counters
    assert falling.reason == "no work: the server's counter of input_tokens fell"
    assert falling.counters["slabs.live_slots"] == 3
    assert "c_once_tokens" not in falling.metrics
    assert min(mute.metrics["output_tokens_per_s"], falling.metrics["output_tokens_per_s"]) > 0


STATE = {"max_mamba_cache_size": 30, "mamba_radix_cache_strategy": "extra_buffer"}
S2 = {"organization": "s2", "units": {"total_bytes": 50_593_792}}


@pytest.mark.parametrize(
    ("arm", "state", "reason"),
    [
        ("s2", {"memory_organization": {**S2, "organization": "s1"}}, "memory organization s2, got s1"),
        ("s2", {"memory_organization": {**S2, "units": {"total_bytes": 7}}}, "state memory 50593792, got 7"),
        ("s2", STATE, "memory organization s2, got None"),
        ("stock", {"memory_organization": S2}, "memory organization None, got s2"),
        ("stock", {**STATE, "max_mamba_cache_size": 31}, "state slots 30, got 31"),
        ("stock", STATE, "tokens 52104, got 52105"),
        ("stock-lazy", STATE, "mamba radix cache strategy extra_buffer_lazy, got extra_buffer"),
        ("stock-unified", STATE, "unified memory True, got False"),
    ],
)
def test_a_server_that_serves_something_else_does_not_pass(
    model: Path, arm: str, state: dict[str, object], reason: str
) -> None:
    plan = plan_arm(arm_of(arm), "b63", Serving(model=model), Policy(cap=63))
    tokens = 52_105 if reason.startswith("tokens") else 52_104
    with pytest.raises(GateError, match=reason):
        check_server(arm_of(arm), plan, {"internal_states": [state], "max_total_num_tokens": tokens})


def test_a_server_that_serves_what_was_asked_for_passes(model: Path) -> None:
    for arm, info in (
        ("s2", {"internal_states": [{"memory_organization": S2}]}),
        ("stock", {"internal_states": [STATE], "max_total_num_tokens": 52_104}),
        (
            "stock-unified",
            {"internal_states": [STATE], "enable_unified_memory": True, "max_total_num_tokens": 52_104},
        ),
    ):
        check_server(arm_of(arm), plan_arm(arm_of(arm), "b63", Serving(model=model), Policy(cap=63)), info)


def test_an_arm_with_a_red_gate_has_no_number_and_is_not_started_again(model: Path, tmp_path: Path) -> None:
    launch = StandIn(s2="--forgetful")
    assert campaign(model, tmp_path, launch, seeds=2) == CampaignResult(0, 2, 0, False)
    assert launch.started == ["s2"]
    reason = (
        "gate: expected the same tokens for a cached prompt of 700 tokens, got another at output 0 (64 tokens cached)"
    )
    rows = read_rows(tmp_path)
    assert [(r.outcome.status, r.outcome.reason, r.outcome.metrics) for r in rows] == 2 * [("failed", reason, {})]


def test_a_server_that_finds_nothing_again_does_not_pass() -> None:
    with FakeServer(no_cache=True) as server:
        with pytest.raises(GateError, match="expected a hit on a prompt of 2300 tokens that was asked before"):
            check_answers(server.url, engine="sglang", checkpoint_interval=1792)
        # No boundary in the longest prompt: nothing to find.
        found = check_answers(server.url, engine="sglang", checkpoint_interval=2304)
    assert found.cached_tokens == [0, 0, 0]


def test_what_a_server_cannot_do_is_a_refused_row(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.arm_plan.FLAGS", ())
    launch = StandIn()
    assert campaign(model, tmp_path, launch) == CampaignResult(0, 1, 0, False)
    [row] = read_rows(tmp_path)
    reason = "this server has no --memory-org, --admission-headroom"
    assert (row.outcome.status, row.outcome.reason) == ("refused", reason)
    assert launch.started == []


def test_a_killed_campaign_loses_no_finished_cell(model: Path, tmp_path: Path) -> None:
    """SIGKILL in the middle of the second cell: the first is kept, the second gets a row and then a second attempt."""
    command = [sys.executable, "-m", "tests.unit.campaigns", str(model), str(tmp_path / "q1")]
    process = subprocess.Popen(command, cwd=Path(__file__).parents[2])
    outcomes = tmp_path / "q1" / "outcomes.jsonl"
    deadline = time.monotonic() + 30
    while not (outcomes.is_file() and list((tmp_path / "q1").glob("cells/s1*/attempt-1/load/requests.jsonl"))):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    kept = outcomes.read_bytes()
    assert [row.outcome.arm for row in read_rows(tmp_path / "q1")] == ["s2"]
    outcomes.write_bytes(kept + b'{"key": "half a li')  # and the disk got half of a row
    launch = StandIn()
    assert campaign(model, tmp_path / "q1", launch, arms="s2 s1", order_seed=3) == CampaignResult(2, 0, 0, False)
    assert launch.started == ["s1"]
    assert outcomes.read_bytes().startswith(kept)
    rows = read_rows(tmp_path / "q1")
    assert [(row.outcome.arm, row.outcome.attempt, row.outcome.reason) for row in rows] == [
        ("s2", 1, None),
        ("s1", 1, INTERRUPTED),
        ("s1", 2, None),
    ]


def test_a_clock_that_jumps_changes_no_number(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's clock goes back ten years at every look: times are of the monotonic clock only."""
    now = [2_000_000_000.0]

    def jumping() -> float:
        now[0] -= 300_000_000.0
        return now[0]

    monkeypatch.setattr(time, "time", jumping)
    assert campaign(model, tmp_path, StandIn()) == CampaignResult(1, 0, 0, False)
    [row] = read_rows(tmp_path)
    assert 0 < row.outcome.metrics["request_span_s"] < 60
    assert 0 < row.seconds < 60
    samples = read_samples(tmp_path / "cells" / row.key / "attempt-1")
    assert all(0 < sample.at_ns < 60e9 for sample in samples)


def test_the_folder_of_another_campaign_is_left_alone(model: Path, tmp_path: Path) -> None:
    campaign(model, tmp_path / "a", StandIn())
    before = {path: path.read_bytes() for path in (tmp_path / "a").rglob("*") if path.is_file()}
    with pytest.raises(SettingError, match=r"expected a folder of this campaign, got .* \(num_requests: 6, not 7\)"):
        campaign(model, tmp_path / "a", StandIn(), requests=7)
    assert {path: path.read_bytes() for path in (tmp_path / "a").rglob("*") if path.is_file()} == before
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "notes.txt").write_text("mine")
    with pytest.raises(SettingError, match=r"expected a campaign's folder with campaign.json, got "):
        campaign(model, tmp_path / "b", StandIn())
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["notes.txt"]
    (tmp_path / "c").write_text("a file")
    with pytest.raises(SettingError, match="expected an output folder that can be written"):
        campaign(model, tmp_path / "c", StandIn())


def test_limits_of_goodput_are_of_the_whole_folder(model: Path, tmp_path: Path) -> None:
    limits = Limits(ttft_ms=2000)
    campaign(model, tmp_path, StandIn(), limits=limits)
    [row] = read_rows(tmp_path)
    assert row.outcome.metrics["goodput_share"] == 1
    assert campaign(model, tmp_path, StandIn(), limits=limits) == CampaignResult(1, 0, 0, False)
    with pytest.raises(SettingError, match=r"of another \(limits: TTFT 2000 ms, not TTFT 500 ms and TPOT 50 ms\)"):
        campaign(model, tmp_path, StandIn(), limits=Limits(ttft_ms=500, tpot_ms=50))
    with pytest.raises(SettingError, match=r"\(limits: TTFT 2000 ms, not None\)"):
        campaign(model, tmp_path, StandIn())


def test_a_cell_on_a_slow_host_is_measured_again_and_keeps_its_numbers(model: Path, tmp_path: Path) -> None:
    launch = StandIn(s2="--token-s 0.002")
    assert campaign(model, tmp_path, launch, host_limit_ms=1e-6) == CampaignResult(0, 1, 0, False)
    rows = [row.outcome for row in read_rows(tmp_path)]
    assert [(row.attempt, row.status) for row in rows] == [(1, "slow"), (2, "slow"), (3, "slow")]
    assert all(row.metrics["output_tokens_per_s"] > 0 for row in rows)
    assert rows[0].reason == (
        f"slow host: {rows[0].metrics['host_ms']:.2f} ms for the fixed work, more than --host-limit 1e-06"
    )
    # Asked for again, it gets as many attempts again.
    campaign(model, tmp_path, launch, host_limit_ms=1e-6, retry_failed=True)
    assert [row.outcome.attempt for row in read_rows(tmp_path)] == [1, 2, 3, 4, 5, 6]
    with pytest.raises(SettingError, match=r"of another \(host_limit_ms: 1e-06, not None\)"):
        campaign(model, tmp_path, launch)
    assert campaign(model, tmp_path / "steady", launch, host_limit_ms=1e6) == CampaignResult(1, 0, 0, False)


def test_a_limit_of_the_host_that_no_cell_can_keep_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="--host-limit: expected milliseconds above 0, got 0"):
        campaign(model, tmp_path / "new", StandIn(), host_limit_ms=0)
    assert not (tmp_path / "new").exists()


def test_a_slow_cell_whose_next_attempt_was_cut_off_is_made_again(model: Path, tmp_path: Path) -> None:
    launch = StandIn(s2="--token-s 0.002")
    campaign(model, tmp_path, launch, host_limit_ms=1e-6)
    [row] = read_rows(tmp_path)[-1:]
    cut = msgspec.structs.replace(row.outcome, attempt=4, reason=INTERRUPTED, status="failed")
    with open(tmp_path / "outcomes.jsonl", "ab") as file:
        file.write(msgspec.json.encode(msgspec.structs.replace(row, outcome=cut)) + b"\n")
    (tmp_path / "cells" / row.key / "attempt-4").mkdir()
    campaign(model, tmp_path, launch, host_limit_ms=1e-6)
    assert [row.outcome.attempt for row in read_rows(tmp_path)] == [1, 2, 3, 4, 5, 6, 7]


def test_a_folder_of_before_limits_were_kept_has_none(model: Path, tmp_path: Path) -> None:
    campaign(model, tmp_path, StandIn())
    path = tmp_path / "campaign.json"
    kept = json.loads(path.read_text())
    del kept["limits"]
    path.write_text(json.dumps(kept))
    assert campaign(model, tmp_path, StandIn()) == CampaignResult(1, 0, 0, False)


def test_one_campaign_at_a_time_works_on_a_folder(tmp_path: Path) -> None:
    manifest = CampaignManifest(
        case="q1", model="m", dtype="float32", model_sha256="0", tokenizer_sha256="0", num_requests=1
    )
    with CampaignFolder(tmp_path, manifest), pytest.raises(SettingError, match="that no other campaign works on"):
        CampaignFolder(tmp_path, manifest).__enter__()


def test_every_condition_of_a_cell_is_in_its_outcome() -> None:
    cell = cells_of(case_of("pinning"), Changes(num_seeds=1))[0]
    outcome = outcome_of(cell, 3, "failed", "why")
    assert (outcome.variant, outcome.cap, outcome.attempt, outcome.reason) == ("pin=off", 109, 3, "why")
    assert (
        msgspec.structs.asdict(outcome).items()
        >= {name: getattr(cell, name) for name in cell.__struct_fields__ if name != "num_requests"}.items()
    )


def test_a_data_set_that_cannot_be_read_is_said_before_a_folder_is_made(model: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"missing\.json"):
        campaign(model, tmp_path / "new", StandIn(), dataset=tmp_path / "missing.json")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["q11"], "expected a case out of q1, "),
        (["q1", "--arms", "s2,s9"], "expected an arm out of s0, "),
        (["q1", "--seeds", "0"], "--seeds: expected at least 1 seed, got 0"),
        (["q1", "--q", "half"], "--q: expected numbers of 0 to 1 with commas between them, got 'half'"),
    ],
)
def test_mistakes_on_the_command_line_are_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["run", *arguments, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}")
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_budget_too_small_for_an_arm_is_said_before_a_folder_is_made(model: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="expected a budget that holds one request in arm stock, got b5 "):
        campaign(model, tmp_path / "new", StandIn(), arms="stock", budget="b5")
    assert not (tmp_path / "new").exists()


def test_rows_of_vllm_say_that_its_environment_is_missing(model: Path, tmp_path: Path) -> None:
    launch = real_launcher(Serving(model=model), tmp_path / "no" / "python")
    assert campaign(model, tmp_path / "q1", launch, arms="vllm") == CampaignResult(0, 1, 0, False)
    [row] = read_rows(tmp_path / "q1")
    reason = "expected vLLM in an environment of its own, got none: run `make vllm`"
    assert (row.outcome.status, row.outcome.reason) == ("refused", reason)
