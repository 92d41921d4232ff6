"""From an arm and a budget to the flags of its server, at the same bytes for every arm.

A budget is the state memory over all layers. Each engine turns it into its own whole units: pages (S0, S1, S2), two
kinds of units (D0), tokens and state slots (SGLang), blocks of one size for both kinds (vLLM). `ArmPlan.describe` says
which units, and how far their bytes are from the budget. Padding units (SGLang's slot and page 0, this project's page
0, vLLM's null block) are outside the count on every side.

Source: SGLang 0.5.23, `mem_cache/kv_cache_configurator.py`, `mem_cache/unified_memory_pool.py` (a pool given as token
and slot counts has their bytes); vLLM 0.32, `platforms/interface.py` (attention block raised until its page holds one
state, in steps of 128 tokens on a CPU).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from bench.arms import TUNED_SHARES, Arm
from bench.server import cpu_environment, sglang_command
from bench.variants import variant_of
from sgl_hybrid.config import FLAGS
from sgl_hybrid.errors import SettingError
from sgl_hybrid.memory.budget import Budget, admission_budget, parse_budget, plan_units
from sgl_hybrid.memory.geometry import StateGeometry
from sgl_hybrid.memory.organization import layout_for

VLLM_BLOCK_STEP_TOKENS = 128
VLLM_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of an attention head that vLLM's CPU operators take. Source: vLLM 0.32, `v1/attention/backends/cpu_attn.py`."""
SPARE_CACHED_STATES = 512
"""State slots of a ceiling beyond those of its running requests: more than the checkpoints that a run leaves."""


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """What every arm of a campaign serves: the model's folder, its dtype, and the longest request [tokens]."""

    model: Path
    dtype: str = "float32"
    context_tokens: int = 8192

    def geometry(self) -> StateGeometry:
        """Return the bytes of the model's state. Raises: SettingError."""
        return StateGeometry.from_config(
            self.model, kv_dtype=self.dtype, ssm_dtype=self.dtype, conv_dtype=self.dtype, tp_size=1
        )


class ArmPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How one arm is served at one budget. `units` are its whole units; `missing` names flags that its server lacks.

    checkpoint_interval: tokens between two places where a cached prefix can end; 1 where it is far below a prompt.
    """

    arm: str
    budget: str
    budget_bytes: int
    total_bytes: int
    units: dict[str, int]
    flags: tuple[str, ...]
    missing: tuple[str, ...] = ()
    checkpoint_interval: int = 1

    def describe(self) -> str:
        """Return the units and the rounding in one line."""
        units = ", ".join(f"{count:,} {name}" for name, count in self.units.items())
        if self.total_bytes > 4 * self.budget_bytes:
            return f"{units}: {self.total_bytes:,} B, memory to spare"
        off_pct = 100 * (self.total_bytes / self.budget_bytes - 1)
        side = "over" if off_pct > 0 else "under"
        return f"{units}: {self.total_bytes:,} B, {abs(off_pct):.2f} % {side} the budget"


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """What a cell sets besides arm and budget. mamba_share: instead of the arm's own (`stock-tuned`)."""

    cap: int
    headroom: float = 0.0
    variant: str = ""
    mamba_share: float | None = None


class _Sized(NamedTuple):
    """A budget in the units of one engine, and the flags that ask for them. checkpoint_interval: as in `ArmPlan`."""

    total_bytes: int
    units: dict[str, int]
    flags: list[str]
    checkpoint_interval: int = 1


