"""What an organization on a GPU asks of SGLang's arguments, and what it refuses.

Works on argument values alone and imports no SGLang.

Source: SGLang 0.5.23, `arg_groups/fields/*.py` (names and defaults), `arg_groups/cuda_graph_hook.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any, NamedTuple

import msgspec

from sgl_hybrid.config import MemorySettings
from sgl_hybrid.errors import SettingError
from sgl_hybrid.platforms import (
    ATTENTION_BACKENDS,
    Platform,
    check_attention_backends,
    continuation_is_exact,
    option_of,
)


class Refused(NamedTuple):
    """An argument of SGLang that must keep its default, and why."""

    argument: str
    default: object
    reason: str


REFUSED: tuple[Refused, ...] = (
    Refused("enable_memory_saver", False, "the pools are not in SGLang's memory saver"),
    Refused("enable_torch_compile", False, "the Mamba2 backend is not traced"),
    Refused("debug_cuda_graph", False, "it records decode in segments"),
    Refused("disaggregation_mode", "null", "states are sent by slot, which names no address here"),
    Refused("enable_pdmux", False, "one set of static rows serves one stream"),
    Refused("enable_two_batch_overlap", False, "one set of static rows serves one batch"),
    Refused("pp_size", 1, "a rank plans all layers of the model"),
    Refused("dcp_size", 1, "a token has one row id on all ranks"),
    Refused("enable_linear_replayssm", False, "it keeps states by slot"),
)
"""Features of SGLang that reach into its own pools, or record or split a decode step in another way."""

GRAPH_BACKENDS = {"decode": ("full", "disabled"), "prefill": ("disabled",)}
"""Values of SGLang's `cuda_graph_config` that are served: a prefill decides on the host which states it keeps."""

GLUE = "SGLANG_ENABLE_METADATA_GLUE_GRAPH"
"""SGLang's variable that captures also what the host does before a graph runs, which here uploads tables."""

DEBUG = "SGLANG_HYBRID_DEBUG_CHECKPOINTS"

KERNEL_STATES = ("bfloat16", "float32")
"""Element types of states that the decode kernels take."""


def set_gpu_arguments(
    settings: MemorySettings, values: MutableMapping[str, Any], environment: Mapping[str, str]
) -> MemorySettings:
    """Set what a GPU needs in `values` (SGLang's argument names); return the settings as they hold there.

    Exact continuation is switched off where SGLang's operators do not keep it.

    Raises:
        SettingError: an argument that is not served on a GPU.
    """
    organization = settings.memory_org
    for refused in REFUSED:
        given = values.get(refused.argument, refused.default)
        if given not in (None, refused.default):
            raise SettingError(
                f"{option_of(refused.argument)}: expected it to be left out with --memory-org on a GPU "
                f"({refused.reason}), got {given}"
            )
    if values.get("attention_backend") is None:
        values["attention_backend"] = ATTENTION_BACKENDS[organization][Platform.CUDA][0]
    check_attention_backends(organization, Platform.CUDA, values)
    _check_graphs(values, environment)
    values["disable_prefill_cuda_graph"] = True
    for argument in ("dtype", "mamba_ssm_dtype"):
        if values.get(argument) in ("half", "float16"):
            check_state_dtype(option_of(argument), "float16")
    exact = continuation_is_exact(
        Platform.CUDA,
        deterministic=bool(values.get("enable_deterministic_inference")),
        attention_backend=str(values.get("prefill_attention_backend") or values["attention_backend"]),
    )
    return settings if exact else msgspec.structs.replace(settings, no_exact_continuation=True)


def check_state_dtype(option: str, dtype: str) -> None:
    """Refuse an element type of states that the kernels do not take.

    Raises:
        SettingError: with the nearest.
    """
    if dtype not in KERNEL_STATES:
        raise SettingError(
            f"{option}: expected states of {' or '.join(KERNEL_STATES)} with --memory-org on a GPU, got {dtype}; "
            "nearest: bfloat16"
        )


def _check_graphs(values: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    for phase, served in GRAPH_BACKENDS.items():
        option = f"--cuda-graph-backend-{phase}"
        for given in _graph_backends(values, phase):
            if given is not None and given not in served:
                raise SettingError(
                    f"{option}: expected {' or '.join(served)} with --memory-org on a GPU, got {given}; "
                    f"nearest: {served[0]}"
                )
    if environment.get(GLUE, "").lower() in ("1", "true", "yes", "y"):
        raise SettingError(f"{GLUE}: expected it to be unset with --memory-org on a GPU, got {environment[GLUE]}")
    if environment.get(DEBUG) == "1" and not _runs_eagerly(values):
        raise SettingError(
            f"{DEBUG}: expected --disable-decode-cuda-graph with it on a GPU (the host looks at every step), got none"
        )


def _runs_eagerly(values: Mapping[str, Any]) -> bool:
    switched_off = values.get("disable_cuda_graph") or values.get("disable_decode_cuda_graph")
    return bool(switched_off) or "disabled" in _graph_backends(values, "decode")


def _graph_backends(values: Mapping[str, Any], phase: str) -> tuple[str | None, str | None]:
    """What the option and the configuration say of a phase; None where they leave it open."""
    config = values.get("cuda_graph_config") or {}
    config = config if isinstance(config, Mapping) else config.to_dict()
    return values.get(f"cuda_graph_backend_{phase}"), (config.get(phase) or {}).get("backend")
