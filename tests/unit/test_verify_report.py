"""What a verification says in words, and which servers it starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from bench.nano import CONTEXT_TOKENS, DTYPES, MODELS
from bench.verify.arms import make_arm, start_arm
from bench.verify.compare import Verdict
from bench.verify.page import page
from bench.verify.records import REFERENCE, ArmResult, Finding, VerifyResult, summarize_path
from bench.verify.report import EXIT_CODES, arm_table, arms_table, remarks, sentence
from bench.verify.session import VerifySettings
from sgl_hybrid.config import MemorySettings
from sgl_hybrid.errors import SettingError
from sgl_hybrid.memory.geometry import StateGeometry
from sgl_hybrid.seams.sizing import make_plan


def finding(path: str, verdict: Verdict, *, cached: int = 512, size: float = 0.0) -> Finding:
    differs = verdict in (Verdict.WITHIN, Verdict.DIFFERENT)
    return Finding(
        path=path,
        step="hit at 512",
        request=3,
        run=9,
        verdict=verdict,
        wanted_tokens=512,
        cached_tokens=cached,
        position=1537 if differs else None,
        kind="log-probability" if differs else None,
        max_logprob_difference=None if verdict is Verdict.NOT_EXERCISED else size,
        reason="never evicted" if verdict is Verdict.NOT_EXERCISED else None,
    )


def arm(*findings: Finding, name: str = "s2", organization: str | None = "s2") -> ArmResult:
    paths = dict.fromkeys(found.path for found in findings)
    return ArmResult(
        arm=name,
        organization=organization,
        grid_tokens=512,
        batch_bound=2e-5,
        server={},
        paths=[summarize_path(path, [found for found in findings if found.path == path]) for path in paths],
        findings=list(findings),
        requests=[],
        runs=[],
    )


EQUAL = finding("warm", Verdict.EQUAL)


def test_equal_and_what_was_not_exercised() -> None:
    found = arm(finding("cold", Verdict.EQUAL, cached=0), EQUAL, finding("eviction", Verdict.NOT_EXERCISED))
    assert found.verdict is Verdict.EQUAL
    assert sentence(found) == (
        "s2: equal on 1 of 1 paths: a cache hit changed nothing but the time; not exercised: eviction"
    )
    assert remarks(found) == ["eviction, not exercised 1 times: never evicted"]


def test_a_reference_that_varies_does_not_make_hits_unequal() -> None:
    found = arm(*(finding(path, Verdict.WITHIN, cached=0, size=0.1) for path in REFERENCE), EQUAL)
    assert found.verdict is Verdict.EQUAL


def test_within_names_its_paths() -> None:
    found = arm(EQUAL, finding("concurrent", Verdict.WITHIN, size=4.8e-6))
    assert found.verdict is Verdict.WITHIN
    assert sentence(found).endswith("bit for bit equal on 1 of 2 paths, within its own variation on: concurrent")


def test_different_names_position_depth_and_organization() -> None:
    found = arm(EQUAL, finding("restore", Verdict.DIFFERENT, size=0.5))
    assert sentence(found) == (
        "s2: DIFFERENT on 1 of 2 paths (restore); first: restore, log-probability at position 1,537 of request 3 "
        "(hit at 512; hit depth 512), organization s2"
    )
    assert "none (stock SGLang)" in sentence(arm(finding("warm", Verdict.DIFFERENT), name="stock", organization=None))


def test_comparisons_without_a_hit_are_no_verdict() -> None:
    found = arm(finding("retraction", Verdict.EQUAL, cached=0))
    assert found.verdict is Verdict.NOT_EXERCISED
    assert EXIT_CODES[found.verdict] == 3
    assert sentence(found) == "s2: no verdict: no answer used the cache on any of 1 paths"


def test_a_path_in_numbers() -> None:
    found = summarize_path("warm", [EQUAL, finding("warm", Verdict.DIFFERENT, size=0.25), EQUAL])
    assert (found.verdict, found.max_logprob_difference) == (Verdict.DIFFERENT, 0.25)
    assert found.counts == {"equal": 2, "within": 0, "not exercised": 0, "different": 1}
    assert summarize_path("warm", []).verdict is Verdict.NOT_EXERCISED


def test_tables_have_a_row_for_each_path_and_a_column_for_each_arm(capsys: pytest.CaptureFixture[str]) -> None:
    ours, stock = arm(EQUAL), arm(finding("warm", Verdict.DIFFERENT, size=0.5), name="stock", organization=None)
    result = VerifyResult(
        command=[],
        started_utc="",
        seconds=1.0,
        environment={},
        settings={},
        verdict=Verdict.EQUAL,
        beside=["stock"],
        arms=[ours, stock],
    )
    console = Console(width=120)
    console.print(arm_table(stock))
    console.print(arms_table(result))
    printed = capsys.readouterr().out
    assert [cell.strip() for cell in printed.splitlines()[4].split("│")[1:-1]] == [
        *("warm", "different", "0", "0", "1", "0", "5.0e-01")
    ]
    assert "equal (0)" in printed
    assert "different (5.0e-01)" in printed


def test_a_page_has_all_arms_side_by_side_and_says_where_it_was_made() -> None:
    ours = arm(EQUAL, EQUAL, finding("eviction", Verdict.NOT_EXERCISED))
    stock = arm(finding("warm", Verdict.DIFFERENT, size=0.5), name="stock", organization=None)
    result = VerifyResult(
        command=["python", "-m", "bench", "verify"],
        started_utc="",
        seconds=1.0,
        environment={
            "git": {"commit": "0123abc", "dirty": False},
            "versions": {"torch": "2.0"},
            "machine": {"cpu": "a processor", "num_cores": 2, "memory_gib": 23.5, "accelerators": []},
        },
        settings={},
        verdict=Verdict.EQUAL,
        beside=["stock"],
        arms=[ours, stock],
    )
    lines = page(result).splitlines()
    assert "| path | s2, grid 512 | stock (beside), grid 512 |" in lines
    assert "| warm | equal, 2 | different, 1, 5.0e-01 |" in lines
    assert "| eviction | not exercised | - |" in lines
    assert "- Commit: `0123abc`" in lines
    assert "- Command: `python -m bench verify`" in lines


@pytest.mark.parametrize(
    ("given", "dtype", "name", "arguments"),
    [
        (
            "--memory-org s2",
            "float32",
            "s2",
            "--memory-org s2 --memory-budget 10MiB --schedule-conservativeness 0.01 --admission-headroom 0",
        ),
        ("--memory-org s2 --admission-headroom auto", "float32", "s2", None),
        ("--memory-org=s1 --memory-budget=b63", "float32", "s1", None),
        ("--memory-org d0", "bfloat16", "d0", None),
        ("stock", "float32", "stock", None),
        ("--max-total-tokens 4096 --schedule-conservativeness 1", "float32", "stock", None),
    ],
)
def test_an_arm_gets_little_memory_unless_it_names_some(
    given: str, dtype: str, name: str, arguments: str | None
) -> None:
    found = make_arm(given, dtype)
    assert found.name == name
    text = " ".join(found.arguments)
    assert arguments is None or text == arguments
    assert text.count("--memory-budget") <= 1
    assert ("17MiB" in text) == (dtype == "bfloat16")
    assert text.count("--max-total-tokens") == (name == "stock")
    assert text.count("--schedule-conservativeness") == 1
    assert text.count("--admission-headroom") == (name != "stock")


@pytest.mark.parametrize("model", sorted(MODELS))
@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("ssm_dtype", DTYPES)
@pytest.mark.parametrize("name", ["s0", "s1", "s2", "d0"])
def test_little_memory_is_enough_for_one_request(model: str, kv_dtype: str, ssm_dtype: str, name: str) -> None:
    """And for no more than three of that length, with nothing else in the pool."""
    arguments = make_arm(f"--memory-org {name}", kv_dtype).arguments
    fraction = "--d0-attention-fraction"
    settings = MemorySettings(
        memory_org=name,
        memory_budget=arguments[arguments.index("--memory-budget") + 1],
        d0_attention_fraction=float(arguments[arguments.index(fraction) + 1]) if fraction in arguments else None,
    )
    config = {**MODELS[model].config, "vocab_size": 512}
    geometry = StateGeometry.from_config(config, kv_dtype=kv_dtype, ssm_dtype=ssm_dtype, conv_dtype=kv_dtype, tp_size=1)
    plan = make_plan(settings, geometry, context_tokens=CONTEXT_TOKENS)
    assert plan.num_checkpoints >= 2
    if model == "falcon-h1-nano":
        assert plan.num_attention_tokens <= 3 * CONTEXT_TOKENS


@pytest.mark.parametrize("flag", ["--port 3", "--model-path=x", "--dtype float32"])
def test_flags_that_verify_sets_are_refused(flag: str) -> None:
    with pytest.raises(SettingError, match=flag.split()[0].split("=")[0]):
        make_arm(f"--memory-org s2 {flag}", "float32")


@pytest.mark.parametrize(
    ("device", "given", "platform", "attention"),
    [
        ("cpu", "--memory-org s2", "sgl_hybrid_cpu", "torch_native"),
        ("cuda", "--memory-org s2", "", "triton"),
        ("cuda", "stock", "", "triton"),
        ("cuda", "--memory-org s2 --attention-backend flashinfer", "", "flashinfer"),
    ],
)
def test_an_arm_is_started_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, given: str, platform: str, attention: str
) -> None:
    monkeypatch.setattr("bench.verify.arms.write_model", lambda *model, **options: None)
    server = start_arm(
        make_arm(given, "float32"),
        model="falcon-h1-nano",
        dtype="float32",
        models_folder=tmp_path,
        log=tmp_path / "log",
        device=device,
    )
    command, environment = server._command, server._environment
    assert command[command.index("--device") + 1] == device
    assert [command[at + 1] for at, word in enumerate(command) if word == "--attention-backend"] == [attention]
    assert (environment["SGLANG_PLATFORM"], environment["SGLANG_MAMBA_CONV_DTYPE"]) == (platform, "float32")


def test_another_device_is_refused() -> None:
    with pytest.raises(SettingError, match="expected --device cpu or cuda, got tpu"):
        VerifySettings(serve=["stock"], device="tpu")


def test_a_model_that_sglangs_norms_do_not_take_on_a_gpu_is_refused() -> None:
    with pytest.raises(SettingError, match="expected --dtype bfloat16 with --device cuda"):
        VerifySettings(serve=["stock"], device="cuda")
    assert VerifySettings(serve=["stock"], device="cuda", dtype="bfloat16").device == "cuda"
