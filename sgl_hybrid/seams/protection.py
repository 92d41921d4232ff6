"""What the policies of `radix` decide, done to the tree: checkpoints are locked (retention, pins) or freed (transient).

A protected checkpoint has an execution reference like one that a request reads: a lock of SGLang's tree on its node. So
nothing on the path to it is a candidate for eviction, and every size that SGLang asks for counts it as not evictable.
Protection ends with the producer (retention) or when the request resumes, after its own lock was taken (pins).

It yields, all of it, where there is no other way out: to a request that fits when nothing runs, to the last request
that runs (otherwise SGLang takes requests back), and to an allocation that would fail although it was admitted.

Source: paper sections 4.5 and B.2; SGLang 0.5.23, `sglang/srt/mem_cache/unified_radix_cache.py` (`lock`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from radix.demand import Namespace
from radix.pinning import Resident
from radix.policies import Adoption, Policies
from radix.protection import Units
from radix.retention import Plan
from sgl_hybrid.seams import process
from sgl_hybrid.seams.hooks import Seam

if TYPE_CHECKING:
    from sgl_hybrid.seams.factory import OrganizationRadixCache


class Protection:
    """The adapter between one tree and the policies of this process (see the module)."""

    def __init__(self, tree: OrganizationRadixCache) -> None:
        self.tree = tree
        self._retained: dict[int, Any] = {}
        self._pinned: dict[str, Any] = {}
        self._decided: list[Plan] = []
        self._skipped: set[int] = set()
        self._to_recompute: dict[str, int] = {}
        self._publisher: Any = None

    @property
    def policies(self) -> Policies:
        return process.served().policies

    @property
    def num_retained(self) -> int:
        """Checkpoints that are protected for their producer."""
        return len(self._retained)

    def arrived(self, req: Any) -> None:
        """`req` waits, for the first time or again."""
        if self.policies.names_needed:
            namespace = Namespace(req.extra_key, req.cache_salt)
            self._carry_out(self.policies.arrived(req.rid, namespace, req.origin_input_ids))

    def admitted(self, req: Any) -> None:
        """`req` was admitted and holds its lock: what it continues from is counted, its pin is dropped."""
        depth = req.prefix_len
        checkpoint = self._checkpoint(req.lock.node) if depth and req.lock is not None else None
        adoption = Adoption(req.rid, req.retraction_count > 0, depth, checkpoint)
        self.policies.admitted(adoption, _tokens(req) if self.policies.names_needed else ())
        self._unpin(req.rid)
        self._to_recompute.pop(req.rid, None)

    @contextmanager
    def publishing(self, req: Any) -> Iterator[None]:
        """While `req` gives checkpoints to the tree; what that decides is done afterwards, when its lock has moved."""
        self._publisher = req
        try:
            yield
        finally:
            self._publisher = None
        decided, self._decided = self._decided, []
        for plan in decided:
            self._carry_out(plan)

    def published(self, node: Any, checkpoint: int) -> None:
        """The tree names a checkpoint of the request that publishes."""
        if self._publisher is None:
            return
        depth = self.tree.checkpoints.depth_of(node)
        tokens = _tokens(self._publisher)[:depth] if self.policies.names_needed else range(depth)
        self._decided.append(self.policies.published(self._publisher.rid, tokens, checkpoint, self._cost()))

    def lost(self, checkpoint: int) -> None:
        """A checkpoint left the tree."""
        self._skipped.discard(checkpoint)
        self.policies.lost(checkpoint)

    def retracted(self, req: Any) -> None:
        """`req` is about to be taken back and still holds its lock: pin what it is to resume from."""
        residents = self._residents(req)
        resident = max((found.depth for found in residents), default=0)
        self._to_recompute[req.rid] = max(0, req.seqlen - resident)
        pin = self.policies.retracted(req.rid, residents)
        if pin is not None:
            self._pinned[req.rid] = self.tree.lock(pin.key)

    def ran_short(self, reqs: list[Any]) -> None:
        """These requests were taken back for want of memory, not for another reason."""
        for req in reqs:
            self.policies.headroom.retracted(self._to_recompute.pop(req.rid, 0))

    def ended(self, req: Any) -> None:
        """`req` has given its row back; one that is finished will not resume."""
        self._carry_out(self.policies.ended(req.rid))
        if req.finished() or req.to_finish is not None:
            self.policies.work.end(input_tokens=len(req.origin_input_ids), output_tokens=len(req.output_ids))
            self.forget(req.rid)

    def forget(self, rid: str) -> None:
        """A request will not come back."""
        self.policies.forget(rid)
        self._unpin(rid)
        self._to_recompute.pop(rid, None)

    def yield_all(self) -> bool:
        """Give up all protection; False if there was none to give up."""
        if not (self._retained or self._pinned):
            return False
        plan, _ = self.policies.yielded()
        self._carry_out(plan)
        for rid in list(self._pinned):
            self._unpin(rid)
        return True

    def make_room(self, pages: int) -> bool:
        """Give up all protection for an allocation of `pages` attention pages that would fail, and evict for it."""
        if not self.yield_all():
            return False
        memory = process.served().memory
        missing = pages - memory.pages.num_free
        self.tree.evict_for_alloc(EvictParams(num_tokens=missing * memory.layout.page_tokens))
        return True

    def reset(self) -> None:
        """The tree was dropped, with every lock."""
        for checkpoint in list(self._retained):
            self.policies.lost(checkpoint)
        for rid in list(self._pinned):
            self.policies.forget(rid)
        self._retained.clear()
        self._pinned.clear()
        self._decided.clear()
        self._skipped.clear()
        self.policies.flushed()

    def skipped(self, recency: float) -> bool:
        """Tell whether a retained checkpoint was due before something of this recency."""
        component = self.tree.checkpoints
        return any(component.recency(component.node_of[v]) < recency for v in self._retained)

    def _carry_out(self, plan: Plan) -> None:
        for checkpoint in plan.unprotect:
            self.tree.unlock(self._retained.pop(checkpoint))
        for checkpoint in plan.protect:
            if checkpoint in self.policies.retention.protected:
                self._retained[checkpoint] = self.tree.lock(self.tree.checkpoints.node_of[checkpoint].id)
        for checkpoint in plan.free:
            self._release(checkpoint)

    def _release(self, checkpoint: int) -> None:
        """Free a transient checkpoint, unless a request reads it or a deeper one does not exist any more."""
        counts, component = self.policies.counts, self.tree.checkpoints
        node = component.node_of.get(checkpoint)
        if node is None:
            return
        if node.component_data[component.component_type].lock_ref > 0 or not node.children:
            counts.release_skipped += checkpoint not in self._skipped
            self._skipped.add(checkpoint)
            return
        counts.released += 1
        self.policies.released(checkpoint)
        self.tree.evict_checkpoint(node)

    def _unpin(self, rid: str) -> None:
        lock = self._pinned.pop(rid, None)
        if lock is not None:
            self.tree.unlock(lock)

    def _residents(self, req: Any) -> list[Resident]:
        """Boundaries on the path of `req` at which attention and a checkpoint are there, deepest first."""
        if req.lock is None:
            return []
        found = []
        core, component = self.tree.tree_core, self.tree.checkpoints
        node = core.node_by_id(req.lock.node)
        depth = component.depth_of(node)
        while node is not core.root_node:
            checkpoint = component.checkpoint_of(node)
            if checkpoint is not None:
                found.append(Resident(depth, node.id, self.policies.users(checkpoint), self._cost(depth)))
            depth -= len(node.key)
            node = node.parent
        return found

    def _checkpoint(self, node_id: int) -> int | None:
        core = self.tree.tree_core
        node = core.node_by_id(node_id)
        return None if node is core.root_node else self.tree.checkpoints.checkpoint_of(node)

    def _cost(self, attention_tokens: int = 0) -> Units:
        """Units of each pool that a protected checkpoint holds, with `attention_tokens` before it."""
        memory = process.served().memory
        pages = -(-attention_tokens // memory.layout.page_tokens)
        return (pages + memory.pages_per_checkpoint,) if memory.shared else (pages, 1)


def _tokens(req: Any) -> Any:
    return req.origin_input_ids + req.output_ids


def note_arrival(result: None, self: Any, req: Any, is_retracted: bool = False) -> None:
    """After `Scheduler._add_request_to_queue`: a request wants the boundaries of its prompt, unless it was refused."""
    protection = protection_of(self.tree_cache)
    if protection is not None and self.waiting_queue and self.waiting_queue[-1] is req:
        protection.arrived(req)


def pin_before_release(original: Callable[..., bool], *, req: Any, tree_cache: Any, **options: Any) -> bool:
    """Around `release_req`: a request that will resume is pinned before its lock goes, as SGLang then evicts at once
    for the requests that stay."""
    protection = protection_of(tree_cache)
    if protection is not None and req.to_finish is None and not req.finished():
        protection.retracted(req)
    return original(req=req, tree_cache=tree_cache, **options)


def protection_of(tree_cache: Any) -> Protection | None:
    """The protection of an organization's tree; None where the prefix cache is disabled."""
    return getattr(tree_cache, "protection", None)


SEAMS: tuple[Seam, ...] = (
    Seam(
        "sglang.srt.managers.scheduler.Scheduler._add_request_to_queue",
        "after",
        note_arrival,
        ("req", "is_retracted"),
        "distinct requests are counted at the boundaries that they want",
    ),
    Seam(
        "sglang.srt.managers.schedule_batch.release_req",
        "around",
        pin_before_release,
        ("req", "remaing_req_count"),
        "a boundary of a retracted request is pinned",
    ),
)
