"""SGLang's pools as views of the organization's planes: attention rows and, behind tables, recurrent and conv state.

`PlaneKVPool` gives SGLang's attention backends ordinary `[rows, heads, head_dim]` tensors; they are strided, K and V of
a token beside each other. `TableStatePool` stands where SGLang keeps its tensors of states; the states are reached
through the member and line tables instead, by `mamba_backend`.

A slot whose state is still that of another slot has that slot as its *source*: a request that adopts a cached
checkpoint reads it in its first step and writes its own pages; a request that has just published a boundary goes on
from there. So neither copies a state.

Source: SGLang 0.5.23, `sglang/srt/mem_cache/memory_pool.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MambaPool, MHATokenToKVPool

from sgl_hybrid.memory.state_memory import StateMemory
from sgl_hybrid.seams import process


class PlaneKVPool(MHATokenToKVPool):
    """Attention KV in the planes of the organization. Row ids are those of `allocators.BlockAllocator`."""

    def _create_buffers(self) -> None:
        memory = process.served().memory
        if self.is_quantized_kv_cache or self.post_capture_active:
            raise ValueError("expected unquantized KV of a fixed size with --memory-org, got another KV method")
        layers = memory.layout.geometry.attention_layers
        self.k_scale_buffer = self.v_scale_buffer = None
        self.native_k_scale_buffer = self.native_v_scale_buffer = None
        self.dq_k_buffer = self.dq_v_buffer = None
        self.k_buffer = [memory.pool.key_rows(layer) for layer in layers]
        self.v_buffer = [memory.pool.value_rows(layer) for layer in layers]
        self._kv_buffer_descs = []
        self._init_data_ptrs_and_strides()

    def _store_kv_layer(self, layer_idx: int, loc: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor) -> None:
        self.k_buffer[layer_idx][loc] = cache_k
        self.v_buffer[layer_idx][loc] = cache_v


class TableStatePool(MambaPool):
    """States behind tables. Of SGLang's pool it keeps the interface that the scheduler and the model runner use.

    source: [num_virtual + 1] int64, the slot that holds the state of each slot (itself, unless it is another's). Only
    `set_source` writes it; source_writes counts that, so that a plan made from the table is known to hold still.
    captures: states that the next step writes beside SGLang's tracked one: (position, slot) by request id.
    """

    def __init__(
        self, *, size: int, cache_params: Any, mamba_layer_ids: list[int], device: str, **options: Any
    ) -> None:
        self.memory: StateMemory = process.served().memory
        # The parent would allocate `size` slots of its own; it gets the padding slot alone.
        super().__init__(size=0, cache_params=cache_params, mamba_layer_ids=mamba_layer_ids, device=device, **options)
        if len(cache_params.shape.conv) != 1:
            raise ValueError(f"expected one conv tensor per layer, got {len(cache_params.shape.conv)}")
        self.mem_usage = self.memory.pool.state_bytes / (1 << 30)
        self.source = torch.arange(self.memory.store.num_virtual + 1, dtype=torch.int64, device=device)
        self.source_writes = 0
        self.captures: dict[str, list[tuple[int, int]]] = {}

    def set_source(self, slots: torch.Tensor, sources: torch.Tensor) -> None:
        """Let each of `slots` have the state of the slot in `sources`; [num] integer, both, on any device."""
        device = self.source.device
        self.source[slots.to(device, torch.int64)] = sources.to(device, torch.int64)
        self.source_writes += 1

    @property
    def size(self) -> int:
        """Slots in use and slots that could be handed out now, so that the parts of SGLang's check sum to it."""
        store = self.memory.store
        return store.capacity() + store.num_active + store.num_cached + store.num_referenced

    @size.setter
    def size(self, value: int) -> None:
        """Ignored: the parent writes here, but the size follows from the pages."""

    def clear_slots(self, indices: torch.Tensor) -> None:
        """Forget where these slots continue from. A request without a prefix starts from zeros, not from its slot, so
        its bytes need no clearing."""
        self.set_source(indices, indices)

    def copy_from(self, src_indices: torch.Tensor, dst_indices: torch.Tensor) -> None:
        """Let slots continue from others without a copy. The sources stay locked until the next step has read them."""
        self.set_source(dst_indices, src_indices)
