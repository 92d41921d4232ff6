"""The pools, the allocators and the prefix tree of a server, without the server: for the tree's timings and its tests.

Storage is bfloat16 on the CPU, and SGLang's tree runs in its Python core. Source: SGLang 0.5.23,
`mem_cache/kv_cache_configurator.py` and `registry.py` build the same parts in a server.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from sglang.srt.mem_cache.registry import TreeCacheBuildContext, create_unified_radix_cache
from sglang.srt.runtime_context import get_context, get_exec, get_server_args

from sgl_hybrid.memory import StateGeometry
from sgl_hybrid.memory.state_memory import StateMemory
from sgl_hybrid.seams import factory, pools, process
from sgl_hybrid.seams.allocators import BlockAllocator
from sgl_hybrid.seams.sizing import MemoryPlan


class BareTree(NamedTuple):
    """A tree, the allocators that it gives back to, and SGLang's pool of request rows."""

    tree: Any
    tokens: Any
    slots: Any
    requests: HybridReqToTokenPool


@contextmanager
def published_arguments(page_tokens: int) -> Iterator[None]:
    """Publish SGLang's arguments as a server does."""
    arguments = {"page_size": page_tokens, "attention_backend": "torch_native"}
    with get_context().override_server_args(mamba_radix_cache_strategy="extra_buffer_lazy", **arguments):
        yield


def build(plan: MemoryPlan, *, num_requests: int, max_tokens: int, sessions: bool = False) -> BareTree:
    """Build the parts of an organization and serve them in this process. Needs `published_arguments`.

    sessions: `--enable-session-radix-cache`.
    """
    _set_grid(plan.layout.checkpoint_interval)
    memory = StateMemory(
        plan.units, device="cpu", kv_dtype=torch.bfloat16, ssm_dtype=torch.bfloat16, conv_dtype=torch.bfloat16
    )
    process.start(plan, memory)
    sizes = {"num_requests": num_requests, "max_tokens": max_tokens, "num_states": memory.store.num_virtual}
    requests = pools.build_request_pool(_request_pool, plan.geometry, **sizes)
    tokens = BlockAllocator(memory, dtype=torch.bfloat16, device="cpu", kvcache=None)
    context = _context(requests, tokens, plan.layout.page_tokens, enable_session_radix_cache=sessions)
    return BareTree(factory.build(context), tokens, requests.mamba_allocator, requests)


def build_stock(
    geometry: StateGeometry, *, num_tokens: int, num_states: int, page_tokens: int, grid: int, max_tokens: int
) -> BareTree:
    """Build the same parts of SGLang's own, for one running request. Needs `published_arguments`."""
    _set_grid(grid)
    requests = _request_pool(geometry, num_requests=1, max_tokens=max_tokens, num_states=num_states)
    tokens = PagedTokenToKVPoolAllocator(num_tokens, page_tokens, torch.bfloat16, "cpu", None, need_sort=False)
    tree = create_unified_radix_cache(_context(requests, tokens, page_tokens, tree_core_backend="python"))
    return BareTree(tree, tokens, requests.mamba_allocator, requests)


def _set_grid(tokens: int) -> None:
    msgspec.Struct.__setattr__(get_server_args(), "_mamba_cache_chunk_size", tokens)
    get_exec().mamba._set("enable_mamba_extra_buffer_lazy", True)


def _request_pool(
    geometry: StateGeometry, *, num_requests: int, max_tokens: int, num_states: int
) -> HybridReqToTokenPool:
    shape = Mamba2StateShape(
        conv=[(geometry.conv_channels, geometry.d_conv - 1)],
        temporal=(geometry.ssm_heads, geometry.ssm_head_dim, geometry.d_state),
        intermediate_size=geometry.ssm_heads * geometry.ssm_head_dim,
        conv_dim=geometry.conv_channels,
        ssm_state_size=geometry.d_state,
        num_heads=geometry.ssm_heads,
        head_dim=geometry.ssm_head_dim,
        state_size=geometry.d_state,
        conv_kernel=geometry.d_conv,
    )
    layers = list(geometry.recurrent_layers)
    dtype = Mamba2StateDType(conv=torch.bfloat16, temporal=torch.bfloat16)
    return HybridReqToTokenPool(
        size=num_requests,
        mamba_size=num_states,
        mamba_spec_state_size=0,
        max_context_len=max_tokens,
        device="cpu",
        enable_memory_saver=False,
        cache_params=Mamba2CacheParams(shape=shape, layers=layers, dtype=dtype),
        mamba_layer_ids=layers,
        enable_mamba_extra_buffer=True,
        enable_mamba_extra_buffer_lazy=True,
        enable_overlap_schedule=True,
    )


def _context(requests: Any, tokens: Any, page_tokens: int, **options: Any) -> TreeCacheBuildContext:
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=requests,
        token_to_kv_pool_allocator=tokens,
        page_size=page_tokens,
        enable_mamba_extra_buffer=True,
        enable_mamba_extra_buffer_lazy=True,
        **options,
    )
    nothing: dict[str, Any] = dict.fromkeys(("server_args", "tp_worker", "model_config", "tp_group"))
    return TreeCacheBuildContext(
        params=params,
        is_hybrid_swa=False,
        is_hybrid_ssm=True,
        enable_hierarchical_cache=False,
        disable_radix_cache=False,
        tp_size=1,
        tp_rank=0,
        **nothing,
    )