def plan_arm(arm: Arm, budget_text: str, serving: Serving, policy: Policy) -> ArmPlan:
    """Return units and flags of `arm` at a budget.

    Raises: SettingError if the budget is malformed or does not hold one request of the arm.
    """
    geometry = serving.geometry()
    budget = parse_budget(budget_text, geometry)
    own = [*arm.flags, *variant_of(policy.variant).flags]
    if arm.engine == "vllm":
        sized = _vllm(arm, budget, geometry, serving, policy.cap)
    elif arm.organization is not None:
        sized = _organization(arm, budget, geometry, serving, own)
        own += [] if "--admission-headroom" in own else ["--admission-headroom", f"{policy.headroom:g}"]
    else:
        sized = _stock(arm, budget, geometry, serving, policy)
    known = {flag.option for flag in FLAGS}
    needed = [flag for flag in own if flag.startswith("--")] if arm.organization is not None else []
    return ArmPlan(
        arm=arm.name,
        budget=budget_text,
        budget_bytes=budget.total_bytes,
        total_bytes=sized.total_bytes,
        units=sized.units,
        flags=(*own, *sized.flags),
        missing=tuple(flag for flag in needed if flag not in known),
        checkpoint_interval=sized.checkpoint_interval,
    )


def shares_with_room(arm: Arm, budget_text: str, serving: Serving) -> list[float]:
    """Return the shares of recurrent memory, of those that a calibration tries, at which a budget holds one request.

    Raises: SettingError if the budget is malformed or holds one at none of them.
    """
    geometry = serving.geometry()
    budget = parse_budget(budget_text, geometry)
    least = {share: _least_bytes(arm, share, geometry, serving) for share in TUNED_SHARES}
    _require_room(arm, budget, min(least.values()))
    return [share for share, least_bytes in least.items() if least_bytes <= budget.total_bytes]


def server_command(arm: Arm, plan: ArmPlan, serving: Serving, cap: int, port: int, vllm: Path) -> list[str]:
    """Return the command line of the arm's server on this machine. `vllm`: interpreter of vLLM's own environment."""
    if arm.engine == "vllm":
        launch = [str(vllm), "-m", "vllm.entrypoints.openai.api_server", "--model", str(serving.model)]
        return [
            *launch,
            *("--served-model-name", "nano", "--host", "127.0.0.1", "--port", str(port), "--dtype", serving.dtype),
            *("--max-model-len", str(serving.context_tokens), "--max-num-seqs", str(cap)),
            *("--enable-prefix-caching", "--enable-prompt-tokens-details", *plan.flags),
        ]
    half = ("--mamba-ssm-dtype", "bfloat16") if serving.dtype == "bfloat16" else ()
    common = [
        *("--device", "cpu", "--dtype", serving.dtype, *half, "--attention-backend", "torch_native"),
        *("--max-running-requests", str(cap), "--context-length", str(serving.context_tokens)),
        *("--sleep-on-idle", "--enable-metrics", "--enable-cache-report", "--incremental-streaming-output"),
        *("--uvicorn-access-log-exclude-prefixes", "/v1/loads", "/metrics", "/server_info"),  # what is polled
    ]
    return sglang_command(serving.model, port, [*common, *plan.flags])


