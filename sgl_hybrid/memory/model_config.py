"""Reading `StateGeometry` from Hugging Face configs: one reader per family, plus the names each release uses.

A family is one entry of `FAMILIES`. Readers look a quantity up under every name that published configs give it and
raise a one-line `SettingError` that lists those names when none is there; nothing is guessed.
Source of the names and formulas: configuration classes of transformers 5 and `configs/mamba_utils.py` of
SGLang 0.5.23 (share of groups and heads per tensor-parallel rank).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from sgl_hybrid.errors import SettingError
from sgl_hybrid.memory.geometry import StateGeometry, item_bytes

Config = Mapping[str, object]

ATTENTION_KINDS = frozenset({"attention", "full_attention", "*"})
RECURRENT_KINDS = frozenset({"mamba", "mamba2", "linear_attention", "M"})
JOINT_KINDS = frozenset({"hybrid", "falcon_h1"})
STATELESS_KINDS = frozenset({"mlp", "moe", "-", "E"})


class RecurrentState(NamedTuple):
    """Recurrent state of one layer before tensor parallelism: [heads, head_dim, d_state] and the convolution.

    `conv_fixed_channels` are sharded as they are; `conv_groups` x `2 * d_state` channels follow them, with groups
    replicated when there are fewer than ranks.
    """

    heads: int
    head_dim: int
    d_state: int
    conv_fixed_channels: int
    conv_groups: int
    d_conv: int


class Family(NamedTuple):
    """Readers of one model type: layer kinds (in order) and the recurrent state."""

    kinds: Callable[[Config], list[str]]
    state: Callable[[Config], RecurrentState]


def _lookup(config: Config, *keys: str) -> object:
    for key in keys:
        if config.get(key) is not None:
            return config[key]
    return None


def _integer(config: Config, *keys: str) -> int:
    value = _lookup(config, *keys)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SettingError(f"expected a positive integer under {' or '.join(keys)} in the model config, got {value!r}")
    return value


def _every_layer_both(config: Config) -> list[str]:
    return ["hybrid"] * _integer(config, "num_hidden_layers")


def _listed_layers(config: Config) -> list[str]:
    listed = _lookup(config, "layer_types", "layers_block_type")
    if listed is None:
        listed = _lookup(config, "hybrid_override_pattern")
    if isinstance(listed, str):
        listed = list(listed)
    if not isinstance(listed, (list, tuple)):
        raise SettingError(
            "expected layer_types, layers_block_type or hybrid_override_pattern in the model config, "
            f"got {type(listed).__name__}"
        )
    return [str(kind) for kind in listed]


def _indexed_layers(config: Config) -> list[str]:
    if _lookup(config, "layer_types", "layers_block_type") is not None:
        return _listed_layers(config)
    indices = _lookup(config, "attn_layer_indices")
    attention = set(indices) if isinstance(indices, (list, tuple)) else set()
    return ["attention" if i in attention else "mamba" for i in range(_integer(config, "num_hidden_layers"))]


def _periodic_layers(config: Config) -> list[str]:
    period = _integer(config, "attn_layer_period")
    offset = _lookup(config, "attn_layer_offset")
    return ["attention" if i % period == offset else "mamba" for i in range(_integer(config, "num_hidden_layers"))]


def _interval_layers(config: Config) -> list[str]:
    if _lookup(config, "layer_types") is not None:
        return _listed_layers(config)
    interval = _integer(config, "full_attention_interval")
    return [
        "full_attention" if (i + 1) % interval == 0 else "linear_attention"
        for i in range(_integer(config, "num_hidden_layers"))
    ]


def _zamba_layers(config: Config) -> list[str]:
    if _lookup(config, "layer_types", "layers_block_type") is not None:
        return _listed_layers(config)
    indices = _lookup(config, "hybrid_layer_ids")
    if not isinstance(indices, (list, tuple)):
        raise SettingError("expected layers_block_type or hybrid_layer_ids in the model config, got neither")
    return ["hybrid" if i in set(indices) else "mamba" for i in range(_integer(config, "num_hidden_layers"))]


def _mamba2(config: Config) -> RecurrentState:
    heads = _integer(config, "mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
    head_dim = _lookup(config, "mamba_d_head", "mamba_head_dim", "mamba_headdim")
    if isinstance(head_dim, int):
        inner = heads * head_dim
    elif _lookup(config, "mamba_d_ssm") is not None:
        inner = _integer(config, "mamba_d_ssm")
    else:
        inner = _integer(config, "mamba_expand", "expand") * _integer(config, "hidden_size")
    if inner % heads:
        raise SettingError(f"expected an inner size that {heads} recurrent heads divide, got {inner}")
    return RecurrentState(
        heads=heads,
        head_dim=inner // heads,
        d_state=_integer(config, "mamba_d_state", "ssm_state_size"),
        conv_fixed_channels=inner,
        conv_groups=_integer(config, "mamba_n_groups", "n_groups", "mamba_ngroups"),
        d_conv=_integer(config, "mamba_d_conv", "conv_kernel"),
    )


def _mamba1(config: Config) -> RecurrentState:
    """Read a full-rank selective scan: every channel is a head of width 1 and B, C do not pass the convolution."""
    inner = _integer(config, "mamba_expand") * _integer(config, "hidden_size")
    return RecurrentState(
        heads=inner,
        head_dim=1,
        d_state=_integer(config, "mamba_d_state"),
        conv_fixed_channels=inner,
        conv_groups=0,
        d_conv=_integer(config, "mamba_d_conv"),
    )


def _gated_delta(config: Config) -> RecurrentState:
    """Read a gated delta net: [value heads, value dim, key dim]; q, k and v pass the convolution."""
    heads = _integer(config, "linear_num_value_heads")
    head_dim = _integer(config, "linear_value_head_dim")
    return RecurrentState(
        heads=heads,
        head_dim=head_dim,
        d_state=_integer(config, "linear_key_head_dim"),
        conv_fixed_channels=heads * head_dim,
        conv_groups=_integer(config, "linear_num_key_heads"),
        d_conv=_integer(config, "linear_conv_kernel_dim"),
    )


FAMILIES: dict[str, Family] = {
    "falcon_h1": Family(_every_layer_both, _mamba2),
    "granitemoehybrid": Family(_listed_layers, _mamba2),
    "nemotron_h": Family(_listed_layers, _mamba2),
    "bamba": Family(_indexed_layers, _mamba2),
    "zamba2": Family(_zamba_layers, _mamba2),
    "jamba": Family(_periodic_layers, _mamba1),
    "qwen3_next": Family(_interval_layers, _gated_delta),
    "qwen3_5_text": Family(_interval_layers, _gated_delta),
    "qwen3_5_moe_text": Family(_interval_layers, _gated_delta),
}


def load_config(path: str | os.PathLike[str]) -> dict[str, object]:
    """Read config.json at `path` (the file or its folder).

    Raises:
        SettingError: nothing there, or not a JSON object.
    """
    file = os.path.join(path, "config.json") if os.path.isdir(path) else os.fspath(path)
    try:
        with open(file, "rb") as content:
            return msgspec.json.decode(content.read(), type=dict[str, object])
    except OSError:
        raise SettingError(f"expected a config.json or a folder with one, got {os.fspath(path)!r}") from None
    except msgspec.DecodeError as error:
        raise SettingError(f"expected a JSON object in {file!r}, got: {error}") from None


def read_geometry(
    config: str | os.PathLike[str] | Config,
    *,
    name: str | None = None,
    kv_dtype: str,
    ssm_dtype: str,
    conv_dtype: str,
    tp_size: int,
) -> StateGeometry:
    """Build the geometry of one rank; `StateGeometry.from_config` is the public door. `name` defaults to the type."""
    values: Config = config if isinstance(config, Mapping) else load_config(config)
    text = values.get("text_config")
    if isinstance(text, Mapping):
        values = text
    family = _family_name(values)
    kinds = FAMILIES[family].kinds(values)
    state = FAMILIES[family].state(values)
    if tp_size < 1:
        raise SettingError(f"expected a tensor-parallel size >= 1, got {tp_size}")
    return StateGeometry(
        name=name or family,
        family=family,
        num_layers=len(kinds),
        attention_layers=_layers_of(kinds, ATTENTION_KINDS | JOINT_KINDS),
        recurrent_layers=_layers_of(kinds, RECURRENT_KINDS | JOINT_KINDS),
        kv_heads=_kv_heads_per_rank(values, tp_size),
        head_dim=_attention_head_dim(values, family),
        kv_itemsize=item_bytes(kv_dtype),
        ssm_heads=_share(state.heads, tp_size, "recurrent heads"),
        ssm_head_dim=state.head_dim,
        d_state=state.d_state,
        ssm_itemsize=item_bytes(ssm_dtype),
        conv_channels=_conv_channels_per_rank(state, tp_size),
        d_conv=state.d_conv,
        conv_itemsize=item_bytes(conv_dtype),
        tp_size=tp_size,
    )


def _family_name(config: Config) -> str:
    model_type = str(config.get("model_type"))
    if model_type not in FAMILIES:
        raise SettingError(f"expected a hybrid model_type of {', '.join(FAMILIES)}, got {model_type!r}")
    return model_type


def _layers_of(kinds: list[str], wanted: frozenset[str]) -> tuple[int, ...]:
    known = ATTENTION_KINDS | RECURRENT_KINDS | JOINT_KINDS | STATELESS_KINDS
    for kind in kinds:
        if kind not in known:
            raise SettingError(f"expected a layer kind of {', '.join(sorted(known))}, got {kind!r}")
    return tuple(i for i, kind in enumerate(kinds) if kind in wanted)


def _share(count: int, tp_size: int, what: str) -> int:
    if count % tp_size:
        divisors = ", ".join(str(d) for d in range(1, count + 1) if count % d == 0 and d <= 64)
        raise SettingError(f"expected a tensor-parallel size that divides {count} {what} ({divisors}), got {tp_size}")
    return count // tp_size


def _kv_heads_per_rank(config: Config, tp_size: int) -> int:
    """Return the rank's KV heads: a share, or one replicated head when there are fewer heads than ranks."""
    heads = _integer(config, "num_key_value_heads", "num_attention_heads")
    if heads < tp_size and tp_size % heads == 0:
        return 1
    return _share(heads, tp_size, "KV heads")


def _attention_head_dim(config: Config, family: str) -> int:
    explicit = _lookup(config, "head_dim", "attention_head_dim")
    if isinstance(explicit, int):
        return explicit
    width = _integer(config, "hidden_size") * (2 if family == "zamba2" else 1)
    return width // _integer(config, "num_attention_heads")


def _conv_channels_per_rank(state: RecurrentState, tp_size: int) -> int:
    groups = state.conv_groups
    if groups % tp_size:
        groups = max(groups, tp_size)
    return _share(state.conv_fixed_channels + 2 * groups * state.d_state, tp_size, "convolution channels")
