"""The flags in SGLang's own parser: what they set, and every mistake as one line with status 2 before a model loads."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from sglang.srt.server_args import ServerArgs

from bench.nano import write_model
from sgl_hybrid.config import FLAGS, MemorySettings
from sgl_hybrid.errors import SettingError
from sgl_hybrid.seams import flags, gpu_arguments, install
from sgl_hybrid.seams.sizing import plan_from_model


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "falcon-h1-nano"
    write_model("falcon-h1-nano", folder, seed=0)
    return folder


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """No flag comes from the environment, and this process keeps stock SGLang: seams are installed in servers."""
    for name in [name for name in os.environ if name.startswith(("SGLANG_HYBRID_", "SGLANG_MAMBA_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SGLANG_PLATFORM", "sgl_hybrid_cpu")
    for flag in FLAGS:
        # Recorded, so that what a test exports is undone after it.
        monkeypatch.setenv(flag.environment, "")
    monkeypatch.setenv("SGLANG_MAMBA_CONV_DTYPE", "")
    monkeypatch.setattr(install, "memory", lambda settings: None)


def parse(nano: Path, *options: str) -> dict[str, Any]:
    """Parse a command line as `launch_server` does and return the arguments SGLang would build its record from."""
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    if not any(option == "--memory-org" for action in parser._actions for option in action.option_strings):
        flags.add_arguments(None, parser)
    args = parser.parse_args(["--model-path", str(nano), *options])
    return flags.from_arguments(lambda cls, args: dict(vars(args)), ServerArgs, args)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--memory-org", "s2", "--chunked-prefill-size", "2000"),
            "--chunked-prefill-size: expected a multiple of 512 tokens (--page-tokens), got 2000; nearest: 2048",
        ),
        (
            ("--memory-org", "d0", "--checkpoint-interval", "64"),
            "--checkpoint-interval: expected at least 128 tokens, a chunk of this model's scan, got 64; nearest: 128",
        ),
    ],
)
def test_what_sglang_would_assert_is_refused_in_one_line(
    nano: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit):
        parse(nano, "--device", "cpu", "--memory-budget", "b63", *options)
    assert capsys.readouterr().err.splitlines()[-1] == f"sgl_hybrid: {message}"


@pytest.mark.parametrize(("page_tokens", "chunk"), [("512", None), ("384", 21 * 384), ("16384", 16384)])
def test_prefill_chunks_are_whole_pages(nano: Path, page_tokens: str, chunk: int | None) -> None:
    options = ("--device", "cpu", "--memory-org", "s2", "--memory-budget", "1GiB", "--page-tokens", page_tokens)
    assert parse(nano, *options)["chunked_prefill_size"] == chunk


def test_d0_sets_what_sglang_needs(nano: Path) -> None:
    values = parse(nano, "--device", "cpu", "--memory-org", "d0", "--memory-budget", "b63")
    assert values["page_size"] == 16
    assert values["mamba_track_interval"] == 1792
    assert values["max_total_tokens"] == 3256 * 16
    assert values["max_mamba_cache_size"] == 30
    assert values["mamba_radix_cache_strategy"] == "extra_buffer_lazy"
    assert values["attention_backend"] == "torch_native"
    assert values["dtype"] == "float32"
    assert os.environ["SGLANG_HYBRID_MEMORY_ORG"] == "d0"
    assert os.environ["SGLANG_HYBRID_MEMORY_BUDGET"] == "b63"
    assert os.environ["SGLANG_MAMBA_CONV_DTYPE"] == "float32"


def test_a_switch_takes_no_value(nano: Path) -> None:
    parse(nano, "--device", "cpu", "--memory-org", "s2", "--no-exact-continuation", "--memory-budget", "b63")
    assert os.environ["SGLANG_HYBRID_NO_EXACT_CONTINUATION"] == "True"
    assert os.environ["SGLANG_HYBRID_MEMORY_BUDGET"] == "b63"


def test_the_environment_form_is_the_default_of_the_flag(nano: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_HYBRID_MEMORY_ORG", "d0")
    monkeypatch.setenv("SGLANG_HYBRID_MEMORY_BUDGET", "b83")
    assert parse(nano)["max_total_tokens"] == 4289 * 16


def test_without_an_organization_nothing_of_memory_is_set(nano: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_PLATFORM")
    values = parse(nano)
    for name in ("page_size", "max_total_tokens", "max_mamba_cache_size", "attention_backend"):
        assert values[name] is None
    assert values["mamba_track_interval"] == 256
    assert not os.environ["SGLANG_HYBRID_MEMORY_ORG"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--memory-org", "bogus"], ["--memory-org", "'bogus'", "s0, s1, s2, d0"]),
        (["--memory-budget", "b63"], ["--memory-budget", "expected --memory-org"]),
        (["--memory-org", "d0", "--memory-budget", "much"], ["budget", "'much'", "4GiB"]),
        (["--memory-org", "d0", "--memory-budget=-4GiB"], ["budget", "'-4GiB'"]),
        (["--memory-org", "d0", "--memory-budget", "b1"], ["--memory-budget", "at least", "8192 tokens", "b1"]),
        (["--memory-org", "d0", "--d0-attention-fraction", "2"], ["--d0-attention-fraction", "'2'"]),
        (["--memory-org", "d0", "--page-tokens", "x"], ["--page-tokens", "'x'"]),
        (["--memory-org", "d0", "--checkpoint-interval", "100"], ["checkpoint interval", "100", "nearest: 96, 112"]),
        (["--memory-org", "d0", "--page-size", "32"], ["--page-size", "16", "32"]),
        (["--memory-org", "d0", "--max-total-tokens", "99"], ["--max-total-tokens", "--memory-budget"]),
        pytest.param(
            ["--memory-org", "d0", "--enable-hierarchical-cache"],
            ["--enable-hierarchical-cache"],
            id="b54-no-second-tier-that-could-miss-the-salt",
        ),
        (["--memory-org", "s2", "--enable-streaming-session"], ["--enable-streaming-session", "left out"]),
        (["--memory-org", "s2", "--enable-lmcache"], ["--enable-lmcache", "left out"]),
        (["--memory-org", "d0", "--mamba-full-memory-ratio", "0.5"], ["--mamba-full-memory-ratio", "left out"]),
        (["--memory-org", "s2", "--mamba-backend", "flashinfer"], ["--mamba-backend", "expected triton"]),
        (["--memory-org", "s0", "--enable-page-major-kv-layout"], ["--enable-page-major-kv-layout", "left out"]),
        (["--memory-org", "s0", "--enable-return-routed-experts"], ["--enable-return-routed-experts", "left out"]),
        (["--memory-org", "s2", "--enable-flexkv"], ["--enable-flexkv", "left out"]),
        (
            ["--memory-org", "s2", "--enable-unified-cache-external-linker"],
            ["--enable-unified-cache-external-linker", "left out"],
        ),
        (["--memory-org", "s2", "--kv-cache-dtype", "fp8_e4m3"], ["--kv-cache-dtype", "fp8_e4m3", "nearest: auto"]),
        (["--memory-org", "d0", "--mamba-radix-cache-strategy", "no_buffer"], ["--mamba-radix-cache-strategy"]),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    nano: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: list[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(nano, "--device", "cpu", *options)
    assert caught.value.code == 2
    message = capsys.readouterr().err.strip()
    assert len(message.splitlines()) == 1
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    "options",
    [
        ["--checkpoint-lifetime", "transient"],
        ["--checkpoint-lifetime", "retained"],
        ["--preempt-pin-k", "1"],
        ["--checkpoint-eviction", "lru"],
        ["--checkpoint-placement", "all"],
        ["--slab-reclaim", "migrate"],
    ],
)
def test_a_policy_of_the_cache_needs_a_cache(
    nano: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(
            nano, "--device", "cpu", "--memory-org", "s2", "--memory-budget", "b63", "--disable-radix-cache", *options
        )
    assert caught.value.code == 2
    assert f"{options[0]}: expected a prefix cache, got --disable-radix-cache" in capsys.readouterr().err


def test_sessions_of_the_cache_are_served(nano: Path) -> None:
    options = ("--memory-org", "s2", "--memory-budget", "b63", "--enable-session-radix-cache")
    assert parse(nano, "--device", "cpu", *options)["enable_session_radix_cache"]


def test_headroom_needs_no_cache(nano: Path) -> None:
    options = ["--memory-org", "s2", "--memory-budget", "b63", "--disable-radix-cache", "--admission-headroom", "0.19"]
    parse(nano, "--device", "cpu", *options)
    assert os.environ["SGLANG_HYBRID_ADMISSION_HEADROOM"] == "0.19"


def test_a_model_without_recurrent_state_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fault B60: an organization on a pure attention model."""
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit) as caught:
        parse(tmp_path, "--memory-org", "d0", "--memory-budget", "4GiB")
    assert caught.value.code == 2
    assert "expected a hybrid model" in capsys.readouterr().err


