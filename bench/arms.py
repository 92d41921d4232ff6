"""Arms: what is compared, as data. How an arm's server is started is in `bench.arm_plan`.

The arms of this project have an organization. The others are rivals: SGLang without `--memory-org` in several settings,
and vLLM. `ceiling` and `vllm-ceiling` are the same engines with memory to spare; no organization can pass its own
engine's ceiling, and every arm is given as a share of it too.

Source: SGLang 0.5.23, `arg_groups/overrides.py` (what `auto` resolves to), `mem_cache/kv_cache_configurator.py`
(`_calculate_mamba_ratio`: state slots that SGLang reserves per running request; `mamba_full_memory_ratio` 0.9).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from bench.registry import registered

SGLANG_MAMBA_SHARE = 0.9 / 1.9
"""Share of the state memory that SGLang gives to recurrent state by default."""
TUNED_SHARES = (SGLANG_MAMBA_SHARE, 0.6, 0.7, 0.8, 0.9)
"""Shares that the calibration of `stock-tuned` tries at each budget."""


class Arm(msgspec.Struct, frozen=True, kw_only=True):
    """One side of a comparison.

    flags: server flags beyond those every arm of the engine gets. mamba_share: share of the bytes for recurrent state,
    where the engine wants a split (`tuned` looks for the best one). state_slots: recurrent slots that the engine takes
    per running request. spare: budget and split are ignored, memory is ample. tree_core: the prefix tree's code.
    """

    name: str
    summary: str
    engine: Literal["sglang", "vllm"] = "sglang"
    organization: str | None = None
    flags: tuple[str, ...] = ()
    mamba_share: float | None = None
    tuned: bool = False
    state_slots: int = 2
    spare: bool = False
    tree_core: str = "Python"
    strategy: str | None = None


def _ours(name: str, summary: str, organization: str | None = None, *flags: str) -> Arm:
    organization = organization or name
    return Arm(name=name, summary=summary, organization=organization, flags=("--memory-org", organization, *flags))


def _stock(name: str, summary: str, strategy: str | None, state_slots: int, *flags: str, tuned: bool = False) -> Arm:
    chosen = () if strategy is None else ("--mamba-radix-cache-strategy", strategy)
    return Arm(
        name=name,
        summary=summary,
        flags=(*chosen, *flags),
        mamba_share=SGLANG_MAMBA_SHARE,
        tuned=tuned,
        state_slots=state_slots,
        tree_core="Rust",
        strategy=strategy or "extra_buffer",
    )


_ALL = (
    _ours("s0", "one shared pool of coarse pages that hold a whole composite"),
    _ours("s1", "one shared pool; recurrent state in member pages, convolution state in a page of its own"),
    _ours("s2", "S1 with convolution states packed in slabs"),
    _ours("d0", "two static pools, attention in 16-token pages, states every 1,792 tokens"),
    _ours(
        "d0-m512", "D0 with boundaries every 512 tokens, as the shared pools have", "d0", "--checkpoint-interval", "512"
    ),
    _ours(
        "s2-retained",
        "S2 that keeps checkpoints wanted by two requests while their producer runs",
        "s2",
        *("--checkpoint-lifetime", "retained", "--retention-k", "2"),
    ),
    _ours(
        "s2-transient",
        "S2 that frees a checkpoint when its producer passes the next",
        "s2",
        "--checkpoint-lifetime",
        "transient",
    ),
    _ours("s2-value", "S2 that evicts what is cheapest to compute again", "s2", "--checkpoint-eviction", "value"),
    *(
        _ours(
            f"{organization}-auto",
            f"{organization.upper()} with the automatic admission headroom, as a user gets it",
            organization,
            *("--admission-headroom", "auto"),
        )
        for organization in ("s0", "s1", "s2", "d0")
    ),
    _ours("s2-inexact", "S2 whose cached prefixes may differ in the last bits", "s2", "--no-exact-continuation"),
    _stock("stock", "SGLang as it comes: `auto` resolves to extra_buffer while the overlap schedule is on", None, 5),
    _stock("stock-extra", "SGLang with extra_buffer asked for by name", "extra_buffer", 5),
    _stock("stock-lazy", "SGLang with extra_buffer_lazy", "extra_buffer_lazy", 4),
    _stock(
        "stock-tuned",
        "SGLang with extra_buffer_lazy and the best of a swept share of recurrent memory",
        "extra_buffer_lazy",
        4,
        tuned=True,
    ),
    _stock("stock-unified", "SGLang with its own unified memory pool", None, 5, "--enable-unified-memory"),
    Arm(
        name="ceiling",
        summary="SGLang as it comes, with memory to spare: what no organization can pass",
        spare=True,
        state_slots=5,
        tree_core="Rust",
        strategy="extra_buffer",
    ),
    Arm(name="vllm", summary="vLLM's CPU build with prefix caching", engine="vllm", tree_core="hash blocks"),
    Arm(
        name="vllm-ceiling",
        summary="vLLM's CPU build with memory to spare",
        engine="vllm",
        spare=True,
        tree_core="hash blocks",
    ),
)

ARMS: dict[str, Arm] = {arm.name: arm for arm in _ALL}


def arm_of(name: str) -> Arm:
    """Return the arm called `name`. Raises: SettingError."""
    return registered(ARMS, name, "an arm")


def ceiling_of(name: str) -> str:
    """Return the name of the arm that bounds this one: its own engine with memory to spare."""
    return "vllm-ceiling" if arm_of(name).engine == "vllm" else "ceiling"
