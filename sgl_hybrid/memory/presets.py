"""Published hybrid models by name, for planning without their files.

Each preset keeps only the config keys that its family's reader needs, with the place the numbers come from. A path
to a real config.json gives the same geometry; a preset is a convenience, not an override.
"""

from __future__ import annotations

import os

import msgspec

from sgl_hybrid.errors import SettingError
from sgl_hybrid.memory.geometry import StateGeometry
from sgl_hybrid.memory.model_config import read_geometry


class Preset(msgspec.Struct, frozen=True):
    """The state-relevant keys of one published config and their source."""

    config: dict[str, object]
    source: str


def _falcon_h1(
    source: str,
    *,
    layers: int,
    hidden: int,
    attention: tuple[int, int, int],
    heads: tuple[int, int, int],
    groups: int = 1,
) -> Preset:
    """Build a Falcon-H1: attention (heads, KV heads, head dim); recurrent heads (count, head dim, state size)."""
    return Preset(
        {
            "model_type": "falcon_h1",
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": attention[0],
            "num_key_value_heads": attention[1],
            "head_dim": attention[2],
            "mamba_n_heads": heads[0],
            "mamba_d_head": heads[1],
            "mamba_d_ssm": heads[0] * heads[1],
            "mamba_d_state": heads[2],
            "mamba_n_groups": groups,
            "mamba_d_conv": 4,
        },
        f"config.json of {source}; size table of the FalconH1 page of the transformers documentation",
    )


def _granite_h(
    source: str,
    *,
    layers: int,
    attention_at: tuple[int, ...],
    hidden: int,
    attention: tuple[int, int],
    heads: tuple[int, int, int],
) -> Preset:
    """Build a Granite-4.0-H: attention (heads, KV heads); recurrent heads (count, head dim, state size)."""
    return Preset(
        {
            "model_type": "granitemoehybrid",
            "num_hidden_layers": layers,
            "layer_types": ["attention" if i in attention_at else "mamba" for i in range(layers)],
            "hidden_size": hidden,
            "num_attention_heads": attention[0],
            "num_key_value_heads": attention[1],
            "mamba_n_heads": heads[0],
            "mamba_d_head": heads[1],
            "mamba_d_state": heads[2],
            "mamba_n_groups": 1,
            "mamba_d_conv": 4,
        },
        f"config.json of {source}",
    )


def _nemotron_h(source: str, *, pattern: str, hidden: int, kv_heads: int, heads: tuple[int, int]) -> Preset:
    """Build a Nemotron-H: recurrent heads (count, head dim), state size 128, 8 groups, attention heads of 128."""
    return Preset(
        {
            "model_type": "nemotron_h",
            "num_hidden_layers": len(pattern),
            "hybrid_override_pattern": pattern,
            "hidden_size": hidden,
            "num_key_value_heads": kv_heads,
            "head_dim": 128,
            "mamba_num_heads": heads[0],
            "mamba_head_dim": heads[1],
            "ssm_state_size": 128,
            "n_groups": 8,
            "conv_kernel": 4,
        },
        f"config.json of {source}",
    )


_EVERY_TENTH = (5, 15, 25, 35)

