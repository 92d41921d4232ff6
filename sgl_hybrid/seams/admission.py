"""Admission: the state slots a request needs are reserved with its attention pages, and every check is counted.

SGLang reserves state slots at admission only for its own unified allocators; for static pools it relies on the cap of
running requests and asserts when that does not suffice. Here a request that would not find its slots waits. In a shared
pool a slot is priced in tokens of the pages it takes, and cached checkpoints count as reclaimable tokens.

Source: SGLang 0.5.23, `sglang/srt/managers/schedule_policy.py`, `scheduler.py`, `mem_cache/prefill_budget.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.mem_cache.prefill_budget import PrefillBudget

from sgl_hybrid.memory.dual_pool import Outcome, Pool
from sgl_hybrid.seams import process
from sgl_hybrid.seams.hooks import Seam


class SharedPrefillBudget(PrefillBudget):
    """A token budget in which cached checkpoints are reclaimable too: either kind can be evicted for the other."""

    def _available_and_evictable(self) -> int:
        memory = process.served().memory
        pages = self.tree_cache.mamba_evictable_size() * memory.pages_freed_by_checkpoint + memory.num_idle_slabs
        return super()._available_and_evictable() + pages * self.page_size


class CheckedPrefillAdder(PrefillAdder):
    """SGLang's adder with a reservation of state slots and one counted check per pool and candidate."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.memory = process.served().memory
        self._reserved_slots = 0

    def add_one_req(self, req: Any, has_chunked_req: bool, truncation_align_size: int | None) -> AddReqResult:
        """Admit `req`, or answer NO_TOKEN and leave it waiting when a pool cannot serve it."""
        needed_slots = slots_needed(req, self.tree_cache.req_to_token_pool)
        free_slots = max(0, free_state_slots(self.tree_cache, locked_by=req) - self._reserved_slots)
        new_tokens = max(req.sampling_params.max_new_tokens - len(req.output_ids), 0)
        needed_pages = -(-(len(req.full_untruncated_fill_ids) - req.prefix_len + new_tokens) // self.page_size)
        free_pages = max(0, int(self.memory_budget.remaining_total)) // self.page_size
        admitted_before = len(self.can_run_list)
        if needed_slots > free_slots:
            result = AddReqResult.NO_TOKEN
        else:
            result = super().add_one_req(req, has_chunked_req, truncation_align_size)
        admitted = len(self.can_run_list) > admitted_before
        activity = process.served().activity
        if admitted:
            self._reserved_slots += needed_slots
            boundary = req.mamba_branching_seqlen  # the deepest that cached attention reaches beyond the match
            activity.admit(req, joint_tokens=req.prefix_len, attention_tokens=boundary or req.prefix_len)
        elif result is AddReqResult.NO_TOKEN:
            activity.defer(req)
        if admitted or result is AddReqResult.NO_TOKEN:
            outcome = Outcome.GRANTED if admitted else Outcome.DEFERRED
            ledger = process.served().ledger
            ledger.record_check(Pool.RECURRENT, need=needed_slots, free=free_slots, outcome=outcome)
            ledger.record_check(Pool.ATTENTION, need=needed_pages, free=free_pages, outcome=outcome)
        return result

    def _mamba_gap_budget_for_req(self, req: Any, *, include_host_hit: bool = False) -> int:
        """Tokens of the pages that the state slots of `req` will take; 0 where states have a pool of their own."""
        slots = slots_needed(req, self.tree_cache.req_to_token_pool)
        return slots * self.memory.pages_per_checkpoint * self.page_size


def slots_needed(req: Any, request_pool: Any) -> int:
    """State slots that SGLang allocates when `req` is bound: its state, if it has none, and its tracking slots."""
    needed = 0 if req.kv.holds_mamba else 1
    if request_pool.enable_mamba_extra_buffer and req.kv.mamba_ping_pong_track_buffer is None:
        needed += request_pool.mamba_initial_tracking_slots
    return needed


def free_state_slots(tree_cache: Any, locked_by: Any = None) -> int:
    """State slots that can be handed out now: free ones and those of cached checkpoints that no request references.

    locked_by: a candidate whose own matched checkpoint will be locked when it is admitted, so it is not counted. In a
    shared pool evicted attention pages make slots too.
    """
    memory = process.served().memory
    evictable = tree_cache.mamba_evictable_size() if tree_cache.supports_mamba() else 0
    if locked_by is not None and locked_by.kv.mamba_cow_src_index is not None and evictable > 0:
        evictable -= 1
    free = memory.store.capacity() + evictable
    if memory.shared:
        full = tree_cache.full_evictable_size() if tree_cache.supports_mamba() else 0
        free += full // memory.layout.page_tokens // memory.pages_per_checkpoint
    return free


def free_attention_pages(tree_cache: Any) -> int:
    """Attention pages that can be handed out now, cached ones without a reference included."""
    memory = process.served().memory
    full = tree_cache.full_evictable_size() if tree_cache.supports_mamba() else tree_cache.evictable_size()
    pages = memory.pages.num_free + full // memory.layout.page_tokens
    if tree_cache.supports_mamba():
        pages += tree_cache.mamba_evictable_size() * memory.pages_freed_by_checkpoint + memory.num_idle_slabs
    return pages


def adder_class(self: Any) -> type[PrefillAdder]:
    """Replace `Scheduler.get_prefill_adder_class`."""
    return CheckedPrefillAdder


def count_step(result: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """After `Scheduler.get_next_batch_to_run`: one scheduler step for the stranded-byte fraction, if there is work: an
    idle scheduler loops without a batch, and its waiting is no step."""
    served = process.served()
    if result.batch_to_run is None or served.memory.shared:
        return
    tree = self.tree_cache
    free = {Pool.ATTENTION: free_attention_pages(tree), Pool.RECURRENT: free_state_slots(tree)}
    served.ledger.record_step(free)


def count_decode_check(original: Callable[..., bool], self: Any, selected_indices: list[int] | None = None) -> bool:
    """Around `ScheduleBatch.check_decode_mem`: count the attention pages that a decode step needs."""
    need = -(-self.new_tokens_required_next_decode(selected_indices) // self.token_to_kv_pool_allocator.page_size)
    free = free_attention_pages(self.tree_cache)
    fits = original(self, selected_indices)
    outcome = Outcome.GRANTED if fits else Outcome.PREEMPTED
    process.served().ledger.record_check(Pool.ATTENTION, need=need, free=free, outcome=outcome)
    return fits


def count_retractions(result: Any, self: Any) -> None:
    """After `ScheduleBatch.retract_decode`: requests taken back, and those that do not fit even alone."""
    retracted, _, aborted = result
    requests = process.served().activity.requests
    requests.retracted += len(retracted)
    requests.aborted += len(aborted)


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"

SEAMS: tuple[Seam, ...] = (
    Seam(f"{_SCHEDULER}.get_prefill_adder_class", "replace", adder_class, (), "state slots are reserved at admission"),
    Seam(
        f"{_SCHEDULER}.get_next_batch_to_run",
        "after",
        count_step,
        ("running_batch", "last_batch"),
        "stranded bytes are counted per step",
    ),
    Seam(
        "sglang.srt.managers.schedule_batch.ScheduleBatch.check_decode_mem",
        "around",
        count_decode_check,
        ("selected_indices",),
        "decode checks are counted per pool",
    ),
    Seam(
        "sglang.srt.managers.schedule_batch.ScheduleBatch.retract_decode",
        "after",
        count_retractions,
        (),
        "requests taken back are counted",
    ),
)