def server_environment(arm: Arm, serving: Serving) -> dict[str, str]:
    """Return what the arm's server needs in its environment."""
    if arm.engine == "vllm":
        return {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    return cpu_environment(serving.dtype)


def default_vllm_python() -> Path:
    """Return where `make vllm` puts the interpreter of vLLM's environment."""
    return Path(sys.prefix).parent / ".venv-vllm" / "bin" / "python"


def _organization(arm: Arm, budget: Budget, geometry: StateGeometry, serving: Serving, flags: Sequence[str]) -> _Sized:
    interval, fraction = _value(flags, "--checkpoint-interval"), _value(flags, "--d0-attention-fraction")
    layout = layout_for(
        arm.organization or arm.name, geometry, checkpoint_interval=int(interval) if interval is not None else None
    )
    least = admission_budget(layout, context_tokens=serving.context_tokens, attention_fraction=fraction)
    _require_room(arm, budget, least.budget.total_bytes)
    units = plan_units(layout, budget, attention_fraction=fraction)
    if layout.shared:
        counts = {f"pages of {layout.page_bytes * layout.planes:,} B": units.num_pages}
    else:
        attention = f"blocks of {layout.page_tokens} tokens"
        counts = {attention: units.num_attention_pages, "checkpoints": units.num_checkpoints}
    return _Sized(units.total_bytes, counts, ["--memory-budget", budget.text], layout.checkpoint_interval)


def _stock(arm: Arm, budget: Budget, geometry: StateGeometry, serving: Serving, policy: Policy) -> _Sized:
    token, state = kv_bytes(geometry), state_bytes(geometry)
    if arm.spare:
        tokens, slots = serving.context_tokens * policy.cap, arm.state_slots * policy.cap + SPARE_CACHED_STATES
    else:
        share = policy.mamba_share or arm.mamba_share or 0.0
        slots = math.floor(share * budget.total_bytes / state)
        tokens = (budget.total_bytes - slots * state) // token
        _require_room(arm, budget, _least_bytes(arm, share, geometry, serving))
    sizing = ["--max-total-tokens", str(tokens), "--max-mamba-cache-size", str(slots)]
    return _Sized(tokens * token + slots * state, {"tokens": tokens, "state slots": slots}, sizing)


def _least_bytes(arm: Arm, share: float, geometry: StateGeometry, serving: Serving) -> int:
    """Return the smallest budget whose split leaves room for one request's slots and for the longest request."""
    slots = arm.state_slots * state_bytes(geometry) / share
    return math.ceil(max(slots, serving.context_tokens * kv_bytes(geometry) / (1 - share)))


def _vllm(arm: Arm, budget: Budget, geometry: StateGeometry, serving: Serving, cap: int) -> _Sized:
    if geometry.head_dim not in VLLM_HEAD_DIMS:
        nearest = min(VLLM_HEAD_DIMS, key=lambda size: abs(size - geometry.head_dim))
        raise SettingError(
            f"arm {arm.name}: expected a model with attention heads of {', '.join(map(str, VLLM_HEAD_DIMS))} for "
            f"vLLM's CPU build, got {geometry.head_dim}; nearest: {nearest}, as falcon-h1-nano has"
        )
    block_tokens = math.ceil(geometry.composite_bytes / geometry.kv_token_bytes / VLLM_BLOCK_STEP_TOKENS)
    block_tokens *= VLLM_BLOCK_STEP_TOKENS
    attention, recurrent = len(geometry.attention_layers), len(geometry.recurrent_layers)
    block = block_tokens * geometry.kv_token_bytes * min(attention, recurrent)
    per_request = math.ceil(serving.context_tokens / block_tokens) + 3 * math.ceil(recurrent / attention)
    blocks = (per_request + 2) * cap if arm.spare else budget.total_bytes // block
    if not arm.spare:
        _require_room(arm, budget, per_request * block)
    sizing = [
        *("--block-size", str(block_tokens), "--num-gpu-blocks-override", str(blocks + 1)),
        *("--kv-cache-memory-bytes", str((blocks + 2) * block), "--max-num-batched-tokens", "8192"),
    ]
    return _Sized(blocks * block, {f"blocks of {block_tokens} tokens": blocks}, sizing, block_tokens)


def kv_bytes(geometry: StateGeometry) -> int:
    """Return the bytes of one token's attention KV over all layers."""
    return geometry.kv_token_bytes * len(geometry.attention_layers)


def state_bytes(geometry: StateGeometry) -> int:
    """Return the bytes of one recurrent state with its convolution state over all layers."""
    return geometry.composite_bytes * len(geometry.recurrent_layers)


def _require_room(arm: Arm, budget: Budget, least_bytes: int) -> None:
    if budget.total_bytes < least_bytes:
        raise SettingError(
            f"expected a budget that holds one request in arm {arm.name}, got {budget.text} "
            f"({budget.total_bytes} B); smallest: {least_bytes} B"
        )


def _value(flags: Sequence[str], name: str) -> str | None:
    return flags[flags.index(name) + 1] if name in flags else None
