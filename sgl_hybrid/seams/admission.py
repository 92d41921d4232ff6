"""Admission: the state slots a request needs are reserved with its attention pages, and every check is counted.

SGLang reserves state slots at admission only for its own unified allocators; for static pools it relies on the cap of
running requests and asserts when that does not suffice. Here a request that would not find its slots waits. In a shared
pool a slot is priced in tokens of the pages it takes, and cached checkpoints count as reclaimable tokens.

Admission headroom is a condition on top of SGLang's own need, which includes the output that may still come: H units
have to be left in each pool. It does not count when nothing runs; then protection yields too, so whatever fits is
admitted.

Source: SGLang 0.5.23, `sglang/srt/managers/schedule_policy.py`, `scheduler.py`, `mem_cache/prefill_budget.py`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.mem_cache.prefill_budget import PrefillBudget

from radix.headroom import PoolCheck, Verdict, headroom_blocks, judge
from radix.work import Submitted
from sgl_hybrid.memory.dual_pool import Outcome, Pool
from sgl_hybrid.seams import exact, process
from sgl_hybrid.seams.hooks import Seam
from sgl_hybrid.seams.protection import protection_of


class HeadroomPrefillBudget(PrefillBudget):
    """SGLang's token budget with a headroom. `headroom_tokens` and `idle` are those of the candidate that is looked at;
    `verdict` is the answer to it. `least_chunk`: tokens that a continued prompt gets even if fewer are left, because
    it cannot be cut before."""

    least_chunk = 1
    headroom_tokens = 0
    idle = True
    verdict = Verdict.ADMIT

    def check_prefill(self, *, total_tokens: int, chunk_limit: int | None, **need: Any) -> tuple[bool, int | None]:
        fits, limit = super().check_prefill(total_tokens=total_tokens, chunk_limit=chunk_limit, **need)
        return (fits, limit) if self._keeps_headroom(fits, total_tokens) else (False, None)

    def can_allocate_prefill(self, *, paged_input: int, **need: Any) -> bool:
        fits = super().can_allocate_prefill(paged_input=paged_input, **need)
        return self._keeps_headroom(fits, paged_input - 1)

    def available_chunk_tokens(self, chunk_limit: int) -> int | None:
        available = super().available_chunk_tokens(chunk_limit)
        return None if available is None else max(available, self.least_chunk)

    def _keeps_headroom(self, fits: bool, tokens: int) -> bool:
        # SGLang wants a token to spare (`total_tokens < remaining_total`).
        check = PoolCheck(tokens + 1, int(self.remaining_total), self.headroom_tokens)
        self.verdict = judge([check], idle=self.idle) if fits else Verdict.SHORT
        return self.verdict is Verdict.ADMIT


class SharedPrefillBudget(HeadroomPrefillBudget):
    """A token budget in which cached checkpoints are reclaimable too: either kind can be evicted for the other."""

    def _available_and_evictable(self) -> int:
        memory = process.served().memory
        pages = self.tree_cache.mamba_evictable_size() * memory.pages_freed_by_checkpoint + memory.num_idle_slabs
        return super()._available_and_evictable() + pages * self.page_size


class Tried(NamedTuple):
    """One look at a candidate: SGLang's answer, whether it was admitted, why not, and units needed and available."""

    result: AddReqResult
    admitted: bool
    verdict: Verdict
    slots: tuple[int, int]
    pages: tuple[int, int]


