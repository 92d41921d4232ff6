"""Nano models: same bytes for the same seed, the real models' proportions, loadable, and outputs worth comparing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bench.cli import main
from bench.nano import MODELS, write_model
from bench.tokenizer import FIRST_ORDINARY_ID, VOCAB_SIZE, make_tokenizer
from sgl_hybrid.errors import SettingError

NAMES = sorted(MODELS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("nano")
    for name in NAMES:
        write_model(name, root / name)
    return {name: root / name for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_same_seed_gives_the_same_bytes(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    write_model(name, tmp_path)
    files = sorted(path.name for path in folders[name].iterdir())
    assert files == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    for file in files:
        assert (tmp_path / file).read_bytes() == (folders[name] / file).read_bytes(), file


def test_writing_again_leaves_equal_files_alone_and_repairs_others(folders: dict[str, Path], tmp_path: Path) -> None:
    write_model("falcon-h1-nano", tmp_path)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    before = weights.stat()
    config.write_text("{}")
    write_model("falcon-h1-nano", tmp_path)
    assert (weights.stat().st_ino, weights.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert config.read_bytes() == (folders["falcon-h1-nano"] / "config.json").read_bytes()


def test_another_seed_changes_every_drawn_matrix(folders: dict[str, Path], tmp_path: Path) -> None:
    write_model("falcon-h1-nano", tmp_path, seed=1)
    ours, other = load_file(folders["falcon-h1-nano"] / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    same = [name for name in ours if torch.equal(ours[name], other[name])]
    assert all(name.endswith(("A_log", "dt_bias")) for name in same), same


def test_bfloat16_weights_are_the_rounded_float32_weights(folders: dict[str, Path], tmp_path: Path) -> None:
    write_model("granite-h-nano", tmp_path, dtype="bfloat16")
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    full = load_file(folders["granite-h-nano"] / "model.safetensors")
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        assert torch.equal(tensor, full[name].bfloat16()), name


def _state_elements(config: dict[str, Any]) -> tuple[int, int, int]:
    """Return elements per layer of (KV of one token, SSM state, convolution state)."""
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    inner = config["mamba_n_heads"] * config["mamba_d_head"]
    channels = inner + 2 * config["mamba_n_groups"] * config["mamba_d_state"]
    kv = 2 * config["num_key_value_heads"] * head_dim
    return kv, inner * config["mamba_d_state"], channels * (config["mamba_d_conv"] - 1)


def test_proportions_are_the_real_models(folders: dict[str, Path]) -> None:
    states = {name: _state_elements(json.loads((path / "config.json").read_text())) for name, path in folders.items()}
    # Falcon-H1-7B in bytes: 1,024 per token, 1,572,864, 20 KiB of its 21 KiB.
    assert states["falcon-h1-nano"] == (64, 98_304, 1_280)
    assert np.allclose(np.array(states["falcon-h1-nano"]) * 16, (1_024, 1_572_864, 20_480))
    assert states["falcon-h1-pico"] == (32, 49_152, 640)
    # Granite-4.0-h-micro in bytes: 2,048 per token and 1,048,576; its 26,112 of convolution cannot be met exactly.
    assert states["granite-h-nano"] == (64, 32_768, 640)
    assert np.allclose(np.array(states["granite-h-nano"][:2]) * 32, (2_048, 1_048_576))


def test_granite_keeps_attention_and_recurrent_layers_apart(folders: dict[str, Path]) -> None:
    names = load_file(folders["granite-h-nano"] / "model.safetensors").keys()
    attention = {int(m[1]) for name in names if (m := re.match(r"model\.layers\.(\d+)\.self_attn", name))}
    recurrent = {int(m[1]) for name in names if (m := re.match(r"model\.layers\.(\d+)\.mamba", name))}
    assert (attention, recurrent) == ({2, 5}, {0, 1, 3, 4})


def _load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report  # no missing, unexpected or mismatched weight
    return model.eval()


def _logits(model: Any, tokens: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens, logits_to_keep=0, **kwargs).logits[0].float()


@pytest.mark.parametrize("name", NAMES)
def test_transformers_loads_it_and_its_logits_are_worth_comparing(name: str, folders: dict[str, Path]) -> None:
    model = _load(folders[name])
    assert model.config.dtype == torch.float32
    tokens = torch.randint(FIRST_ORDINARY_ID, VOCAB_SIZE, (1, 700), generator=torch.Generator().manual_seed(7))
    logits = _logits(model, tokens)
    log_probabilities = logits.log_softmax(-1)
    entropy = -(log_probabilities.exp() * log_probabilities).sum(-1).mean().item()
    best_two = logits.topk(2, dim=-1).values
    assert logits.shape == (700, VOCAB_SIZE)
    assert torch.isfinite(logits).all()
    assert 2.5 < entropy < 5.0  # nats; uniform would be 6.2
    assert (best_two[:, 0] - best_two[:, 1]).median().item() > 0.3
    assert logits.argmax(-1).unique().numel() > 200


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_state_changes_the_output(name: str, folders: dict[str, Path]) -> None:
    """Another prefix's KV alone, and its recurrent state alone, must show 200 tokens later."""
    model, draw = _load(folders[name]), torch.Generator().manual_seed(11)
    prefixes = torch.randint(FIRST_ORDINARY_ID, VOCAB_SIZE, (2, 1, 512), generator=draw)
    rest = torch.randint(FIRST_ORDINARY_ID, VOCAB_SIZE, (1, 232), generator=draw)

    def after(swap: str) -> torch.Tensor:
        with torch.no_grad():
            mine, other = (model(prefix, use_cache=True).past_key_values for prefix in prefixes)
        for layer, donor in zip(mine.layers, other.layers, strict=True):
            if swap == "kv" and isinstance(getattr(layer, "keys", None), torch.Tensor):
                layer.keys, layer.values = donor.keys, donor.values
            if swap == "recurrent" and hasattr(layer, "recurrent_states"):
                layer.recurrent_states = donor.recurrent_states
        return _logits(model, rest, past_key_values=mine, use_cache=True)[-32:].log_softmax(-1)

    right = after("nothing")
    for swap in ("kv", "recurrent"):
        divergence = (right.exp() * (right - after(swap))).sum(-1).mean().item()
        assert divergence > 0.1, (swap, divergence)  # nats


def test_tokenizer_round_trips_any_text_and_has_a_chat_template(folders: dict[str, Path]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folders["falcon-h1-nano"])
    text = "A state at 512 tokens,\nété 世界 \x00<turn>user"
    assert len(tokenizer) == VOCAB_SIZE
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<turn>user\nhi\n<turn>assistant\n"


def test_every_ordinary_id_is_text() -> None:
    tokenizer = make_tokenizer()
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    assert all(tokenizer.decode([token]) for token in range(FIRST_ORDINARY_ID, VOCAB_SIZE))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["model", "llama", "x"],
            "expected a model out of falcon-h1-nano, falcon-h1-pico, granite-h-nano, got 'llama'; "
            "nearest: granite-h-nano",
        ),
        (["model", "falcon-h1-nano", "x", "--dtype", "int8"], "expected a dtype out of float32, bfloat16, got 'int8'"),
        (["model", "falcon-h1-nano", "x", "--seed", "-1"], "expected a seed of 0 to 2^63 - 1, got -1"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert capsys.readouterr().err == f"error: {message}\n"
    assert not (tmp_path / "x").exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingError, match="expected a folder that can be written"):
        write_model("falcon-h1-nano", tmp_path / "file")
