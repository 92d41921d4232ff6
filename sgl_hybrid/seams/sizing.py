"""From flags and a model's configuration to the units of one rank, before and after SGLang has loaded the model.

The launcher calls `plan_from_arguments` so that a mistake ends the start before anything is loaded; the scheduler calls
`plan_from_model` with what SGLang resolved, and checks it against SGLang's own state sizes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from sgl_hybrid.config import MemorySettings
from sgl_hybrid.errors import SettingError
from sgl_hybrid.memory.budget import Units, admission_budget, checkpoints_in, parse_budget, plan_units
from sgl_hybrid.memory.geometry import StateGeometry
from sgl_hybrid.memory.organization import Layout, layout_for

STATE_SLOTS_PER_REQUEST = 1
"""State slots that a running request holds: its own state. A second, for the boundary that a step crosses, is taken if
there is room and given to the tree with that step's result."""


class MemoryPlan(NamedTuple):
    """Geometry, layout and integer units of one rank. `units` is None until the budget is known."""

    settings: MemorySettings
    geometry: StateGeometry
    layout: Layout
    units: Units | None

    @property
    def num_attention_tokens(self) -> int:
        """Tokens that the attention pool holds, or a shared pool if it held nothing else."""
        return max(self.units.num_pages, self.units.num_attention_pages) * self.layout.page_tokens

    @property
    def num_checkpoints(self) -> int:
        """Checkpoints that the recurrent pool holds, or a shared pool if it held nothing else."""
        if not self.layout.shared:
            return self.units.num_checkpoints
        return checkpoints_in(self.layout, self.units.num_pages)

    def describe(self) -> dict[str, Any]:
        """The organization, its geometry and its units as plain values, for the log line and `/server_info`."""
        geometry, layout, units = self.geometry, self.layout, self.units
        return {
            "organization": layout.organization,
            "page_tokens": layout.page_tokens,
            "checkpoint_interval": layout.checkpoint_interval,
            "checkpoint_placement": self.settings.placement,
            "exact_continuation": self.settings.exact_continuation,
            "members": layout.members,
            "planes": layout.planes,
            "groups": layout.groups,
            "kv_token_bytes_per_layer": geometry.kv_token_bytes,
            "ssm_bytes_per_layer": geometry.ssm_bytes,
            "conv_bytes_per_layer": geometry.conv_bytes,
            "attention_layers": len(geometry.attention_layers),
            "recurrent_layers": len(geometry.recurrent_layers),
            "units": None if units is None else unit_counts(units),
        }


def unit_counts(units: Units) -> dict[str, Any]:
    """Integer units and bytes in both scopes of a plan."""
    return {
        "budget": units.budget.text,
        "budget_bytes": units.budget.total_bytes,
        "pages": units.num_pages,
        "attention_pages": units.num_attention_pages,
        "checkpoints": units.num_checkpoints,
        "attention_fraction": units.attention_fraction,
        "attention_bytes_per_layer": units.attention_layer_bytes,
        "recurrent_bytes_per_layer": units.recurrent_layer_bytes,
        "total_bytes": units.total_bytes,
    }


def plan_from_arguments(settings: MemorySettings, values: Mapping[str, Any]) -> MemoryPlan:
    """Plan from the launcher's arguments. values: SGLang's argument names (`model_path`, `dtype`, ...).

    Raises:
        SettingError: the model has no recurrent state, the geometry cannot divide, or the budget is too small for one
            request at the configured context length.
    """
    from sglang.srt.utils.hf_transformers_utils import get_config

    path = values["model_path"]
    try:
        config = get_config(
            path,
            trust_remote_code=bool(values.get("trust_remote_code")),
            revision=values.get("revision"),
            model_override_args=_override_arguments(values),
        )
    except (OSError, ValueError) as error:
        raise SettingError(
            f"--model-path: expected a model configuration at {path}, got {first_line(error)}"
        ) from error
    content = config.to_dict()
    text = content.get("text_config") or content
    dtype = model_dtype(text, values.get("dtype") or "auto")
    geometry = StateGeometry.from_config(
        content,
        kv_dtype=kv_dtype(values.get("kv_cache_dtype"), dtype),
        ssm_dtype=ssm_dtype(text, values.get("mamba_ssm_dtype")),
        conv_dtype=os.environ.get("SGLANG_MAMBA_CONV_DTYPE") or dtype,
        tp_size=int(values.get("tp_size") or 1),
    )
    context_tokens = values.get("context_length") or text.get("max_position_embeddings")
    plan = make_plan(settings, geometry, context_tokens=context_tokens)
    if not values.get("disable_radix_cache"):
        _check_interval(plan.layout, chunk_tokens=int(text.get("mamba_chunk_size") or 64))
    return plan


