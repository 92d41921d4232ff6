"""Where SGLang sizes and builds its pools: the plan's units instead of SGLang's own split.

Source: SGLang 0.5.23, `sglang/srt/mem_cache/kv_cache_configurator.py`, `memory_pool.py`, `managers/schedule_batch.py`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from sgl_hybrid.errors import SettingError
from sgl_hybrid.memory.state_memory import StateMemory
from sgl_hybrid.platforms import Platform
from sgl_hybrid.seams import exact, install, process
from sgl_hybrid.seams.flags import exit_with
from sgl_hybrid.seams.gpu_arguments import check_state_dtype
from sgl_hybrid.seams.hooks import Seam
from sgl_hybrid.seams.sizing import STATE_SLOTS_PER_REQUEST, plan_from_model


def resolve_pool_config(original: Callable[..., Any], self: Any, pre_model_load_memory: float) -> Any:
    """Around `KVCacheConfigurator._resolve_memory_pool_config`: sizes from the plan.

    With a budget, SGLang's memory profile is not asked; without one, the free memory that it would split is the budget:
    that of the rank with least, since all ranks must plan the same pages.
    """
    from sglang.srt.model_executor.pool_configurator import create_memory_pool_configurator
    from sglang.srt.runtime_context import get_context, get_parallel, get_schedule
    from sglang.srt.utils.common import get_available_gpu_memory

    settings = install.settings()
    available = None
    if settings.memory_budget is None:
        gc.collect()  # what loading left behind, as SGLang does before it measures
        ranks = get_parallel()
        free_gib = get_available_gpu_memory(
            self.device,
            self.gpu_id,
            distributed=ranks.launch_world_size > 1,
            cpu_group=ranks.world_group.cpu_group,
        )
        slack_gib = pre_model_load_memory * (1 - get_schedule().mem_fraction_static)
        available = max(0, int((free_gib - slack_gib) * (1 << 30)))
    try:
        plan = plan_from_model(settings, self, available_bytes=available)
    except SettingError as error:
        exit_with(error)
    get_context().override(
        "sgl_hybrid.plan", max_mamba_cache_size=plan.num_checkpoints, max_total_tokens=plan.num_attention_tokens
    )
    parameters = self.mambaish_config.mamba2_cache_params
    if str(self.device).startswith(Platform.CUDA):
        _check_state_dtypes(parameters.dtype)
    memory = StateMemory(
        plan.units,
        device=self.device,
        kv_dtype=self.kv_cache_dtype,
        ssm_dtype=parameters.dtype.temporal,
        conv_dtype=parameters.dtype.conv,
    )
    process.start(plan, memory)
    try:
        exact.check_chunked_prefill_size(get_schedule().chunked_prefill_size)
    except SettingError as error:
        exit_with(error)
    configurator = create_memory_pool_configurator(self)
    config = configurator.calculate_pool_sizes_from_max_tokens(plan.num_attention_tokens, get_schedule().page_size)
    config.max_running_requests = self.resolve_max_num_reqs(config.max_total_num_tokens)
    config = configurator.finalize_with_max_running_requests(config)
    config.mem_fraction_static = get_schedule().mem_fraction_static
    return config


def _check_state_dtypes(dtypes: Any) -> None:
    """End the process with one line if the decode kernels do not take the states as the model's configuration has them.
    dtypes: SGLang's `Mamba2StateDType`."""
    try:
        for option, dtype in (("--mamba-ssm-dtype", dtypes.temporal), ("SGLANG_MAMBA_CONV_DTYPE", dtypes.conv)):
            check_state_dtype(option, str(dtype).removeprefix("torch."))
    except SettingError as error:
        exit_with(error)


def state_slots_per_request(self: Any) -> int:
    """Replace `KVCacheConfigurator._calculate_mamba_ratio`: SGLang caps running requests by slots over this number."""
    return STATE_SLOTS_PER_REQUEST


def build_request_pool(original: Callable[..., Any], self: Any, **sizes: Any) -> Any:
    """Around `KVCacheConfigurator._build_hybrid_req_pool`: states behind tables, slots that are checkpoints."""
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

    from sgl_hybrid.seams.allocators import CheckpointSlots
    from sgl_hybrid.seams.state_pool import TableStatePool

    HybridReqToTokenPool.mamba_pool_cls = TableStatePool
    pool = original(self, **sizes)
    pool.mamba_allocator = CheckpointSlots(process.served().memory, pool.device)
    # A tracking slot is taken by the step that crosses a boundary (`track_for_extend`, `tracking`), not when a request
    # is bound to a row.
    pool.mamba_initial_tracking_slots = 0
    return pool


