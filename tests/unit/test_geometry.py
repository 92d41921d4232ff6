"""State bytes, layer sets and tensor-parallel shares from configs in the forms that models are published in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sgl_hybrid.errors import SettingError
from sgl_hybrid.memory import StateGeometry
from sgl_hybrid.memory.presets import PRESETS, model_geometry

FALCON_NANO: dict[str, Any] = {
    "model_type": "falcon_h1",
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "mamba_d_ssm": 768,
    "mamba_n_heads": 24,
    "mamba_d_head": "auto",
    "mamba_n_groups": 2,
    "mamba_d_state": 128,
    "mamba_d_conv": 2,
}


def test_falcon_h1_7b_has_the_papers_bytes() -> None:
    geometry = model_geometry("falcon-h1-7b")
    assert geometry.kv_token_bytes == 1024
    assert (geometry.ssm_bytes, geometry.conv_bytes) == (1536 * 1024, 21 * 1024)
    assert geometry.composite_bytes == 1_594_368
    assert (geometry.attention_unit_bytes, geometry.budget_unit_bytes) == (16_384, 1_605_632)
    assert geometry.attention_layers == geometry.recurrent_layers == tuple(range(44))
    assert (geometry.planes, geometry.balance_tokens) == (44, 1792)


def test_granite_h_micro_has_the_papers_bytes_and_layers_apart() -> None:
    geometry = model_geometry("granite-4.0-h-micro")
    assert (geometry.kv_token_bytes, geometry.ssm_bytes, geometry.conv_bytes) == (2048, 1_048_576, 26_112)
    assert (geometry.composite_bytes, geometry.budget_unit_bytes) == (1_074_688, 1_081_344)
    assert geometry.attention_layers == (5, 15, 25, 35)
    assert len(geometry.recurrent_layers) == 36
    assert geometry.planes == 4


def test_float32_state_doubles_the_recurrent_bytes_only() -> None:
    half, full = model_geometry("falcon-h1-7b"), model_geometry("falcon-h1-7b", ssm_dtype="float32")
    assert full.ssm_bytes == 2 * half.ssm_bytes
    assert (full.conv_bytes, full.kv_token_bytes) == (half.conv_bytes, half.kv_token_bytes)


@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("bfloat16", 2), ("torch.bfloat16", 2)])
def test_nano_keeps_the_proportions_of_the_real_model(dtype: str, itemsize: int) -> None:
    geometry = StateGeometry.from_config(FALCON_NANO, kv_dtype=dtype, ssm_dtype=dtype, conv_dtype=dtype)
    sizes = (geometry.kv_token_bytes, geometry.ssm_bytes, geometry.conv_bytes)
    assert sizes == (64 * itemsize, 98_304 * itemsize, 1_280 * itemsize)


@pytest.mark.parametrize(
    ("name", "attention", "recurrent", "kv_token_bytes", "ssm_bytes", "conv_bytes"),
    [
        ("falcon-h1-34b", 72, 72, 2048, 32 * 128 * 256 * 2, (4096 + 2 * 2 * 256) * 3 * 2),
        ("nemotron-h-8b", 4, 24, 4096, 128 * 64 * 128 * 2, (8192 + 2 * 8 * 128) * 3 * 2),
        ("nemotron-nano-9b-v2", 4, 27, 4096, 128 * 80 * 128 * 2, (10_240 + 2 * 8 * 128) * 3 * 2),
        ("nemotron-3-nano-30b-a3b", 6, 23, 1024, 64 * 64 * 128 * 2, (4096 + 2 * 8 * 128) * 3 * 2),
        ("bamba-9b", 3, 29, 4096, 128 * 64 * 128 * 2, (8192 + 2 * 128) * 3 * 2),
        ("zamba2-2.7b", 9, 54, 20_480, 80 * 64 * 64 * 2, (5120 + 2 * 64) * 3 * 2),
        ("jamba-v0.1", 4, 28, 4096, 8192 * 16 * 2, 8192 * 3 * 2),
        ("qwen3-next-80b-a3b", 12, 36, 2048, 32 * 128 * 128 * 2, (2 * 16 * 128 + 32 * 128) * 3 * 2),
    ],
)
def test_preset_sizes(
    name: str, attention: int, recurrent: int, kv_token_bytes: int, ssm_bytes: int, conv_bytes: int
) -> None:
    geometry = model_geometry(name)
    assert (len(geometry.attention_layers), len(geometry.recurrent_layers)) == (attention, recurrent)
    assert (geometry.kv_token_bytes, geometry.ssm_bytes, geometry.conv_bytes) == (kv_token_bytes, ssm_bytes, conv_bytes)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_names_its_source_and_has_a_geometry(name: str) -> None:
    assert PRESETS[name].source.startswith("config.json of ")
    assert model_geometry(name).name == name


def renamed(config: dict[str, object], **names: str) -> dict[str, object]:
    return {names.get(key, key): value for key, value in config.items()}


def listed(pattern: str, attention: str, recurrent: str) -> list[str]:
    names = {"M": recurrent, "*": attention, "-": "mlp", "E": "moe"}
    return [names[kind] for kind in pattern]


def test_layer_lists_of_every_release_give_one_geometry() -> None:
    config = dict(PRESETS["nemotron-h-8b"].config)
    pattern = str(config.pop("hybrid_override_pattern"))
    expected = model_geometry("nemotron-h-8b")
    for key in ("layer_types", "layers_block_type"):
        for kinds in (listed(pattern, "full_attention", "linear_attention"), listed(pattern, "attention", "mamba")):
            found = StateGeometry.from_config({**config, key: kinds})
            assert msgspec.structs.replace(found, name=expected.name) == expected


def test_bamba_indices_and_zamba_lists_agree_with_explicit_layers() -> None:
    bamba = {k: v for k, v in PRESETS["bamba-9b"].config.items() if k != "attn_layer_indices"}
    bamba["layer_types"] = ["attention" if i in (9, 18, 27) else "mamba" for i in range(32)]
    assert StateGeometry.from_config(bamba).attention_layers == (9, 18, 27)
    zamba = {k: v for k, v in PRESETS["zamba2-2.7b"].config.items() if k != "hybrid_layer_ids"}
    zamba["layers_block_type"] = ["mamba", "hybrid", "mamba"]
    assert StateGeometry.from_config(zamba).attention_layers == (1,)
    assert StateGeometry.from_config(zamba).recurrent_layers == (0, 1, 2)


def test_key_names_of_other_releases_are_read() -> None:
    config = renamed(
        dict(PRESETS["nemotron-h-8b"].config),
        mamba_num_heads="mamba_n_heads",
        mamba_head_dim="mamba_d_head",
        ssm_state_size="mamba_d_state",
        n_groups="mamba_n_groups",
        conv_kernel="mamba_d_conv",
        head_dim="attention_head_dim",
    )
    assert StateGeometry.from_config(config).composite_bytes == model_geometry("nemotron-h-8b").composite_bytes


def test_a_nested_text_config_is_read() -> None:
    text = {**PRESETS["qwen3-next-80b-a3b"].config, "model_type": "qwen3_5_text"}
    geometry = StateGeometry.from_config({"model_type": "qwen3_5", "text_config": text})
    assert geometry.ssm_bytes == model_geometry("qwen3-next-80b-a3b").ssm_bytes


def test_a_folder_a_file_and_a_mapping_agree(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(FALCON_NANO))
    expected = StateGeometry.from_config(FALCON_NANO)
    assert StateGeometry.from_config(tmp_path) == StateGeometry.from_config(str(file)) == expected
    assert model_geometry(str(tmp_path)) == expected


def test_tensor_parallel_ranks_hold_their_share_and_replicate_few_heads() -> None:
    whole, half = model_geometry("falcon-h1-7b"), model_geometry("falcon-h1-7b", tp_size=2)
    assert (half.kv_heads, half.ssm_heads) == (1, 12)
    assert (half.kv_token_bytes, half.ssm_bytes) == (whole.kv_token_bytes // 2, whole.ssm_bytes // 2)
    # One B/C group for two ranks is replicated: each rank convolves its half of the channels and all of the group.
    assert half.conv_channels == (3072 + 2 * 2 * 256) // 2
    quarter = model_geometry("falcon-h1-7b", tp_size=4)
    assert (quarter.kv_heads, quarter.ssm_heads, quarter.conv_channels) == (1, 6, 3072 // 4 + 2 * 256)
    shared_groups = model_geometry("nemotron-h-8b", tp_size=4)
    assert shared_groups.conv_channels == (8192 + 2 * 8 * 128) // 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "falcon_h2"}, r"expected a hybrid model_type of falcon_h1, .*, got 'falcon_h2'"),
        ({"mamba_d_state": None}, "expected a positive integer under mamba_d_state or ssm_state_size .*, got None"),
        ({"mamba_n_heads": 0}, "expected a positive integer under mamba_n_heads .*, got 0"),
        ({"mamba_n_heads": 25}, "expected an inner size that 25 recurrent heads divide, got 768"),
        ({"num_hidden_layers": "2"}, "expected a positive integer under num_hidden_layers"),
    ],
)
def test_a_config_that_cannot_be_used_is_refused_in_one_line(change: dict[str, object], message: str) -> None:
    with pytest.raises(SettingError, match=message) as error:
        StateGeometry.from_config({**FALCON_NANO, **change})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("kinds", "missing"), [(["attention"] * 4, "recurrent"), (["mamba"] * 4, "attention")])
def test_a_model_without_one_kind_of_layer_is_refused(kinds: list[str], missing: str) -> None:
    config = {**PRESETS["granite-4.0-h-micro"].config, "layer_types": kinds}
    with pytest.raises(SettingError, match=f"with no {missing} layer among 4"):
        StateGeometry.from_config(config)


def test_unknown_layers_dtypes_and_shares_are_refused() -> None:
    granite = PRESETS["granite-4.0-h-micro"].config
    with pytest.raises(SettingError, match=r"expected a layer kind of .* got 'conv'"):
        StateGeometry.from_config({**granite, "layer_types": ["conv", "mamba", "attention"]})
    with pytest.raises(SettingError, match="expected layer_types, layers_block_type or hybrid_override_pattern"):
        StateGeometry.from_config({**granite, "layer_types": None})
    with pytest.raises(SettingError, match=r"expected a dtype of float32, .* got 'int3'"):
        model_geometry("falcon-h1-7b", ssm_dtype="int3")
    with pytest.raises(SettingError, match=r"divides 24 recurrent heads \(1, 2, 3, 4, 6, 8, 12, 24\), got 16"):
        model_geometry("falcon-h1-7b", tp_size=16)
    with pytest.raises(SettingError, match="expected a tensor-parallel size >= 1, got 0"):
        model_geometry("falcon-h1-7b", tp_size=0)


def test_a_path_that_is_no_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"expected a config\.json or a folder with one"):
        StateGeometry.from_config(tmp_path)
    (tmp_path / "config.json").write_text("[1, 2]")
    with pytest.raises(SettingError, match="expected a JSON object in"):
        StateGeometry.from_config(tmp_path)
    with pytest.raises(SettingError, match=r"expected a preset or a path .* nearest: falcon-h1-7b"):
        model_geometry("falcon-h1-7")