def _check_interval(layout: Layout, *, chunk_tokens: int) -> None:
    """Refuse boundaries that are closer than SGLang keeps states: a chunk of the model's scan.

    Raises:
        SettingError: with the least interval.
    """
    if layout.checkpoint_interval < chunk_tokens:
        nearest = -(-chunk_tokens // layout.page_tokens) * layout.page_tokens
        raise SettingError(
            f"--checkpoint-interval: expected at least {chunk_tokens} tokens, a chunk of this model's scan, got "
            f"{layout.checkpoint_interval}; nearest: {nearest}"
        )


def plan_from_model(settings: MemorySettings, configurator: Any, *, available_bytes: int | None) -> MemoryPlan:
    """Plan from what SGLang resolved, and compare the state sizes with SGLang's own.

    configurator: SGLang's `KVCacheConfigurator`. available_bytes: the budget when no flag gives one.

    Raises:
        SettingError: as `plan_from_arguments`, or SGLang sizes a state differently.
    """
    from sglang.srt.runtime_context import get_parallel

    parameters = configurator.mambaish_config.mamba2_cache_params
    if configurator.kv_cache_dtype.itemsize < 2:
        raise SettingError(
            f"--memory-org: expected unquantized KV, got {configurator.kv_cache_dtype} from the model's configuration; "
            "nearest: --kv-cache-dtype bfloat16"
        )
    if len(parameters.shape.conv) != 1:
        raise SettingError(
            f"--memory-org: expected a model with one convolution state per layer, got {len(parameters.shape.conv)}: "
            "this model's state layout is not supported"
        )
    geometry = StateGeometry.from_config(
        configurator.model_config.hf_config.to_dict(),
        kv_dtype=str(configurator.kv_cache_dtype).removeprefix("torch."),
        ssm_dtype=str(parameters.dtype.temporal).removeprefix("torch."),
        conv_dtype=str(parameters.dtype.conv).removeprefix("torch."),
        tp_size=get_parallel().attn_tp_size,
    )
    expected = parameters.mamba_cache_per_req
    found = geometry.composite_bytes * len(geometry.recurrent_layers)
    if found != expected:
        raise SettingError(
            f"--memory-org: expected a state of {expected} B per checkpoint as SGLang sizes it, got {found} B from the "
            "model's configuration: this model's state layout is not supported"
        )
    return make_plan(
        settings, geometry, context_tokens=configurator.model_config.context_len, available_bytes=available_bytes
    )


def make_plan(
    settings: MemorySettings,
    geometry: StateGeometry,
    *,
    context_tokens: int | None,
    available_bytes: int | None = None,
) -> MemoryPlan:
    """Lay out the organization and turn the budget into units.

    Raises:
        SettingError: the geometry cannot divide, or the budget is too small.
    """
    layout = layout_for(
        settings.memory_org,
        geometry,
        page_tokens=settings.page_tokens,
        checkpoint_interval=settings.checkpoint_interval,
    )
    if layout.attention_groups > 1:
        raise SettingError(
            f"--memory-org: expected a model whose attention layers fit one group of planes, got "
            f"{layout.attention_groups} groups in {layout.planes} planes; nearest: d0"
        )
    text = settings.memory_budget if available_bytes is None else str(available_bytes)
    if text is None:
        return MemoryPlan(settings, geometry, layout, None)
    fraction = settings.d0_attention_fraction
    try:
        budget = parse_budget(text, geometry)
    except SettingError as error:
        raise SettingError(f"--memory-budget: {error}") from error
    if context_tokens is not None:
        # The same as what `allocators.BlockAllocator.max_new_tokens_for_memory` leaves for one request.
        need = admission_budget(layout, context_tokens=context_tokens, attention_fraction=fraction).budget
        if budget.total_bytes < need.total_bytes:
            given = f"{text} = {budget.total_bytes} bytes"
            if available_bytes is not None:
                given = f"{text} bytes, what --mem-fraction-static leaves; nearest: a smaller --context-length"
            raise SettingError(
                f"--memory-budget: expected at least {need.total_bytes} bytes for one request of {context_tokens} "
                f"tokens ({settings.memory_org}), got {given}"
            )
    return MemoryPlan(settings, geometry, layout, plan_units(layout, budget, attention_fraction=fraction))


def model_dtype(config: Mapping[str, Any], asked: str) -> str:
    """The dtype that SGLang computes in. Source: SGLang 0.5.23, `model_config._get_and_verify_dtype`."""
    names = {"half": "float16", "float": "float32"}
    if asked != "auto":
        return names.get(asked, asked)
    stored = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    return "float16" if stored == "float32" else stored


def kv_dtype(asked: str | None, dtype: str) -> str:
    """The dtype of stored attention KV; `auto` is the model's."""
    return dtype if asked in (None, "auto") else asked


def ssm_dtype(config: Mapping[str, Any], asked: str | None) -> str:
    """The dtype of stored recurrent state. Source: SGLang 0.5.23, `mamba_utils.mamba2_state_dtype`."""
    return os.environ.get("SGLANG_MAMBA_SSM_DTYPE") or asked or config.get("mamba_ssm_dtype") or "float32"


def first_line(error: BaseException) -> str:
    """The first line of an error's message: a user's mistake is reported in one line."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _override_arguments(values: Mapping[str, Any]) -> dict[str, Any] | None:
    import json

    text = values.get("json_model_override_args")
    return json.loads(text) if text else None
