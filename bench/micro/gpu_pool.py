"""One pool of state bytes on the GPU, seen as pages and as slots, cut into working sets.

A decode step updates a different plane in every layer, so consecutive launches find nothing of each other in the cache.
The benchmark does the same with one pool: launch i works on set i of pages. A slot is M consecutive pages, so the paged
and the contiguous kernel work on the same bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from bench.micro.shapes import Shape

MAX_POOL_BYTES = 16 * 2**30
FREE_SHARE = 0.4


class WorkingSet(NamedTuple):
    """Ids of one launch, int32: pages `[batch, M]` of the paged kernel, slots `[batch, 1]` of the contiguous one."""

    pages: torch.Tensor
    slots: torch.Tensor


class Pool(NamedTuple):
    """`pages`: [num_pages, heads_per_member, P, N] and `slots`: [num_slots, H, P, N], the same memory."""

    pages: torch.Tensor
    slots: torch.Tensor


def allocate_pool(shape: Shape, dtype: torch.dtype) -> Pool:
    """Fill up to 16 GiB, at most 0.4 of the free memory, with standard normal states."""
    free, _ = torch.cuda.mem_get_info()
    slot_elements = shape.H * shape.P * shape.N
    num_slots = int(min(MAX_POOL_BYTES, FREE_SHARE * free)) // (slot_elements * dtype.itemsize)
    slots = torch.empty((num_slots, shape.H, shape.P, shape.N), dtype=dtype, device="cuda")
    for part in slots.split(max(1, 2**30 // (slot_elements * dtype.itemsize))):
        part.normal_()
    return Pool(slots.view(-1, shape.heads_per_member(dtype), shape.P, shape.N), slots)


def working_sets(pool: Pool, batch: int, num_sets: int, order: str, seed: int = 0) -> list[WorkingSet]:
    """Cut disjoint working sets, as many of `num_sets` as fit.

    Args:
        order: "sequential" takes neighbouring pages (and slots), "random" takes them from anywhere in the pool.

    Raises:
        ValueError: the pool is too small for one set.
    """
    num_pages, num_slots = pool.pages.shape[0], pool.slots.shape[0]
    M = num_pages // num_slots
    fitting = min(num_sets, num_slots // batch)
    if fitting == 0:
        raise ValueError(f"expected a pool of at least {batch} slots, got {num_slots}")
    pages, slots = torch.arange(num_slots * M), torch.arange(num_slots)
    if order == "random":
        generator = torch.Generator().manual_seed(seed)
        pages = torch.randperm(num_slots * M, generator=generator)
        slots = torch.randperm(num_slots, generator=generator)
    pages = pages[: fitting * batch * M].to(torch.int32).view(fitting, batch, M).to(pool.pages.device)
    slots = slots[: fitting * batch].to(torch.int32).view(fitting, batch, 1).to(pool.pages.device)
    return [WorkingSet(pages[i].clone(), slots[i].clone()) for i in range(fitting)]
