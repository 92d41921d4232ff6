"""Nano models: hybrid checkpoints with seeded random weights, made on the spot instead of downloaded.

A nano keeps the proportions of a real model, so token and page counts are the real ones while bytes and compute are
small. In elements per layer, attention KV of one token : SSM state : convolution state is

    falcon-h1-nano   64 : 98,304 : 1,280   as Falcon-H1-7B (1 KiB : 1,536 KiB : 20 of 21 KiB), all layers have both
    falcon-h1-pico   32 : 49,152 :   640   the same at half the width, for load tests on a CPU
    granite-h-nano   64 : 32,768 :   640   as Granite-4.0-h-micro (2 KiB : 1,024 KiB : 20 of 25.5 KiB), layers apart

Invariants: the files depend on nothing but (model, seed, dtype), every tensor has its own random stream (adding one
leaves the others as they were), and bfloat16 weights are the rounded float32 weights. The scales are chosen so that a
test on outputs can fail: logits have about 3.6 nats of entropy, and replacing only the KV or only the recurrent state
of a 512-token prefix changes what is generated hundreds of tokens later (see `_recurrence`).
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save

from bench.atomic import write_whole
from bench.registry import registered
from bench.tokenizer import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE, make_tokenizer, tokenizer_settings
from sgl_hybrid.errors import SettingError

CONTEXT_TOKENS = 8192
DTYPES = ("float32", "bfloat16")

Array = npt.NDArray[np.float32]
Init = Callable[[np.random.Generator, tuple[int, ...]], Array]


class Tensor(NamedTuple):
    """One tensor of a checkpoint: its name, its shape and how its values are drawn."""

    name: str
    shape: tuple[int, ...]
    init: Init


class NanoModel(NamedTuple):
    """A registered nano model: its `config.json` (without dtype) and its tensors."""

    config: dict[str, Any]
    tensors: tuple[Tensor, ...]


def _normal(std: float, mean: float = 0.0) -> Init:
    return lambda rng, shape: rng.standard_normal(shape, dtype=np.float32) * np.float32(std) + np.float32(mean)


def _linear(name: str, outputs: int, inputs: int, gain: float = 1.0) -> Tensor:
    """Return a weight matrix that turns inputs of unit variance into outputs of standard deviation `gain`."""
    return Tensor(f"{name}.weight", (outputs, inputs), _normal(gain / math.sqrt(inputs)))


def _norm(name: str, size: int) -> Tensor:
    return Tensor(f"{name}.weight", (size,), _normal(0.1, mean=1.0))


def _mixer(prefix: str, config: dict[str, Any], inner: int, out_gain: float) -> Iterator[Tensor]:
    """Yield the tensors of one Mamba2 mixer with `inner` = heads * head size channels."""
    heads, taps = config["mamba_n_heads"], config["mamba_d_conv"]
    channels = inner + 2 * config["mamba_n_groups"] * config["mamba_d_state"]
    yield _linear(f"{prefix}.in_proj", inner + channels + heads, config["hidden_size"])
    yield Tensor(f"{prefix}.conv1d.weight", (channels, 1, taps), _normal(1 / math.sqrt(taps)))
    # About -0.65 silu has no mean under unit-variance input, so the state sums up what was read, not a constant.
    yield Tensor(f"{prefix}.conv1d.bias", (channels,), _normal(0.1, mean=-0.65))
    yield from _recurrence(prefix, heads)
    yield Tensor(f"{prefix}.D", (heads,), _normal(0.1, mean=1.0))
    yield _linear(f"{prefix}.out_proj", config["hidden_size"], inner, out_gain)


def _recurrence(prefix: str, heads: int) -> Iterator[Tensor]:
    """Yield A_log and dt_bias: memory of 4 to 4,096 tokens over the heads, the same state variance in each.

    A head forgets by exp(-rate) per token with rate = dt * a, and the state's variance goes as dt / (2 a); dt =
    sqrt(2 rate) and a = sqrt(rate / 2) keep it at one for every rate.
    """
    rate = np.exp(np.linspace(math.log(1 / 4), math.log(1 / 4096), heads))
    a_log = np.log(np.sqrt(rate / 2)).astype(np.float32)
    dt_bias = np.log(np.expm1(np.sqrt(2 * rate))).astype(np.float32)
    yield Tensor(f"{prefix}.A_log", (heads,), lambda rng, shape: a_log)
    yield Tensor(f"{prefix}.dt_bias", (heads,), lambda rng, shape: dt_bias)


def _attention(prefix: str, config: dict[str, Any], score_gain: float, out_gain: float) -> Iterator[Tensor]:
    """Yield one attention block; scores have standard deviation about `score_gain`, so few keys take the weight."""
    hidden, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim", hidden // heads)
    yield _linear(f"{prefix}.q_proj", heads * head_dim, hidden, math.sqrt(score_gain))
    yield _linear(f"{prefix}.k_proj", kv_heads * head_dim, hidden, math.sqrt(score_gain))
    yield _linear(f"{prefix}.v_proj", kv_heads * head_dim, hidden)
    yield _linear(f"{prefix}.o_proj", hidden, heads * head_dim, out_gain)


FALCON_CONFIG: dict[str, Any] = {
    "architectures": ["FalconH1ForCausalLM"],
    "model_type": "falcon_h1",
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 512,
    "hidden_act": "silu",
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "attention_bias": False,
    "mlp_bias": False,
    "projectors_bias": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "mamba_d_ssm": 768,
    "mamba_n_heads": 24,
    "mamba_d_head": 32,
    "mamba_n_groups": 2,
    "mamba_d_state": 128,
    "mamba_d_conv": 2,
    "mamba_expand": 3,
    "mamba_chunk_size": 128,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    # SGLang gates first whatever this says; with True the two engines compute different models.
    "mamba_norm_before_gate": False,
    "mamba_rms_norm": False,
    "embedding_multiplier": 1.25,
    "lm_head_multiplier": 0.5,
    "key_multiplier": 0.8,
    "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 0.9,
    "ssm_in_multiplier": 1.1,
    "ssm_out_multiplier": 0.75,
    "ssm_multipliers": [0.9, 1.0, 0.9, 1.1, 0.5],
    "mlp_multipliers": [0.9, 0.8],
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}

PICO_CONFIG: dict[str, Any] = {
    **FALCON_CONFIG,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "head_dim": 16,
    "mamba_d_ssm": 384,
    "mamba_n_heads": 12,
    "mamba_n_groups": 1,
}
"""Half of every width, so the same proportions of state, and half of the query heads: prompts and decode steps take
about as long on two CPU cores as on the paper's GPU (`python -m bench pace`)."""

