"""States of the boundaries of one prefill: slots taken before the step, written by it, then named by the tree.

SGLang tracks one state of a request and step, in the request's tracking slot. That is the deepest boundary for which
there is room; those before it have slots here. `radix.boundary` says which boundaries a prefill keeps.

Source: SGLang 0.5.23, `sglang/srt/managers/schedule_batch.py`, `mem_cache/unified_radix_cache.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from radix.boundary import Boundary, Worth, boundaries_to_keep, by_worth
from sgl_hybrid.seams import process


class Capture(NamedTuple):
    """The slot (an active checkpoint) for the state at a position."""

    position: int
    slot: int


def boundaries_of(req: Any) -> list[Boundary]:
    """The boundaries that the chunk of a request keeps, by position."""
    served = process.served()
    return boundaries_to_keep(
        served.plan.settings.placement,
        grid_tokens=served.plan.layout.checkpoint_interval,
        start=req.prefix_len,
        end=req.extend_end,
        prompt_tokens=len(req.full_untruncated_fill_ids),
        branch=req.mamba_branching_seqlen,
    )


class Captures:
    """The captures of requests whose step is prepared or runs, by request id."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.store = process.served().memory.store
        self.of_request: dict[str, list[Capture]] = {}

    def take(self, req: Any) -> list[Capture]:
        """Take a slot for each boundary that the next chunk of a request is to keep, those of most worth first; return
        the captures by position. The caller tracks the deepest; the others are kept here, and the model is told.

        A branch point and the last boundary may take the place of what is cached. One between them takes free room, or
        the place of the checkpoint that is due next unless the tree branches there: a long prompt must not push out
        what others share. Without room a boundary stays unpublished, which is counted.
        """
        self.free(req)
        if req.skip_radix_cache_insert:
            return []
        wanted = by_worth(boundaries_of(req))
        taken = sorted(Capture(found.position, slot) for found in wanted if (slot := self._slot(found)) is not None)
        if len(taken) > 1:
            self.of_request[req.rid] = taken[:-1]
            self.cache.req_to_token_pool.mamba_pool.captures[req.rid] = taken[:-1]
        return taken

    def give(self, req: Any) -> list[Capture]:
        """Return the captures of a request, by position, for the caller to publish or free."""
        return self.of_request.pop(req.rid, [])

    def free(self, req: Any) -> None:
        """Give back the slots of a request that publishes nothing."""
        for capture in self.give(req):
            self.give_back(capture)

    def give_back(self, capture: Capture) -> None:
        """Give back the slot of a capture that no node names."""
        self.cache.req_to_token_pool.mamba_allocator.free(torch.tensor([capture.slot]))

    def clear(self) -> None:
        """Forget all, when every slot has been given back."""
        self.of_request.clear()

    def _slot(self, boundary: Boundary) -> int | None:
        between = boundary.worth is Worth.BETWEEN
        if between and not self.store.capacity():
            self.cache.evict_between()
        slot = self.cache.checkpoints.slot_or_none(evict=not between)
        self.store.counts.skipped += slot is None
        return slot