class CheckedPrefillAdder(PrefillAdder):
    """SGLang's adder with a reservation of state slots and one counted check per pool and candidate."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.memory = process.served().memory
        self.policies = process.served().policies
        self.protection = protection_of(self.tree_cache)
        self._reserved_slots = 0
        # Where SGLang cuts a prompt that does not fit this pass: on its own grid, and where no bit depends on the cut.
        self.cut_alignment = exact.cut_alignment()
        self.mamba_chunk_grid = math.lcm(self.mamba_chunk_grid, self.cut_alignment)
        if self.cut_alignment > 1:
            self.memory_budget.least_chunk = self.mamba_chunk_grid
        if self.rem_chunk_tokens is not None:  # Decodes of a mixed batch were taken off.
            self.rem_chunk_tokens = max(self.rem_chunk_tokens, self.memory_budget.least_chunk)
        self.policies.rounds.begin()

    def add_one_req(self, req: Any, has_chunked_req: bool, truncation_align_size: int | None) -> AddReqResult:
        """Admit `req`, or answer NO_TOKEN and leave it waiting when a pool cannot serve it."""
        truncation_align_size = math.lcm(truncation_align_size or 1, self.cut_alignment)
        idle = not has_chunked_req and not self.can_run_list and not self._anything_runs()
        if self.protection is not None and not self.can_run_list:
            # Otherwise what this would protect may be the room that requests admitted in this round count on.
            self.protection.arrived(req)
        tried = self._try(req, has_chunked_req, truncation_align_size, idle=idle)
        refused = tried.result is AddReqResult.NO_TOKEN and not tried.admitted
        if refused and idle and self.protection is not None and self.protection.yield_all():
            tried = self._try(req, has_chunked_req, truncation_align_size, idle=idle)
        self._count(req, tried)
        return tried.result

    def add_one_req_ignore_eos(self, req: Any) -> AddReqResult:
        """SGLang's way for requests of a known length without a prefix cache: it would cut anywhere."""
        left, length = self.rem_chunk_tokens, len(req.full_untruncated_fill_ids) - req.prefix_len
        if left is not None and left < min(length, self.memory_budget.least_chunk):
            return AddReqResult.OTHER
        return super().add_one_req_ignore_eos(req)

    def add_chunked_req(self, req: Any) -> Any:
        """Go on with a prompt that was cut; what others are to get of this pass leaves it a place to be cut at."""
        if self.chunked_req_limit is not None:
            self.chunked_req_limit = max(self.chunked_req_limit, self.memory_budget.least_chunk)
        return super().add_chunked_req(req)

    def _anything_runs(self) -> bool:
        return self.running_batch is not None and any(not req.finished() for req in self.running_batch.reqs)

    def _try(self, req: Any, has_chunked_req: bool, truncation_align_size: int | None, *, idle: bool) -> Tried:
        fraction, budget = self.policies.headroom.fraction, self.memory_budget
        budget.idle = idle
        budget.headroom_tokens = headroom_blocks(fraction, self.memory.pages.num_pages) * self.page_size
        kept_slots = 0 if self.memory.shared else headroom_blocks(fraction, self.memory.store.num_virtual)
        needed_slots = slots_needed(req, self.tree_cache.req_to_token_pool)
        free_slots = max(0, free_state_slots(self.tree_cache, locked_by=req) - self._reserved_slots)
        new_tokens = max(req.sampling_params.max_new_tokens - len(req.output_ids), 0)
        needed_pages = -(-(len(req.full_untruncated_fill_ids) - req.prefix_len + new_tokens) // self.page_size)
        free_pages = max(0, int(self.memory_budget.remaining_total)) // self.page_size
        admitted_before = len(self.can_run_list)
        verdict = judge([PoolCheck(needed_slots, free_slots, kept_slots)], idle=idle)
        if verdict is not Verdict.ADMIT:
            result = AddReqResult.NO_TOKEN
        else:
            budget.verdict = Verdict.ADMIT
            result = super().add_one_req(req, has_chunked_req, truncation_align_size)
            verdict = budget.verdict
        admitted = len(self.can_run_list) > admitted_before
        if admitted:
            self._reserved_slots += needed_slots
        return Tried(result, admitted, verdict, (needed_slots, free_slots), (needed_pages, free_pages))

    def _count(self, req: Any, tried: Tried) -> None:
        served = process.served()
        self.policies.rounds.tried(admitted=tried.admitted, held_back=tried.verdict is Verdict.HEADROOM)
        if tried.admitted:
            boundary = req.mamba_branching_seqlen  # the deepest that cached attention reaches beyond the match
            served.activity.admit(req, joint_tokens=req.prefix_len, attention_tokens=boundary or req.prefix_len)
            if self.protection is not None:
                self.protection.admitted(req)
        elif tried.result is AddReqResult.NO_TOKEN:
            served.activity.defer(req)
        else:
            return
        outcome = Outcome.GRANTED if tried.admitted else Outcome.DEFERRED
        for pool, (need, free) in ((Pool.RECURRENT, tried.slots), (Pool.ATTENTION, tried.pages)):
            served.ledger.record_check(pool, need=need, free=free, outcome=outcome)

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


def submitted(batch: Any) -> Submitted:
    """Tokens of a batch by category; a request that was retracted before computes its prompt as RESUME."""
    if not batch.forward_mode.is_extend():
        return Submitted(normal_decode=batch.batch_size())
    decoding = {id(req) for req in batch.decoding_reqs or ()}
    tokens = {"initial": 0, "resume": 0, "normal_decode": 0}
    for req, length in zip(batch.reqs, batch.extend_lens, strict=True):
        kind = "normal_decode" if id(req) in decoding else "resume" if req.retraction_count else "initial"
        tokens[kind] += length
    return Submitted(**tokens)


def count_step(result: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """After `Scheduler.get_next_batch_to_run`: one scheduler step for the counters of work and stranded bytes, if there
    is work: an idle scheduler loops without a batch, and its waiting is no step."""
    served = process.served()
    if result.batch_to_run is None:
        return
    served.policies.step(submitted(result.batch_to_run), waiting=bool(self.waiting_queue))
    if served.memory.shared:
        return
    pages, slots = served.memory.pages.num_free, served.memory.store.capacity()
    if not (pages and slots):  # Otherwise no pool is short of units, and nothing is stranded.
        pages, slots = free_attention_pages(self.tree_cache), free_state_slots(self.tree_cache)
    served.ledger.record_step({Pool.ATTENTION: pages, Pool.RECURRENT: slots})


def check_decode(self: Any, selected_indices: list[int] | None = None) -> bool:
    """Replace `ScheduleBatch.check_decode_mem`: as SGLang's, and the need and the outcome are counted."""
    tokens = self.new_tokens_required_next_decode(selected_indices)
    allocator, served = self.token_to_kv_pool_allocator, process.served()
    need, free, fits = -(-tokens // allocator.page_size), served.memory.pages.num_free, True
    if free < max(1, need):  # Otherwise it fits, and what else could be freed does not change what is counted.
        free = free_attention_pages(self.tree_cache)
        requests = self.reqs if selected_indices is None else [self.reqs[i] for i in selected_indices]
        request = {"requests": requests, "spec_algorithm": self.spec_algorithm}
        fits = allocator.check_decode_capacity(num_tokens=tokens, tree_cache=self.tree_cache, **request)
        protection = protection_of(self.tree_cache)
        if not fits and len(requests) <= 1 and protection is not None and protection.yield_all():
            fits = allocator.check_decode_capacity(num_tokens=tokens, tree_cache=self.tree_cache, **request)
    outcome = Outcome.GRANTED if fits else Outcome.PREEMPTED
    served.ledger.record_check(Pool.ATTENTION, need=need, free=free, outcome=outcome)
    return bool(fits)


def count_retractions(result: Any, self: Any) -> None:
    """After `ScheduleBatch.retract_decode`: requests taken back, and those that do not fit even alone."""
    retracted, _, aborted = result
    requests = process.served().activity.requests
    requests.retracted += len(retracted)
    requests.aborted += len(aborted)
    protection = protection_of(self.tree_cache)
    if protection is not None:
        protection.ran_short(retracted)


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
        "replace",
        check_decode,
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
