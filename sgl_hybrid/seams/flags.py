"""The plugin's flags in SGLang's own parser, in the in-process engine, and what they set in SGLang's arguments.

The plugin's organizations need SGLang's arguments to agree with them (page size, pool sizes, tracking grid). They are
set where SGLang builds its argument record, so `--help`, `--config file.yaml`, `sglang serve` and the engine's keyword
arguments all pass through here. An argument that the user set to something else is refused, never overwritten.

Source: SGLang 0.5.23, `sglang/srt/server_args.py`, `sglang/srt/entrypoints/engine.py`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch

from sgl_hybrid.config import CPU_PLATFORM, FLAGS, MemorySettings
from sgl_hybrid.errors import SettingError
from sgl_hybrid.platforms import Platform, check_attention_backends, option_of
from sgl_hybrid.seams.gpu_arguments import set_gpu_arguments
from sgl_hybrid.seams.hooks import Seam
from sgl_hybrid.seams.sizing import MemoryPlan, plan_from_arguments

RADIX_BACKEND = "sgl_hybrid"
"""Name under which the organizations' prefix cache is registered (see `factory`)."""


def add_arguments(result: None, parser: argparse.ArgumentParser) -> None:
    """After `ServerArgs.add_cli_args`: add the plugin's group. Values stay text; `MemorySettings` checks them."""
    group = parser.add_argument_group("memory organization (sgl_hybrid)")
    for flag in FLAGS:
        kind = {"type": str, "metavar": flag.metavar} if flag.metavar else {"action": "store_const", "const": "1"}
        group.add_argument(flag.option, default=os.environ.get(flag.environment), help=flag.help, **kind)


def from_arguments(original: Callable[..., Any], cls: type, args: argparse.Namespace) -> Any:
    """Around `ServerArgs.from_cli_args`: check the flags, set SGLang's arguments, export the environment forms."""
    try:
        values = vars(args)
        settings = MemorySettings.from_values(values)
        configure(settings, values)
    except SettingError as error:
        exit_with(error)
    return original(cls, args)


def engine_arguments(**keywords: Any) -> Any:
    """In place of `Engine.server_args_class`: accept the flags as keywords (`memory_org="d0"`) or environment forms.

    `Engine.__init__` loads the plugins and then builds its argument record through this attribute, so it is the one
    place that both sees the keywords and comes after the plugins. The environment forms stay exported for the processes
    that the engine starts.

    Raises:
        SettingError: as `configure`.
    """
    from sglang.srt.server_args import ServerArgs

    values = {flag.field: keywords.pop(flag.field, os.environ.get(flag.environment)) for flag in FLAGS}
    configure(MemorySettings.from_values(values), keywords)
    return ServerArgs(**keywords)


def bind_engine() -> None:
    """Bind `engine_arguments` to the in-process engine.

    Raises:
        SettingError: the engine builds its arguments in another way than SGLang 0.5.23 does.
    """
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import ServerArgs

    if Engine.server_args_class is engine_arguments:
        return
    if Engine.server_args_class is not ServerArgs:
        raise SettingError(f"expected Engine.server_args_class to be ServerArgs, got {Engine.server_args_class!r}")
    Engine.server_args_class = staticmethod(engine_arguments)


def configure(settings: MemorySettings | None, values: MutableMapping[str, Any]) -> MemoryPlan | None:
    """Set what the platform and the organization need in `values` (SGLang's argument names) and in the environment,
    and install the memory seams in this process.

    Raises:
        SettingError: an argument contradicts the organization, or the plan fails.
    """
    if os.environ.get("SGLANG_PLATFORM") == CPU_PLATFORM:
        _set_cpu_defaults(values)
    if settings is None:
        return None
    from sgl_hybrid.seams import compat, install

    compat.check_version()
    _refuse_policies_without_cache(settings, values)
    if serving_platform(values) is Platform.CUDA:
        settings = set_gpu_arguments(settings, values, os.environ)
    else:
        check_attention_backends(settings.memory_org, Platform.CPU, values)
    if not os.environ.get("SGLANG_MAMBA_CONV_DTYPE"):
        os.environ["SGLANG_MAMBA_CONV_DTYPE"] = _compute_dtype(values)
    plan = plan_from_arguments(settings, values)
    _set_sglang_arguments(plan, values)
    install.memory(settings)
    settings.to_environment(os.environ)
    return plan


def serving_platform(values: Mapping[str, Any]) -> Platform:
    """The platform that these arguments and the environment ask for.

    Raises:
        SettingError: another platform, or none that serves organizations.
    """
    platform, device = os.environ.get("SGLANG_PLATFORM"), str(values.get("device") or Platform.CUDA)
    if platform == CPU_PLATFORM:
        return Platform.CPU
    on_gpu = device.split(":")[0] == Platform.CUDA
    if not platform and on_gpu and has_gpu():
        return Platform.CUDA
    found = "no NVIDIA GPU" if on_gpu else f"--device {device}"
    raise SettingError(
        f"--memory-org: expected an NVIDIA GPU, or SGLANG_PLATFORM={CPU_PLATFORM} in the environment for the CPU "
        f"reference platform, got {f'SGLANG_PLATFORM={platform}' if platform else found}"
    )


def has_gpu() -> bool:
    """Whether torch sees an NVIDIA GPU."""
    return torch.version.cuda is not None and torch.cuda.is_available()