GRANITE_CONFIG: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "num_hidden_layers": 6,
    "layer_types": ["mamba", "mamba", "attention", "mamba", "mamba", "attention"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "shared_intermediate_size": 512,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "hidden_act": "silu",
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "attention_bias": False,
    "position_embedding_type": "nope",
    "mamba_n_heads": 16,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 64,
    "mamba_d_conv": 2,
    "mamba_expand": 2,
    "mamba_chunk_size": 128,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "embedding_multiplier": 1.5,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.6,
    "logits_scaling": 2.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def _falcon_tensors(config: dict[str, Any]) -> Iterator[Tensor]:
    hidden, inner, mlp = config["hidden_size"], config["mamba_d_ssm"], config["intermediate_size"]
    yield Tensor("model.embed_tokens.weight", (VOCAB_SIZE, hidden), _normal(1.0))
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield _norm(f"{prefix}.input_layernorm", hidden)
        yield from _attention(f"{prefix}.self_attn", config, score_gain=2.5, out_gain=2.5)
        yield from _mixer(f"{prefix}.mamba", config, inner, out_gain=0.9)
        yield _norm(f"{prefix}.pre_ff_layernorm", hidden)
        yield _linear(f"{prefix}.feed_forward.gate_proj", mlp, hidden)
        yield _linear(f"{prefix}.feed_forward.up_proj", mlp, hidden)
        yield _linear(f"{prefix}.feed_forward.down_proj", hidden, mlp, 2.0)
    yield _norm("model.final_layernorm", hidden)
    yield _linear("lm_head", VOCAB_SIZE, hidden, 2.5 / config["lm_head_multiplier"])


def _granite_tensors() -> Iterator[Tensor]:
    config, hidden = GRANITE_CONFIG, GRANITE_CONFIG["hidden_size"]
    inner, mlp = config["mamba_expand"] * hidden, config["shared_intermediate_size"]
    yield Tensor("model.embed_tokens.weight", (VOCAB_SIZE, hidden), _normal(1.0))
    for layer, kind in enumerate(config["layer_types"]):
        prefix = f"model.layers.{layer}"
        yield _norm(f"{prefix}.input_layernorm", hidden)
        if kind == "attention":
            yield from _attention(f"{prefix}.self_attn", config, score_gain=2.5, out_gain=3.0)
        else:
            yield from _mixer(f"{prefix}.mamba", config, inner, out_gain=1.5)
            yield _norm(f"{prefix}.mamba.norm", inner)
        yield _norm(f"{prefix}.post_attention_layernorm", hidden)
        yield _linear(f"{prefix}.shared_mlp.input_linear", 2 * mlp, hidden)
        yield _linear(f"{prefix}.shared_mlp.output_linear", hidden, mlp, 2.0)
    yield _norm("model.norm", hidden)
    yield _linear("lm_head", VOCAB_SIZE, hidden, 1.7 * config["logits_scaling"])


MODELS: dict[str, NanoModel] = {
    "falcon-h1-nano": NanoModel(FALCON_CONFIG, tuple(_falcon_tensors(FALCON_CONFIG))),
    "falcon-h1-pico": NanoModel(PICO_CONFIG, tuple(_falcon_tensors(PICO_CONFIG))),
    "granite-h-nano": NanoModel(GRANITE_CONFIG, tuple(_granite_tensors())),
}


def model_folder(model: str, dtype: str) -> Path:
    """Return the folder of a model; a nano model is made in `models/` if it is missing. Raises: SettingError."""
    if model in MODELS:
        folder = Path("models") / f"{model}-{dtype}"
        write_model(model, folder, dtype=dtype)
        return folder
    if not (Path(model) / "config.json").is_file():
        names = ", ".join(MODELS)
        raise SettingError(f"--model: expected {names} or a folder with config.json, got {model!r}")
    return Path(model)


def write_model(name: str, folder: Path, *, seed: int = 0, dtype: str = "float32") -> int:
    """Write the model `name` into `folder` (created if missing) and return the size of its weights in bytes.

    Writes config.json, generation_config.json, model.safetensors, tokenizer.json and tokenizer_config.json; files of
    these names with other content are replaced. Loads with transformers' Auto classes and with SGLang's loader.
    Raises: SettingError for an unknown model or dtype, a seed out of range, or a folder that cannot be written.
    """
    model = registered(MODELS, name, "a model")
    if dtype not in DTYPES:
        raise SettingError(f"expected a dtype out of {', '.join(DTYPES)}, got {dtype!r}")
    if not 0 <= seed < 2**63:
        raise SettingError(f"expected a seed of 0 to 2^63 - 1, got {seed}")
    config = {
        **model.config,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": CONTEXT_TOKENS,
        "pad_token_id": PAD_ID,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "use_cache": True,
        "dtype": dtype,
    }
    storage = getattr(torch, dtype)
    weights = save({t.name: torch.from_numpy(_draw(t, seed)).to(storage) for t in model.tensors}, {"format": "pt"})
    generation = {"pad_token_id": PAD_ID, "bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "do_sample": False}
    files = {
        "model.safetensors": weights,
        "generation_config.json": _json(generation),
        "tokenizer.json": make_tokenizer().to_str().encode(),
        "tokenizer_config.json": _json(tokenizer_settings(CONTEXT_TOKENS)),
        "config.json": _json(config),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, content in files.items():
            _put(folder / file, content)
    except OSError as error:
        raise SettingError(f"expected a folder that can be written, got {folder}: {error.strerror}") from error
    return len(weights)


def _json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, indent=2).encode() + b"\n"


def _put(path: Path, content: bytes) -> None:
    """Write a file, whole or not at all; leave one with this content alone, as a server may be reading it."""
    if path.is_file() and path.read_bytes() == content:
        return
    write_whole(path, content)


def _draw(tensor: Tensor, seed: int) -> Array:
    """Return the tensor's values; the random stream is keyed by (seed, name)."""
    rng = np.random.Generator(np.random.Philox(key=[seed, zlib.crc32(tensor.name.encode())]))
    return np.ascontiguousarray(tensor.init(rng, tensor.shape), dtype=np.float32)