PRESETS: dict[str, Preset] = {
    "falcon-h1-0.5b": _falcon_h1(
        "tiiuae/Falcon-H1-0.5B-Base", layers=36, hidden=1024, attention=(8, 2, 64), heads=(24, 64, 128)
    ),
    "falcon-h1-1.5b": _falcon_h1(
        "tiiuae/Falcon-H1-1.5B-Base", layers=24, hidden=2048, attention=(8, 2, 128), heads=(48, 64, 256)
    ),
    "falcon-h1-1.5b-deep": _falcon_h1(
        "tiiuae/Falcon-H1-1.5B-Deep-Base", layers=66, hidden=1280, attention=(6, 2, 128), heads=(24, 64, 256)
    ),
    "falcon-h1-3b": _falcon_h1(
        "tiiuae/Falcon-H1-3B-Base", layers=32, hidden=2560, attention=(10, 2, 128), heads=(32, 128, 256)
    ),
    "falcon-h1-7b": _falcon_h1(
        "tiiuae/Falcon-H1-7B-Base", layers=44, hidden=3072, attention=(12, 2, 128), heads=(24, 128, 256)
    ),
    "falcon-h1-34b": _falcon_h1(
        "tiiuae/Falcon-H1-34B-Base", layers=72, hidden=5120, attention=(20, 4, 128), heads=(32, 128, 256), groups=2
    ),
    "granite-4.0-h-350m": _granite_h(
        "ibm-granite/granite-4.0-h-350m",
        layers=32,
        attention_at=(10, 13, 17, 27),
        hidden=768,
        attention=(12, 4),
        heads=(48, 32, 128),
    ),
    "granite-4.0-h-micro": _granite_h(
        "ibm-granite/granite-4.0-h-micro",
        layers=40,
        attention_at=_EVERY_TENTH,
        hidden=2048,
        attention=(32, 8),
        heads=(64, 64, 128),
    ),
    "granite-4.0-h-tiny": _granite_h(
        "ibm-granite/granite-4.0-h-tiny",
        layers=40,
        attention_at=_EVERY_TENTH,
        hidden=1536,
        attention=(12, 4),
        heads=(48, 64, 128),
    ),
    "granite-4.0-h-small": _granite_h(
        "ibm-granite/granite-4.0-h-small",
        layers=40,
        attention_at=_EVERY_TENTH,
        hidden=4096,
        attention=(32, 8),
        heads=(128, 64, 128),
    ),
    "nemotron-h-8b": _nemotron_h(
        "nvidia/Nemotron-H-8B-Base-8K",
        pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        hidden=4096,
        kv_heads=8,
        heads=(128, 64),
    ),
    "nemotron-nano-9b-v2": _nemotron_h(
        "nvidia/NVIDIA-Nemotron-Nano-9B-v2",
        pattern="M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
        hidden=4480,
        kv_heads=8,
        heads=(128, 80),
    ),
    "nemotron-3-nano-30b-a3b": _nemotron_h(
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        hidden=2688,
        kv_heads=2,
        heads=(64, 64),
    ),
    "bamba-9b": Preset(
        {
            "model_type": "bamba",
            "num_hidden_layers": 32,
            "attn_layer_indices": [9, 18, 27],
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "mamba_n_heads": 128,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
            "mamba_d_conv": 4,
        },
        "config.json of ibm-fms/Bamba-9B",
    ),
    "zamba2-2.7b": Preset(
        {
            "model_type": "zamba2",
            "num_hidden_layers": 54,
            "hybrid_layer_ids": [6, 12, 18, 24, 30, 36, 42, 47, 51],
            "hidden_size": 2560,
            "num_attention_heads": 32,
            "attention_head_dim": 160,
            "n_mamba_heads": 80,
            "mamba_headdim": 64,
            "mamba_d_state": 64,
            "mamba_ngroups": 1,
            "mamba_d_conv": 4,
        },
        "config.json of Zyphra/Zamba2-2.7B-instruct",
    ),
    "jamba-v0.1": Preset(
        {
            "model_type": "jamba",
            "num_hidden_layers": 32,
            "attn_layer_period": 8,
            "attn_layer_offset": 4,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
        },
        "config.json of ai21labs/Jamba-v0.1 (a full-rank selective scan, not Mamba-2: geometry only)",
    ),
    "qwen3-next-80b-a3b": Preset(
        {
            "model_type": "qwen3_next",
            "num_hidden_layers": 48,
            "full_attention_interval": 4,
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_value_heads": 32,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_key_head_dim": 128,
            "linear_conv_kernel_dim": 4,
        },
        "config.json of Qwen/Qwen3-Next-80B-A3B-Instruct (a gated delta net, not Mamba-2: geometry only)",
    ),
}


def model_geometry(
    model: str,
    *,
    kv_dtype: str = "bfloat16",
    ssm_dtype: str = "bfloat16",
    conv_dtype: str = "bfloat16",
    tp_size: int = 1,
) -> StateGeometry:
    """Return the geometry of a preset name or of a path to a config.json or its folder.

    Raises:
        SettingError: neither a preset nor a readable config; names the nearest preset.
    """
    preset = PRESETS.get(model.lower())
    if preset is None and not os.path.exists(model):
        import difflib

        near = difflib.get_close_matches(model.lower(), PRESETS, n=3, cutoff=0.3) or list(PRESETS)
        raise SettingError(f"expected a preset or a path to a config.json, got {model!r}; nearest: {', '.join(near)}")
    return read_geometry(
        model if preset is None else preset.config,
        name=None if preset is None else model.lower(),
        kv_dtype=kv_dtype,
        ssm_dtype=ssm_dtype,
        conv_dtype=conv_dtype,
        tp_size=tp_size,
    )
