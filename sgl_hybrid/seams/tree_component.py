"""The tree's component for states: nodes name composite checkpoints of the organization's store.

What SGLang's component does with slot ids stays; this one keeps the store's life cycle in step with the tree (published
when a node names it, referenced while a request's lock covers it), allocates nothing while a prefix is looked up, and
leaves a boundary unpublished rather than fail when no slot can be had. A request locks a cached state only until the
step that reads it has been launched (`release_state`).

Source: SGLang 0.5.23, `sglang/srt/mem_cache/unified_cache/components/mamba.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.unified_cache.components.base import (
    LRURefreshPhase,
    get_and_increase_time_counter,
)
from sglang.srt.mem_cache.unified_cache.components.mamba import MambaComponent

from sgl_hybrid.memory.transfer import upload
from sgl_hybrid.seams import process
from sgl_hybrid.seams.captures import Capture, Captures

RECENCY = "sgl_hybrid_recency"
"""Key of a node's component metadata: when its checkpoint was last used."""

CHECKPOINT = "sgl_hybrid_checkpoint"
"""Key of a node's component metadata: the id that the node's value holds, for which the host need not ask a device."""


class CheckpointComponent(MambaComponent):
    """`MambaComponent` over the checkpoint store (see the module)."""

    def __init__(self, cache: Any, params: Any) -> None:
        super().__init__(cache, params)
        self.store = process.served().memory.store
        self.audit = process.served().audit
        self.node_of: dict[int, Any] = {}
        self.captures = Captures(cache)
        self.publishing: Capture | None = None
        self.crossed: dict[str, Any] = {}
        """Requests by id that go on, in their next decode step, from a boundary that they have just published."""
        self.kept: dict[str, Any] = {}
        """Those whose next step has been prepared. One of them may hold the slot of its boundary itself, because the
        tree had the state from another request."""

    def recency(self, node: Any) -> float:
        """When the node's checkpoint was last used or published."""
        return float(node.component_data[self.component_type].metadata[RECENCY])

    def checkpoint_of(self, node: Any) -> int | None:
        """The checkpoint that a node names, None for a tombstone."""
        data = node.component_data[self.component_type]
        return None if data.value is None else int(data.metadata[CHECKPOINT])

    def depth_of(self, node: Any) -> int:
        """Tokens from the root to the end of a node."""
        depth = 0
        while node is not self.tree_core.root_node:
            depth, node = depth + len(node.key), node.parent
        return depth

    def refresh_lru(self, phase: LRURefreshPhase, node: Any, root_node: Any) -> None:
        super().refresh_lru(phase, node, root_node)
        data = node.component_data[self.component_type]
        if phase is LRURefreshPhase.MATCH_END and data.value is not None:
            data.metadata[RECENCY] = get_and_increase_time_counter()

    def _refresh_session_partition(self, node: Any) -> None:
        """As SGLang's, which moves a state between those in a session and the others as if it had just been used; here
        it goes to its place among them."""
        super()._refresh_session_partition(node)
        order = self.tree_core.lru_lists[self.component_type]
        if not order.in_list(node):
            return
        before = (order.mid if self.session_ref(node) > 0 else order.tail).lru_prev[order._pt]
        while before is not node and self.recency(before) < self.recency(node):
            before = before.lru_prev[order._pt]
        if before is not node:
            order.remove_node(node)
            order.insert_after(before, node)

    def finalize_match_result_in_cache(self, params: Any, result: Any) -> Any:
        """Note the checkpoint that the request will continue from. Its own slot is taken at admission."""
        if not params.cow_mamba:
            return result
        source = self.tree_core.get_component_device_value(result.best_match_node, self.component_type)
        if source is not None:
            params.req.kv.mamba_cow_src_index = source
            params.req.kv.mamba_needs_clear = False
        return result

    def commit_insert_component_data(
        self, node: Any, is_new_leaf: bool, params: Any, result: Any, cache_actions: list[Any]
    ) -> None:
        super().commit_insert_component_data(node, is_new_leaf, params, result, cache_actions)
        data = node.component_data[self.component_type]
        data.metadata[RECENCY] = get_and_increase_time_counter()
        if data.value is params.mamba_value:
            v = data.metadata[CHECKPOINT] = int(data.value) if self.publishing is None else self.publishing.slot
            self.store.publish(v)
            self.node_of[v] = node
            if self.audit is not None:
                self.audit.published(v, self.depth_of(node))
            if data.lock_ref > 0:
                self.store.acquire(v)
            self.cache.protection.published(node, v)

    def evict_component(self, node: Any, *args: Any, **kwargs: Any) -> tuple[int, int]:
        before = self.checkpoint_of(node)
        if before is not None and self.audit is not None:
            self.audit.left(before)
        freed = super().evict_component(node, *args, **kwargs)
        if before is not None and self.checkpoint_of(node) is None:
            del self.node_of[before]
            self.cache.protection.lost(before)
        return freed

    def acquire_component_lock(self, node: Any, result: Any, lock_host: bool = False) -> Any:
        result = super().acquire_component_lock(node, result, lock_host)
        data = node.component_data[self.component_type]
        if not lock_host and data.lock_ref == 1 and data.value is not None and node is not self.tree_core.root_node:
            self.store.acquire(data.metadata[CHECKPOINT])
        return result

    def release_component_lock(self, node: Any, params: Any, lock_host: bool = False) -> None:
        super().release_component_lock(node, params, lock_host)
        data = node.component_data[self.component_type]
        if not lock_host and data.lock_ref == 0 and data.value is not None and node is not self.tree_core.root_node:
            self.store.release(data.metadata[CHECKPOINT])

    def prepare_for_caching_req(
        self, req: Any, insert_params: Any, token_ids_len: int, is_finished: bool
    ) -> int | None:
        """As SGLang's, but an unfinished request gives its tracking slot away and takes no other in its place.

        While a capture is published, that is what the tree gets, and the request keeps its slots.
        """
        if self.publishing is not None:
            insert_params.mamba_value = self._on_device([self.publishing.slot])
            return self.publishing.position
        if is_finished or not self.cache.enable_mamba_extra_buffer:
            return super().prepare_for_caching_req(req, insert_params, token_ids_len, is_finished)
        boundary = req.kv.mamba_last_track_seqlen
        if boundary is None:
            return 0
        position = req.kv.mamba_last_track_idx
        insert_params.mamba_value = req.kv.mamba_ping_pong_track_buffer[position].unsqueeze(-1).clone()
        self.cache.req_to_token_pool.set_mamba_ping_pong_slot(req, position, -1)
        return boundary

    def cleanup_after_caching_req(
        self, req: Any, is_finished: bool, insert_result: Any = None, insert_params: Any = None
    ) -> None:
        """As SGLang's, but a request whose next step reads the slot that the tree did not want keeps it until then.

        A capture that the tree did not want is freed, and nothing else happens to the request; one that ends gives back
        the captures that it has not published.
        """
        unwanted = insert_result is None or insert_result.mamba_exist
        if self.publishing is not None:
            if unwanted:
                self.captures.give_back(self.publishing)
            return
        if is_finished:
            self.captures.free(req)
        elif unwanted and req.rid in self.crossed and insert_params.mamba_value is not None:
            self.cache.req_to_token_pool.set_mamba_ping_pong_slot(
                req, req.kv.mamba_last_track_idx, insert_params.mamba_value[0]
            )
            insert_params.mamba_value = None
        super().cleanup_after_caching_req(req, is_finished, insert_result, insert_params)

    def released(self, req: Any) -> None:
        """`req` has given its slots back; if it is resumed, it has others."""
        self.crossed.pop(req.rid, None)
        self.kept.pop(req.rid, None)

    def free_tracking_slot(self, req: Any) -> None:
        """Take the slot back that `req` took last for a boundary, if it has it still."""
        position = req.kv.mamba_next_track_idx
        if position is not None and not req.kv.mamba_ping_pong_empty[position]:
            pool = self.cache.req_to_token_pool
            pool.mamba_allocator.free(req.kv.mamba_ping_pong_track_buffer[position].unsqueeze(0))
            pool.set_mamba_ping_pong_slot(req, position, -1)

    def take_tracking_slot(self, req: Any) -> None:
        """Give `req` a slot for the boundary that its next decode step crosses.

        Nothing is evicted for it: a state of the request's own output is not worth a cached one. Without room, which is
        counted, or if the request publishes nothing, the boundary stays unpublished.
        """
        slot = None
        if not req.skip_radix_cache_insert:
            slot = self.slot_or_none(evict=False)
            self.store.counts.skipped += slot is None
        self.track_in(req, -1 if slot is None else slot)

    def track_in(self, req: Any, slot: int) -> int:
        """Let the next step of `req` track its boundary in `slot` (-1: nowhere); return the position of the slot.

        That is one that was empty, whether or not there is a slot: with overlap scheduling the other one may hold the
        boundary of the step before, whose result is still to come.
        """
        position = req.kv.mamba_next_track_idx = req.kv.mamba_ping_pong_empty.index(True)
        if slot >= 0:
            self.cache.req_to_token_pool.set_mamba_ping_pong_slot(req, position, self._on_device(slot))
        return position

    def release_state(self, req: Any) -> None:
        """Drop the state from what the request locks: it continues from its own slot, so the cached checkpoint may be
        evicted, while the attention of the prefix stays locked."""
        lock = req.lock
        if lock is None or self.component_type in lock.receipt.skipped_lock_components:
            return
        others = tuple(kind for kind in self.cache.tree_components if kind != self.component_type)
        self.cache.dec_lock_ref(lock.node, replace(lock.receipt, skipped_lock_components=others))
        lock.receipt.skipped_lock_components += (self.component_type,)

    def slot_or_none(self, *, evict: bool) -> int | None:
        """A state slot; with `evict`, after evicting for it if need be."""
        slots = self.cache.req_to_token_pool.mamba_allocator
        slot = slots.take()
        if slot is None and evict:
            self.cache.evict_for_alloc(EvictParams(num_tokens=0, mamba_num=1))
            slot = slots.take()
        return slot

    def _on_device(self, slots: int | list[int]) -> torch.Tensor:
        """Slots where the pool's others are: SGLang concatenates slots of several requests."""
        return upload(slots, torch.int64, self.cache.req_to_token_pool.mamba_allocator.device)
