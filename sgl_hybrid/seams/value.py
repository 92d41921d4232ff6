"""Candidates for eviction with their value: the recomputation that losing each is expected to cost, per byte it frees.

The loss of a checkpoint makes every request that wants its boundary start from the nearest valid boundary on its left;
the attention between the two is then of no use. A leaf goes with its checkpoint. Attention behind the deepest
checkpoint of its path spares nothing: nobody can start from there.

Looked at are the `WINDOW` least recent of each kind, so what was used just now is no candidate, whatever its value.
Source: SGLang 0.5.23, `sglang/srt/mem_cache/unified_cache/unified_tree_core.py` (leaf sets and lists of recency).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Set
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.unified_cache.components.base import ComponentType

from radix.eviction import Candidate, Kind, replay_value, slab_recency, value_per_byte
from sgl_hybrid.memory.budget import attention_unit_total_bytes, checkpoint_unit_total_bytes
from sgl_hybrid.seams import process

if TYPE_CHECKING:
    from sgl_hybrid.seams.factory import OrganizationRadixCache

WINDOW = 64
"""Least recent units of each kind that one decision looks at."""


def valued_candidates(tree: OrganizationRadixCache, kinds: Set[Kind]) -> list[Candidate]:
    """Return the least recent candidates of the given kinds, each with its value in tokens per byte."""
    core, component = tree.tree_core, tree.checkpoints
    found = []
    if Kind.ATTENTION in kinds:
        by_use = heapq.nsmallest(
            WINDOW,
            core.evictable_device_leaves,
            key=lambda leaf: (attention_in_session(leaf), leaf.last_access_time, leaf.id),
        )
        found += [
            Candidate(
                Kind.ATTENTION,
                leaf.last_access_time,
                leaf.id,
                value_per_byte(_saved(tree, leaf), _bytes(leaf)),
                attention_in_session(leaf),
            )
            for leaf in by_use
        ]
    if Kind.CHECKPOINT not in kinds:
        return found
    nodes = list(_least_recent_states(tree))
    for node in nodes:
        value = value_per_byte(_saved(tree, node), _bytes(node, attention=node in core.evictable_device_leaves))
        in_session = component.session_ref(node) > 0
        found.append(Candidate(Kind.CHECKPOINT, component.recency(node), node.id, value, in_session))
    if Kind.SLAB in kinds:
        found += _slabs(tree, nodes)
    return found


def attention_in_session(leaf: Any) -> bool:
    """Tell whether an open session refers to the attention of a leaf."""
    return bool(leaf.component_data[ComponentType.FULL].session_ref > 0)


def _slabs(tree: OrganizationRadixCache, nodes: list[Any]) -> Iterator[Candidate]:
    component = tree.checkpoints
    store = component.store
    slabs = dict.fromkeys(store.slab_of(component.checkpoint_of(node)) for node in nodes)
    for slab in slabs:
        if slab is None or not store.is_reclaimable(slab):
            continue
        mates = [component.node_of[v] for v in store.reclaim(slab)]
        freed = len(mates) * _checkpoint_bytes() + _page_bytes()
        recency = slab_recency([component.recency(mate) for mate in mates])
        value = value_per_byte(sum(_saved(tree, mate) for mate in mates), freed)
        yield Candidate(Kind.SLAB, recency, slab, value, any(component.session_ref(mate) > 0 for mate in mates))


def _least_recent_states(tree: OrganizationRadixCache) -> Iterator[Any]:
    order = tree.tree_core.lru_lists[ComponentType.MAMBA]
    node = order.get_lru_no_lock()
    for _ in range(WINDOW):
        if node is None:
            return
        yield node
        node = order.get_prev_no_lock(node)


def _saved(tree: OrganizationRadixCache, node: Any) -> int:
    """Tokens that the checkpoint of a node spares the requests that want it; 0 for a node without one."""
    component, policies = tree.checkpoints, process.served().policies
    checkpoint = component.checkpoint_of(node)
    if checkpoint is None:
        return 0
    replay, above = len(node.key), node.parent
    while above is not tree.tree_core.root_node and component.checkpoint_of(above) is None:
        replay += len(above.key)
        above = above.parent
    return replay_value(replay, 0, policies.requesters(checkpoint))


def _bytes(node: Any, *, attention: bool = True) -> int:
    """Bytes that evicting a node gives back: its attention, unless only its checkpoint goes, and its checkpoint."""
    layout = process.served().memory.layout
    freed = len(node.key) // layout.page_tokens * attention_unit_total_bytes(layout) if attention else 0
    has_checkpoint = node.component_data[ComponentType.MAMBA].value is not None
    return freed + (_checkpoint_bytes() if has_checkpoint else 0)


def _checkpoint_bytes() -> int:
    """Bytes of a checkpoint's own pages. A slab's page is not among them: it goes with its last slot only."""
    memory = process.served().memory
    if not memory.shared:
        return checkpoint_unit_total_bytes(memory.layout)
    return memory.pages_freed_by_checkpoint * _page_bytes()


def _page_bytes() -> int:
    return attention_unit_total_bytes(process.served().memory.layout)
