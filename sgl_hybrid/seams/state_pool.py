"""D0's pool of composite checkpoints: SGLang's `MambaPool` over one buffer in which each slot's conv state lies behind
its SSM state.

SGLang sees ordinary `[layer, slot, ...]` tensors; they are strided views of the composites. Slot 0 is SGLang's padding
slot and lies outside the budget.
Source: paper sections 3.2 and 3.5; SGLang 0.5.23, `sglang/srt/mem_cache/memory_pool.py` and `allocator/mamba.py`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from sglang.srt.mem_cache.allocator.mamba import MambaSlotAllocator
from sglang.srt.mem_cache.memory_pool import MambaPool


class CompositePool(MambaPool):
    """`size` composites per recurrent layer.

    composites: [num_layers, size + 1, composite_bytes] uint8, contiguous; SSM bytes first, conv bytes behind them.
    mamba_cache.temporal: [num_layers, size + 1, heads, head_dim, d_state] in the SSM dtype, a view.
    mamba_cache.conv[0]: [num_layers, size + 1, channels, d_conv - 1] in the conv dtype, a view.
    """

    def __init__(
        self, *, size: int, cache_params: Any, mamba_layer_ids: list[int], device: str, **options: Any
    ) -> None:
        # The parent allocates its own tensors for `size` slots: let it build the padding slot alone, then put ours in.
        super().__init__(size=0, cache_params=cache_params, mamba_layer_ids=mamba_layer_ids, device=device, **options)
        if len(cache_params.shape.conv) != 1:
            raise ValueError(f"expected one conv tensor per layer, got {len(cache_params.shape.conv)}")
        self.size = size
        self.composites, temporal, conv = composite_views(
            num_layers=len(mamba_layer_ids),
            num_slots=size + 1,
            ssm_shape=tuple(cache_params.shape.temporal),
            ssm_dtype=cache_params.dtype.temporal,
            conv_shape=tuple(cache_params.shape.conv[0]),
            conv_dtype=cache_params.dtype.conv,
            device=device,
        )
        self.mamba_cache = self.State(conv=[conv], temporal=temporal)
        self.mem_usage = self.composites.nbytes / (1 << 30)


def composite_views(
    *,
    num_layers: int,
    num_slots: int,
    ssm_shape: tuple[int, ...],
    ssm_dtype: torch.dtype,
    conv_shape: tuple[int, ...],
    conv_dtype: torch.dtype,
    device: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocate zeroed composites and return them with their SSM and conv views.

    Returns: composites [num_layers, num_slots, composite_bytes] uint8; SSM view [num_layers, num_slots, *ssm_shape];
    conv view [num_layers, num_slots, *conv_shape]. Both views alias the composites.

    Raises:
        ValueError: the composite's bytes are no multiple of an element of both dtypes.
    """
    ssm_bytes = math.prod(ssm_shape) * ssm_dtype.itemsize
    conv_bytes = math.prod(conv_shape) * conv_dtype.itemsize
    composite_bytes = ssm_bytes + conv_bytes
    if composite_bytes % ssm_dtype.itemsize or ssm_bytes % conv_dtype.itemsize or composite_bytes % conv_dtype.itemsize:
        raise ValueError(
            f"expected SSM and conv bytes that divide into {ssm_dtype} and {conv_dtype}, "
            f"got {ssm_bytes} and {conv_bytes}"
        )
    composites = torch.zeros((num_layers, num_slots, composite_bytes), dtype=torch.uint8, device=device)
    flat = composites.view(-1)

    def view(dtype: torch.dtype, shape: tuple[int, ...], offset_bytes: int) -> torch.Tensor:
        pitch = composite_bytes // dtype.itemsize
        inner = torch.empty(shape, device="meta").stride()
        return flat.view(dtype).as_strided(
            (num_layers, num_slots, *shape), (num_slots * pitch, pitch, *inner), offset_bytes // dtype.itemsize
        )

    return composites, view(ssm_dtype, ssm_shape, 0), view(conv_dtype, conv_shape, ssm_bytes)


class StateSlotAllocator(MambaSlotAllocator):
    """SGLang's free list of state slots, refusing to free a slot that is not held."""

    def clear(self) -> None:
        super().clear()
        self._held = torch.zeros(self.size + 1, dtype=torch.bool, device=self.device)

    def _do_alloc(self, need_size: int) -> torch.Tensor | None:
        slots = super()._do_alloc(need_size)
        if slots is None:
            return None
        self._held[slots] = True
        # A copy: the caller keeps its ids when the free list is cut further.
        return slots.clone()

    def free(self, free_index: torch.Tensor) -> None:
        """Return slots to the free list.

        Raises:
            ValueError: a slot is not held, or named twice (on a CUDA device: an asynchronous assertion).
        """
        if free_index.numel() == 0:
            return
        slots = free_index.view(-1).to(torch.int64)
        counts = torch.bincount(slots.clamp(min=0), minlength=self.size + 1)
        valid = (slots >= 1).all() & self._held[slots.clamp(min=0)].all() & (counts.max() == 1)
        if self._held.is_cuda:
            torch._assert_async(valid)
        elif not bool(valid):
            raise ValueError(f"expected held state slots from 1 to {self.size}, each once, got {slots.tolist()}")
        self._held[slots] = False
        super().free(slots)