def test_a_missing_model_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(tmp_path / "absent", "--memory-org", "d0", "--memory-budget", "4GiB")
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_another_platform_is_refused(nano: Path, monkeypatch: pytest.MonkeyPatch, capsys, device: str) -> None:
    monkeypatch.delenv("SGLANG_PLATFORM")
    monkeypatch.setattr(flags, "has_gpu", lambda: device == "cpu")
    with pytest.raises(SystemExit):
        parse(nano, "--device", device, "--memory-org", "d0", "--memory-budget", "b63")
    assert "SGLANG_PLATFORM=sgl_hybrid_cpu" in capsys.readouterr().err


def test_an_unknown_platform_is_refused(nano: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("SGLANG_PLATFORM", "another")
    monkeypatch.setattr(flags, "has_gpu", lambda: True)
    with pytest.raises(SystemExit):
        parse(nano, "--memory-org", "d0", "--memory-budget", "b63")
    assert "got SGLANG_PLATFORM=another" in capsys.readouterr().err


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU, as far as arguments are concerned."""
    monkeypatch.delenv("SGLANG_PLATFORM")
    monkeypatch.setattr(flags, "has_gpu", lambda: True)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("org", ["s0", "s1", "s2", "d0"])
def test_a_gpu_is_served(nano: Path, org: str) -> None:
    values = parse(nano, "--memory-org", org, "--memory-budget", "b63")
    assert values["attention_backend"] == "triton"
    assert values["disable_prefill_cuda_graph"]
    assert values["mamba_radix_cache_strategy"] == "extra_buffer_lazy"
    assert values["max_mamba_cache_size"] > 0
    assert values["device"] is None
    assert os.environ["SGLANG_HYBRID_NO_EXACT_CONTINUATION"] == "True"
    assert os.environ["SGLANG_MAMBA_CONV_DTYPE"] == "bfloat16"


@pytest.mark.usefixtures("gpu")
def test_deterministic_inference_on_a_gpu_keeps_exact_continuation(nano: Path) -> None:
    parse(nano, "--memory-org", "s2", "--memory-budget", "b63", "--enable-deterministic-inference")
    assert not os.environ.get("SGLANG_HYBRID_NO_EXACT_CONTINUATION")


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--attention-backend", "fa3"], ["--attention-backend", "triton or flashinfer", "fa3", "nearest"]),
        (["--enable-memory-saver"], ["--enable-memory-saver", "left out", "on a GPU"]),
        (["--cuda-graph-backend-prefill", "full"], ["--cuda-graph-backend-prefill", "disabled", "got full"]),
        (["--dtype", "float16"], ["--dtype", "bfloat16 or float32", "float16"]),
    ],
)
def test_a_mistake_on_a_gpu_is_one_line(
    nano: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: list[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(nano, "--memory-org", "s2", "--memory-budget", "b63", *options)
    assert caught.value.code == 2
    message = capsys.readouterr().err.strip()
    assert len(message.splitlines()) == 1
    assert all(word in message for word in words)


def test_every_argument_that_a_gpu_asks_about_is_one_of_sglangs() -> None:
    defaults = {field.name: field.default for field in msgspec.structs.fields(ServerArgs)}
    assert {refused.argument: defaults[refused.argument] for refused in gpu_arguments.REFUSED} == {
        refused.argument: refused.default for refused in gpu_arguments.REFUSED
    }
    phases = [f"cuda_graph_backend_{phase}" for phase in gpu_arguments.GRAPH_BACKENDS]
    named = ["disable_prefill_cuda_graph", "disable_decode_cuda_graph", "enable_deterministic_inference", *phases]
    assert set(named) <= set(defaults)


def test_another_attention_backend_on_a_cpu_is_refused(nano: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(nano, "--device", "cpu", "--memory-org", "s2", "--memory-budget", "b63", "--attention-backend", "triton")
    assert "--attention-backend: expected torch_native with --memory-org s2 on cpu" in capsys.readouterr().err


def test_a_config_file_carries_the_flags(nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--config file.yaml` of SGLang passes through the same parser."""
    from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

    file = tmp_path / "server.yaml"
    file.write_text(f"model-path: {nano}\ndevice: cpu\nmemory-org: d0\nmemory-budget: b83\ncheckpoint-interval: 896\n")
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    if "memory_org" not in {action.dest for action in parser._actions}:
        flags.add_arguments(None, parser)
    args = parser.parse_args(ConfigArgumentMerger(parser).merge_config_with_args(["--config", str(file)]))
    values = flags.from_arguments(lambda cls, args: dict(vars(args)), ServerArgs, args)
    assert values["mamba_track_interval"] == 896
    assert values["max_total_tokens"] == 4289 * 16


@pytest.mark.parametrize(
    ("kv_dtype", "conv", "message"),
    [
        (torch.float8_e4m3fn, [(20, 2)], "expected unquantized KV, got torch.float8_e4m3fn"),
        (torch.bfloat16, [(20, 2)] * 3, "expected a model with one convolution state per layer, got 3"),
    ],
)
def test_b59_what_only_the_loaded_configuration_shows_is_one_line(
    kv_dtype: torch.dtype, conv: list[tuple[int, int]], message: str
) -> None:
    """A checkpoint with quantized KV, a layer with three convolution states: refused where the pools are sized."""
    parameters = SimpleNamespace(shape=SimpleNamespace(conv=conv))
    configurator = SimpleNamespace(
        kv_cache_dtype=kv_dtype, mambaish_config=SimpleNamespace(mamba2_cache_params=parameters)
    )
    with pytest.raises(SettingError, match=message):
        plan_from_model(MemorySettings(memory_org="s2"), configurator, available_bytes=1 << 30)
