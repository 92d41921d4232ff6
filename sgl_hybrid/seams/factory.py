"""The prefix cache of the memory organizations: SGLang's unified tree, evicting in one recency order over all kinds.

`radix.eviction` decides which cached unit goes; this class finds the least recent unit of each kind, carries a decision
out and asks again until the need is met. In a dual organization a need is met by its own kind only.

Source: SGLang 0.5.23, `sglang/srt/mem_cache/unified_radix_cache.py`, `registry.py`.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterable, Set
from functools import cached_property
from typing import Any

from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, EvictResult
from sglang.srt.mem_cache.registry import create_unified_radix_cache, register_radix_cache_backend
from sglang.srt.mem_cache.unified_cache.components.base import BASE_COMPONENT_TYPE, ComponentType, EvictLayer
from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import BaseEvictionResult
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.utils.rank_consensus_checker import rank_consensus

from radix.eviction import Candidate, Kind, next_victim, slab_recency
from sgl_hybrid.seams import process
from sgl_hybrid.seams.flags import RADIX_BACKEND
from sgl_hybrid.seams.protection import Protection
from sgl_hybrid.seams.tree_component import CheckpointComponent
from sgl_hybrid.seams.value import attention_in_session, valued_candidates


class LeafQueue(set):
    """The tree's set of evictable leaves that also knows the least recent one, those of open sessions last.

    The queue is lazy: a node is queued when it is added and its place is corrected when it comes to the front. A leaf's
    place only moves back, so finding the least recent costs a logarithm amortized, whatever the number of leaves. The
    end of a session moves its leaves forward: then the queue is made anew.
    """

    def __init__(self, nodes: Iterable[Any] = ()) -> None:
        super().__init__(nodes)
        self._heap = [(*_due(node), node.id, node) for node in self]
        heapq.heapify(self._heap)

    def add(self, node: Any) -> None:
        if node in self:
            return
        super().add(node)
        if len(self._heap) > 64 + 4 * len(self):
            self._heap = [(*_due(kept), kept.id, kept) for kept in self]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (*_due(node), node.id, node))

    def least_recent(self) -> Any | None:
        """The least recent leaf, which stays in the set; None if there is none."""
        while self._heap:
            *due, _, node = self._heap[0]
            if node not in self:
                heapq.heappop(self._heap)
            elif _due(node) != tuple(due):
                heapq.heapreplace(self._heap, (*_due(node), node.id, node))
            else:
                return node
        return None


def _due(leaf: Any) -> tuple[bool, float]:
    """Place of a leaf in the order of eviction."""
    return attention_in_session(leaf), leaf.last_access_time


class OrganizationRadixCache(UnifiedRadixCache):
    """`UnifiedRadixCache` for one organization (see the module)."""

    @cached_property
    def protection(self) -> Protection:
        """What the policies protect in this tree."""
        return Protection(self)

    def reset(self) -> None:
        """Drop the whole tree; the nodes of its checkpoints with it."""
        super().reset()
        self.tree_core.evictable_device_leaves = LeafQueue(self.tree_core.evictable_device_leaves)
        self.protection.reset()
        if self.checkpoints.audit is not None:
            self.checkpoints.audit.clear()
        self.checkpoints.node_of.clear()
        self.checkpoints.captures.clear()
        self.checkpoints.crossed.clear()
        self.checkpoints.kept.clear()

    def checkpoint_into_tree(self, req: Any, *, up_to: int, **options: Any) -> None:
        """Publish as SGLang does, but first the boundaries before the tracked one, by depth; then do what the policies
        decide on it. The request keeps no cached state locked, unless its next step reads it."""
        component = self.checkpoints
        with self.protection.publishing(req):
            for capture in component.captures.give(req):
                component.publishing = capture
                try:
                    super().checkpoint_into_tree(req, up_to=capture.position, **options)
                finally:
                    component.publishing = None
            super().checkpoint_into_tree(req, up_to=up_to, **options)
            if req.finished():
                self._refer_from_session(req)
            elif req.rid not in component.crossed:
                component.release_state(req)

    def _refer_from_session(self, req: Any) -> None:
        """The session of `req`, if it has one, refers to all of it that is cached. SGLang does that only where the last
        step published something; here that is rare."""
        if (
            self.enable_session_radix_cache
            and req.lock is not None
            and not isinstance(req.finished_reason, FINISH_ABORT)
        ):
            self.session_refs.register_session_ref(req, leaf=req.lock.node)

    def release_radix_session(self, session_id: str) -> int:
        """As SGLang's; what only this session referred to is evicted in its turn again."""
        found = super().release_radix_session(session_id)
        self.tree_core.evictable_device_leaves = LeafQueue(self.tree_core.evictable_device_leaves)
        return found

    def evict_between(self) -> bool:
        """Evict the checkpoint that is due next, unless the tree branches there; tell whether."""
        due = next_victim(self._candidates(frozenset({Kind.CHECKPOINT})))
        node = None if due is None else self.tree_core.node_by_id(due.key)
        if node is None or len(node.children) > 1:
            return False
        tracker = dict.fromkeys(self.tree_components, 0)
        process.served().activity.evictions[Kind.CHECKPOINT.value] += 1
        self.evict_checkpoint(node, tracker)
        self._count(_result(tracker))
        return True

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        """As SGLang's; the request produces nothing more."""
        super().on_release(req, checkpointed=checkpointed)
        self.checkpoints.released(req)
        self.protection.ended(req)

    def release_aborted_request(self, request: Any) -> None:
        """As SGLang's; a request that was given up while it waited does not resume."""
        super().release_aborted_request(request)
        self.protection.forget(request.rid)

    @rank_consensus(same_params=["params"], same_results=True)
    def evict_for_alloc(self, params: EvictParams, **options: Any) -> EvictResult:
        """Evict until the shortfalls of `params` can be served, or nothing is left to evict.

        num_tokens, mamba_num: tokens and state slots that are missing beyond those available now.
        """
        served = process.served()
        if self.disable or options:
            return self._count(super().evict_for_alloc(params, **options))
        start_time = time.perf_counter()
        pages, store = served.memory.pages, served.memory.store
        tokens = self.token_to_kv_pool_allocator.page_size
        wanted_pages = -(-params.num_tokens // tokens) + pages.num_free if params.num_tokens > 0 else 0
        wanted_slots = params.mamba_num + store.capacity() if params.mamba_num > 0 else 0
        tracker = dict.fromkeys(self.tree_components, 0)
        while pages.num_free < wanted_pages or store.capacity() < wanted_slots:
            if self._migrate_slab():
                continue
            kinds = frozenset(Kind)
            if not served.memory.shared:
                kinds = frozenset({Kind.ATTENTION if pages.num_free < wanted_pages else Kind.CHECKPOINT})
            victim = next_victim(self._candidates(kinds))
            if victim is None:
                break
            self._carry_out(victim, tracker)
        self.update_eviction_metrics(tracker[BASE_COMPONENT_TYPE], start_time)
        return self._count(_result(tracker))

    @property
    def checkpoints(self) -> CheckpointComponent:
        """The component of states."""
        return self.components[ComponentType.MAMBA]

    def _count(self, result: EvictResult) -> EvictResult:
        served = process.served()
        served.activity.evicted.attention_pages += result.num_tokens_evicted // served.memory.layout.page_tokens
        served.activity.evicted.checkpoints += result.mamba_num_evicted
        return result

    def _candidates(self, kinds: Set[Kind] = frozenset(Kind)) -> list[Candidate]:
        if process.served().policies.chosen.value_eviction:
            return valued_candidates(self, kinds)
        core, component = self.tree_core, self.checkpoints
        candidates = []
        if Kind.ATTENTION in kinds:
            leaf = core.evictable_device_leaves.least_recent()
            if leaf is not None:
                in_session = attention_in_session(leaf)
                candidates.append(Candidate(Kind.ATTENTION, leaf.last_access_time, leaf.id, in_session=in_session))
        node = core.lru_lists[ComponentType.MAMBA].get_lru_no_lock() if Kind.CHECKPOINT in kinds else None
        if node is None:
            return candidates
        in_session = component.session_ref(node) > 0
        candidates.append(Candidate(Kind.CHECKPOINT, component.recency(node), node.id, in_session=in_session))
        store = component.store
        slab = store.slab_of(component.checkpoint_of(node)) if Kind.SLAB in kinds else None
        if slab is not None and store.is_reclaimable(slab):
            mates = [component.node_of[v] for v in store.reclaim(slab)]
            recency = slab_recency([component.recency(mate) for mate in mates])
            in_session = any(component.session_ref(mate) > 0 for mate in mates)
            candidates.append(Candidate(Kind.SLAB, recency, slab, in_session=in_session))
        return candidates

    def _carry_out(self, victim: Candidate, tracker: dict[Any, int]) -> None:
        served = process.served()
        served.activity.evictions[victim.kind.value] += 1
        served.policies.counts.evictions_skipped += self.protection.skipped(victim.recency)
        if victim.kind is Kind.ATTENTION:
            self._evict_device_leaf(victim.key, tracker)
        elif victim.kind is Kind.CHECKPOINT:
            self.evict_checkpoint(self.tree_core.node_by_id(victim.key), tracker)
        else:
            store = self.checkpoints.store
            mates = store.reclaim(victim.key)
            for v in mates:
                self.evict_checkpoint(self.checkpoints.node_of[v], tracker)
            store.counts.cross_invalidated += len(mates) - 1

    def evict_checkpoint(self, node: Any, tracker: dict[Any, int] | None = None) -> None:
        """Invalidate one node's checkpoint and free its parts: a leaf goes as a whole, an inner node keeps its
        attention and becomes a tombstone. So does a leaf of which a session refers to the attention only."""
        core, component = self.tree_core, self.checkpoints
        tracker = dict.fromkeys(self.tree_components, 0) if tracker is None else tracker
        if node in core.evictable_device_leaves and component._can_evict_leaf_atomically(node):
            self._evict_device_leaf(node.id, tracker)
            return
        result = BaseEvictionResult()
        frees = {"device_frees": result.device_frees, "host_frees": result.host_frees}
        core._evict_component_and_detach_lru(
            node, component, target=EvictLayer.DEVICE, tracker=tracker, cache_actions=result.cache_actions, **frees
        )
        core._cascade_evict(node, component, tracker, cache_actions=result.cache_actions, **frees)
        self._apply_eviction_result(result)

    def _migrate_slab(self) -> bool:
        """With `--slab-reclaim migrate`: empty the sparsest idle slab into others, which loses nothing. False if the
        policy is another or the other slabs have no room."""
        served = process.served()
        store = served.memory.store
        if served.plan.settings.slab_reclaim != "migrate" or store.slabs is None:
            return False
        slab = store.sparsest_reclaimable()
        moves = None if slab is None else store.migration(slab)
        if moves is None:
            return False
        served.memory.move_conv(moves)
        store.migrate(moves)
        return True


def _result(tracker: dict[Any, int]) -> EvictResult:
    """What evictions have freed, as SGLang reports it."""
    return EvictResult(num_tokens_evicted=tracker[BASE_COMPONENT_TYPE], mamba_num_evicted=tracker[ComponentType.MAMBA])


def build(ctx: Any) -> Any:
    """SGLang's factory of this backend."""
    ctx.params.component_registry_override = {
        **(ctx.params.component_registry_override or {}),
        ComponentType.MAMBA: CheckpointComponent,
    }
    tree = create_unified_radix_cache(ctx, cache_class=OrganizationRadixCache)
    ctx.params.token_to_kv_pool_allocator.last_resort = tree.protection.make_room
    return tree


def register() -> None:
    """Register the backend under `--radix-cache-backend sgl_hybrid`, once."""
    from sglang.srt.mem_cache.registry import get_radix_cache_factory

    if get_radix_cache_factory(RADIX_BACKEND) is None:
        register_radix_cache_backend(RADIX_BACKEND, build)
