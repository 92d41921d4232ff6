"""SGLang's own unified memory pool (`--enable-unified-memory`) on the CPU reference platform, as a rival.

SGLang 0.5.23 refuses it there in four places, none of which concerns the pool itself: a list of attention backends, a
list of platforms, two Triton kernels that hand out token ids, and the torch-native backend, which takes the virtual ids
of `req_to_token` for rows of the cache. Here the lists are passed, the kernels are SGLang's own torch versions of them,
and the backend gets the rows of each batch translated once a step. A CUDA stream to wait for does not exist: work on a
CPU has ended when the call returns. Nothing here is active unless a server asks for the unified pool.

Source: SGLang 0.5.23, `arg_groups/kv_cache_hook.py`, `mem_cache/kv_cache_configurator.py`,
`mem_cache/allocator/unified_sub_pool.py`, `mem_cache/allocator/paged.py`, `layers/attention/torch_native_backend.py`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch

from sgl_hybrid.seams.hooks import Seam

_HOOK = "sglang.srt.arg_groups.kv_cache_hook"
_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator"
_BACKEND = "sglang.srt.layers.attention.torch_native_backend"
ENVIRONMENT = "SGLANG_HYBRID_UNIFIED_CPU"
"""Set by the process that parses the flags when the unified pool is asked for; the scheduler reads it."""


def pass_backend_list(original: Callable[[Any], Any], server_args: Any) -> Any:
    """Around the check of attention backends: name one from its list for torch-native, and tell the scheduler."""
    from sglang.srt.arg_groups import kv_cache_hook

    if not kv_cache_hook.resolving_view(server_args).enable_unified_memory:
        os.environ.pop(ENVIRONMENT, None)
        return original(server_args)
    os.environ[ENVIRONMENT] = "1"
    backends_of = kv_cache_hook.attention_backends_of
    kv_cache_hook.attention_backends_of = lambda view: ("triton",)
    try:
        return original(server_args)
    finally:
        kv_cache_hook.attention_backends_of = backends_of


def pass_platform_list(original: Callable[..., None], platform: Any, *, subsystem: str) -> None:
    """Around the refusal of out-of-tree platforms: let the unified pool pass, and nothing else."""
    if "unified memory pool" not in subsystem:
        original(platform, subsystem=subsystem)


class _TorchKernel:
    """A stand-in for a Triton kernel: `kernel[grid](*arguments)` calls a function with the arguments."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._function


def _alloc_extend(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    out_indices: torch.Tensor,
    batch_bound: int,
    page_size: int,
) -> None:
    from sglang.srt.mem_cache.allocator.paged import alloc_extend_naive

    alloc_extend_naive(prefix_lens, seq_lens, last_loc, free_pages, out_indices, page_size, out_indices.device)


def _alloc_decode(
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    out_indices: torch.Tensor,
    batch_bound: int,
    page_size: int,
) -> None:
    from sglang.srt.mem_cache.allocator.paged import alloc_decode_naive

    new_pages = int(((seq_lens - 1) % page_size == 0).sum())
    alloc_decode_naive(seq_lens, last_loc, free_pages, out_indices, page_size, new_pages)


class _NoStream:
    """What there is to wait for on a CPU: nothing."""

    def wait_stream(self, stream: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def synchronize(self) -> None: ...


def remember_allocator(result: None, self: Any, model_runner: Any) -> None:
    """After the torch-native backend is built: keep the allocator that translates its ids."""
    self.unified_allocator = model_runner.token_to_kv_pool_allocator


def translate_rows(result: None, self: Any, forward_batch: Any) -> None:
    """After a step's metadata is made: the physical rows of its requests, [batch, longest] int64."""
    longest = int(forward_batch.seq_lens.max()) if forward_batch.seq_lens.numel() else 0
    rows = self.req_to_token_pool.req_to_token[forward_batch.req_pool_indices, :longest]
    physical = self.unified_allocator.translate_kv_loc(rows.reshape(-1).to(torch.int64))
    self.physical_rows = physical.view(rows.shape)


def read_physical_rows(
    original: Callable[..., torch.Tensor],
    self: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """Around attention: give it the translated rows of the batch instead of the virtual ones of all requests."""
    order = torch.arange(len(req_pool_indices), device=req_pool_indices.device)
    return original(self, query, output, k_cache, v_cache, self.physical_rows, order, *args, **kwargs)


def install_pool() -> None:
    """Make the unified pool run in this process. Called in processes whose launcher was asked for it.

    Raises:
        SettingError: a seam does not fit.
    """
    from sglang.srt.layers.attention import torch_native_backend
    from sglang.srt.mem_cache.allocator import unified_sub_pool

    from sgl_hybrid.seams import hooks

    hooks.apply(POOL_SEAMS)
    unified_sub_pool.alloc_extend_kernel = _TorchKernel(_alloc_extend)
    unified_sub_pool.alloc_decode_kernel = _TorchKernel(_alloc_decode)
    # The step's write ids are physical already; this backend does not say so.
    torch_native_backend.KVWriteLoc = functools.partial(torch_native_backend.KVWriteLoc, physical=True)
    torch.cuda.current_stream = lambda device=None: _NoStream()


SEAMS: tuple[Seam, ...] = (
    Seam(
        f"{_HOOK}.handle_page_major_kv_layout",
        "around",
        pass_backend_list,
        ("server_args",),
        "CPU platform: SGLang's own unified pool may be a rival",
    ),
)
POOL_SEAMS: tuple[Seam, ...] = (
    Seam(
        f"{_CONFIGURATOR}.reject_out_of_tree_path",
        "around",
        pass_platform_list,
        ("platform", "subsystem"),
        "CPU platform: SGLang's own unified pool is built",
    ),
    Seam(
        f"{_BACKEND}.TorchNativeAttnBackend.__init__",
        "after",
        remember_allocator,
        ("model_runner",),
        "CPU platform: the unified pool's allocator translates ids",
    ),
    Seam(
        f"{_BACKEND}.TorchNativeAttnBackend.init_forward_metadata",
        "after",
        translate_rows,
        ("forward_batch",),
        "CPU platform: rows of the unified pool are translated once a step",
    ),
    *(
        Seam(
            f"{_BACKEND}.TorchNativeAttnBackend.{name}",
            "around",
            read_physical_rows,
            ("query", "output", "k_cache", "v_cache", "req_to_token", "req_pool_indices"),
            "CPU platform: attention reads the unified pool through translated rows",
        )
        for name in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode")
    ),
)