CACHE_POLICIES = (
    "checkpoint-lifetime",
    "retention-k",
    "preempt-pin-k",
    "protection-budget",
    "checkpoint-eviction",
    "checkpoint-placement",
    "slab-reclaim",
)
"""Flags that say what the prefix cache keeps; there must be one."""


def _refuse_policies_without_cache(settings: MemorySettings, values: MutableMapping[str, Any]) -> None:
    given = [flag for flag in FLAGS if flag.name in CACHE_POLICIES and getattr(settings, flag.field) is not None]
    if values.get("disable_radix_cache") and given:
        raise SettingError(
            f"{given[0].option}: expected a prefix cache, got --disable-radix-cache; leave one of the two out"
        )


def _set_sglang_arguments(plan: MemoryPlan, values: MutableMapping[str, Any]) -> None:
    layout = plan.layout
    _require(values, "page_size", layout.page_tokens, "--page-tokens", unset=(None,))
    _require(values, "mamba_track_interval", layout.checkpoint_interval, "--checkpoint-interval", unset=(None, 256))
    _require(values, "max_total_tokens", None, "--memory-budget")
    _require(values, "max_mamba_cache_size", None, "--memory-budget")
    _require(values, "mamba_full_memory_ratio", None, "--memory-budget")
    _require(values, "mamba_backend", "triton", "--memory-org", unset=(None,))
    if not values.get("disable_radix_cache"):
        _require(values, "mamba_radix_cache_strategy", "extra_buffer_lazy", "--memory-org", unset=(None, "auto"))
    for name in (
        "enable_unified_memory",
        "enable_hierarchical_cache",
        "enable_int8_mamba_checkpoint",
        "enable_lmcache",
        "enable_flexkv",
        "enable_unified_cache_external_linker",
        "enable_streaming_session",
        "enable_return_routed_experts",
        "enable_page_major_kv_layout",
    ):
        _require(values, name, False, "--memory-org")
    if values.get("kv_cache_dtype") not in (None, "auto", "bf16", "bfloat16"):
        raise SettingError(
            "--kv-cache-dtype: expected auto or bfloat16 with --memory-org (pages hold unquantized KV), got "
            f"{values['kv_cache_dtype']}; nearest: auto"
        )
    _require(values, "speculative_algorithm", None, "--memory-org")
    _require(values, "radix_eviction_policy", "lru", "--memory-org", unset=(None,))
    _require(values, "radix_cache_backend", RADIX_BACKEND, "--memory-org", unset=(None,))
    _fit_prefill_chunks(values, layout.page_tokens)
    if plan.units is not None:
        values["max_total_tokens"] = plan.num_attention_tokens
        values["max_mamba_cache_size"] = plan.num_checkpoints


SGLANG_CHUNKS = (2048, 8192)
"""The least and the usual size of prefill chunks that SGLang chooses by itself, a power of two [tokens]."""


def _fit_prefill_chunks(values: MutableMapping[str, Any], page_tokens: int) -> None:
    """SGLang asserts that pages divide a chunk. Refuse a size that they do not; replace SGLang's choice where no power
    of two would do."""
    least, usual = SGLANG_CHUNKS
    asked = values.get("chunked_prefill_size")
    if asked is None:
        if least % page_tokens:
            values["chunked_prefill_size"] = max(1, usual // page_tokens) * page_tokens
    elif asked > 0 and asked % page_tokens:
        nearest = max(1, round(asked / page_tokens)) * page_tokens
        raise SettingError(
            f"--chunked-prefill-size: expected a multiple of {page_tokens} tokens (--page-tokens), got {asked}; "
            f"nearest: {nearest}"
        )


def _require(values: MutableMapping[str, Any], name: str, wanted: Any, flag: str, unset: tuple[Any, ...] = ()) -> None:
    """Set SGLang's argument `name` to `wanted`, or refuse a user's contrary value."""
    given = values.get(name)
    if given in unset or given == wanted or (not wanted and not given):
        if name in values or wanted is not None:
            values[name] = wanted
        return
    option = option_of(name)
    raise SettingError(f"{option}: expected {wanted or 'it to be left out'} (it follows from {flag}), got {given}")


def _set_cpu_defaults(values: MutableMapping[str, Any]) -> None:
    """The CPU reference platform computes in the stored dtype (SGLang halves float32), with torch-native attention."""
    from sglang.srt.utils.hf_transformers_utils import get_config

    if values.get("attention_backend") is None:
        values["attention_backend"] = "torch_native"
    if values.get("device") is None:
        values["device"] = "cpu"
    if (values.get("dtype") or "auto") == "auto":
        try:
            config = get_config(values["model_path"], trust_remote_code=bool(values.get("trust_remote_code")))
        except (OSError, ValueError):
            return
        stored = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
        values["dtype"] = stored


def _compute_dtype(values: MutableMapping[str, Any]) -> str:
    dtype = values.get("dtype") or "auto"
    return {"auto": "bfloat16", "half": "float16", "float": "float32"}.get(dtype, dtype)


def exit_with(error: SettingError) -> None:
    """Print a user's mistake in one line and end the process with status 2."""
    print(f"sgl_hybrid: {error}", file=sys.stderr, flush=True)
    raise SystemExit(2) from error


SEAMS: tuple[Seam, ...] = (
    Seam(
        "sglang.srt.server_args.ServerArgs.add_cli_args",
        "after",
        add_arguments,
        ("parser",),
        "the flags in SGLang's parser",
    ),
    Seam(
        "sglang.srt.server_args.ServerArgs.from_cli_args",
        "around",
        from_arguments,
        ("args",),
        "SGLang's arguments agree with the organization",
    ),
)