def full_pool_class(self: Any, **classes: Any) -> type:
    """Replace `KVCacheConfigurator._hybrid_full_attention_pool_class`: attention KV lies in the planes."""
    from sgl_hybrid.seams.state_pool import PlaneKVPool

    return PlaneKVPool


def build_token_allocator(self: Any, *, token_to_kv_pool: Any, **options: Any) -> Any:
    """Replace `KVCacheConfigurator._build_token_to_kv_pool_allocator`: token ids are blocks of the page allocator."""
    from sgl_hybrid.seams.allocators import BlockAllocator

    return BlockAllocator(
        process.served().memory, dtype=self.kv_cache_dtype, device=self.device, kvcache=token_to_kv_pool
    )


def checkpoint_grid(original: Callable[..., int], server_args: Any) -> int:
    """Around `overrides.mamba_cache_chunk_size`: the checkpoint interval is the grid on which states are cached."""
    from sgl_hybrid.memory.organization import ORGANIZATIONS

    settings = install.settings()
    return settings.checkpoint_interval or ORGANIZATIONS[settings.memory_org].checkpoint_interval


def track_for_extend(self: Any, req: Any) -> Any:
    """Replace `ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend`: track states at absolute boundaries.

    SGLang counts the grid from where the chunk starts, so after a chunk that ends off the grid it publishes at depths
    that no other request can meet. Here `radix.boundary` says which boundaries of the chunk are kept; the state of the
    deepest goes to the tracking slot, those before it to slots of their own (`captures`). The published depth equals
    the tokens whose state is held.

    The slots are taken here, after the batch has its pages, and given to the tree with the result; a boundary without
    room for it stays unpublished.

    The returned length names the boundary as SGLang's kernels expect it: the boundary itself when the chunk ends there,
    one token more otherwise (SGLang then reads the intermediate state).
    """
    from sglang.srt.managers.schedule_batch import _MambaRadixCacheV2TrackEntry

    component = self.tree_cache.checkpoints
    taken = component.captures.take(req)
    if not taken:
        position = req.kv.mamba_next_track_idx
        return _MambaRadixCacheV2TrackEntry(track_mask=False, track_position=position, track_seqlen=-1)
    boundary, slot = taken[-1]
    position = req.kv.mamba_last_track_idx = component.track_in(req, slot)
    req.kv.mamba_last_track_seqlen = boundary
    length = boundary if boundary == req.extend_end else boundary + 1
    return _MambaRadixCacheV2TrackEntry(track_mask=True, track_position=position, track_seqlen=length)


_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"

SEAMS: tuple[Seam, ...] = (
    Seam(
        f"{_CONFIGURATOR}._resolve_memory_pool_config",
        "around",
        resolve_pool_config,
        ("pre_model_load_memory",),
        "pool sizes come from the plan",
    ),
    Seam(
        f"{_CONFIGURATOR}._build_hybrid_req_pool",
        "around",
        build_request_pool,
        ("max_num_reqs", "extra_max_context_len"),
        "state slots are checkpoints",
    ),
    Seam(
        f"{_CONFIGURATOR}._calculate_mamba_ratio",
        "replace",
        state_slots_per_request,
        (),
        "running requests are capped by the slots they hold",
    ),
    Seam(
        f"{_CONFIGURATOR}._hybrid_full_attention_pool_class",
        "replace",
        full_pool_class,
        ("mha_pool_class", "mla_pool_class", "dsa_pool_class"),
        "attention KV lies in the planes of the organization",
    ),
    Seam(
        f"{_CONFIGURATOR}._build_token_to_kv_pool_allocator",
        "replace",
        build_token_allocator,
        ("sizes", "token_to_kv_pool"),
        "token ids are blocks of the organization's pages",
    ),
    Seam(
        "sglang.srt.arg_groups.overrides.mamba_cache_chunk_size",
        "around",
        checkpoint_grid,
        ("server_args",),
        "the grid is the checkpoint interval",
    ),
    Seam(
        "sglang.srt.managers.schedule_batch.ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend",
        "replace",
        track_for_extend,
        ("req",),
        "states are tracked at absolute boundaries",
    ),
)
