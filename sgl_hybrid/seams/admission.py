"""Admission: the state slots a request needs are reserved with its attention pages, and every check is counted.

SGLang reserves state slots at admission only for its own unified allocators; for static pools it relies on the cap of
running requests and asserts when that does not suffice. Here a request that would not find its slots waits.

Source: SGLang 0.5.23, `sglang/srt/managers/schedule_policy.py` and `scheduler.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder

from sgl_hybrid.memory.dual_pool import Outcome, Pool
from sgl_hybrid.seams import process
from sgl_hybrid.seams.hooks import Seam


class CheckedPrefillAdder(PrefillAdder):
    """SGLang's adder with a reservation of state slots and one counted check per pool and candidate."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reserved_slots = 0

    def add_one_req(self, req: Any, has_chunked_req: bool, truncation_align_size: int | None) -> AddReqResult:
        """Admit `req`, or answer NO_TOKEN and leave it waiting when a pool cannot serve it."""
        needed_slots = slots_needed(req, self.tree_cache.req_to_token_pool)
        free_slots = max(0, free_state_slots(self.tree_cache) - self._reserved_slots)
        new_tokens = max(req.sampling_params.max_new_tokens - len(req.output_ids), 0)
        needed_pages = -(-(len(req.full_untruncated_fill_ids) - req.prefix_len + new_tokens) // self.page_size)
        free_pages = max(0, int(self.memory_budget.remaining_total)) // self.page_size
        admitted_before = len(self.can_run_list)
        if needed_slots > free_slots:
            result = AddReqResult.NO_TOKEN
        else:
            result = super().add_one_req(req, has_chunked_req, truncation_align_size)
        admitted = len(self.can_run_list) > admitted_before
        if admitted:
            self._reserved_slots += needed_slots
        if admitted or result is AddReqResult.NO_TOKEN:
            outcome = Outcome.GRANTED if admitted else Outcome.DEFERRED
            ledger = process.served().ledger
            ledger.record_check(Pool.RECURRENT, need=needed_slots, free=free_slots, outcome=outcome)
            ledger.record_check(Pool.ATTENTION, need=needed_pages, free=free_pages, outcome=outcome)
        return result


def slots_needed(req: Any, request_pool: Any) -> int:
    """State slots that SGLang allocates when `req` is bound: its state, if it has none, and its tracking slots."""
    needed = 0 if req.kv.holds_mamba else 1
    if request_pool.enable_mamba_extra_buffer and req.kv.mamba_ping_pong_track_buffer is None:
        needed += request_pool.mamba_initial_tracking_slots
    return needed


def free_state_slots(tree_cache: Any) -> int:
    """State slots that can be handed out now: free ones and those of cached checkpoints that no request references."""
    free = tree_cache.req_to_token_pool.mamba_allocator.schedulable_available_size()
    return free + (tree_cache.mamba_evictable_size() if tree_cache.supports_mamba() else 0)


def free_attention_pages(scheduler: Any) -> int:
    """Attention pages that can be handed out now, cached ones without a reference included."""
    tree, allocator = scheduler.tree_cache, scheduler.token_to_kv_pool_allocator
    evictable = tree.full_evictable_size() if tree.supports_mamba() else tree.evictable_size()
    return (allocator.available_size() + evictable) // allocator.page_size


def adder_class(self: Any) -> type[PrefillAdder]:
    """Replace `Scheduler.get_prefill_adder_class`."""
    return CheckedPrefillAdder


def count_step(result: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """After `Scheduler.get_next_batch_to_run`: one scheduler step for the stranded-byte fraction, if there is work: an
    idle scheduler loops without a batch, and its waiting is no step."""
    if result.batch_to_run is None:
        return
    free = {Pool.ATTENTION: free_attention_pages(self), Pool.RECURRENT: free_state_slots(self.tree_cache)}
    process.served().ledger.record_step(free)


def count_decode_check(original: Callable[..., bool], self: Any, selected_indices: list[int] | None = None) -> bool:
    """Around `ScheduleBatch.check_decode_mem`: count the attention pages that a decode step needs."""
    need = -(-self.new_tokens_required_next_decode(selected_indices) // self.token_to_kv_pool_allocator.page_size)
    tree, allocator = self.tree_cache, self.token_to_kv_pool_allocator
    evictable = tree.full_evictable_size() if tree.supports_mamba() else tree.evictable_size()
    free = (allocator.available_size() + evictable) // allocator.page_size
    fits = original(self, selected_indices)
    outcome = Outcome.GRANTED if fits else Outcome.PREEMPTED
    process.served().ledger.record_check(Pool.ATTENTION, need=need, free=free, outcome=outcome)
    return fits


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
)
