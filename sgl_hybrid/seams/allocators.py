"""SGLang's token and state-slot allocators over the pages and checkpoints of an organization.

A token id is the row of the token in the planes: page * pitch + position in the page. In an organization whose pages
are longer than a block (S0) the pitch is larger than the block, and ids have gaps that SGLang never meets: it takes
ids, hands them back and compares the position of a request with the block length, but does no arithmetic on ids beyond
one block.

A state slot is a virtual checkpoint id; its members and conv state are taken and returned as a whole.

Source: SGLang 0.5.23, `sglang/srt/mem_cache/allocator/base.py`, `paged.py` and `mamba.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.mamba import MambaSlotAllocator

from sgl_hybrid.errors import CapacityError
from sgl_hybrid.memory.pages import PageKind
from sgl_hybrid.memory.state_memory import StateMemory
from sgl_hybrid.memory.transfer import upload
from sgl_hybrid.seams.hooks import Seam

POISON_FREED = os.environ.get("SGLANG_HYBRID_POISON_FREED") == "1"
"""For tests: fill every freed unit with NaN, so that a read of a unit that was given back shows in the output."""


class BlockAllocator(BaseTokenToKVPoolAllocator):
    """Token ids in blocks of `page_size` tokens, one block a page of the organization."""

    def __init__(self, memory: StateMemory, *, dtype: torch.dtype, device: str, kvcache: Any) -> None:
        self.memory = memory
        self.pitch = memory.layout.tokens_per_page_pitch
        super().__init__(0, memory.layout.page_tokens, dtype, device, kvcache, need_sort=False)
        self.free_group = None
        self.last_resort: Callable[[int], bool] = lambda pages: False
        """Called with the pages of an allocation that would fail; tells whether another try is worth it."""
        self.decoded: torch.Tensor | None = None
        """[batch] int64, the ids that the last decode step was given."""

    @property
    def size(self) -> int:
        """Tokens in free and attention pages. In a shared pool it falls while states hold pages."""
        pages = self.memory.pages
        return (pages.num_free + pages.count(PageKind.ATTENTION)) * self.page_size

    @size.setter
    def size(self, value: int) -> None:
        """Ignored: the base class writes here, but the size follows from the pages."""

    def available_size(self) -> int:
        return self.memory.pages.num_free * self.page_size

    def get_all_free_pages(self) -> None:
        """None: there is no tensor of free pages."""
        return

    def create_prefill_budget(self, tree_cache: Any, *, num_mixed_decode_tokens: int = 0) -> Any:
        """SGLang's budget of one prefill pass; in a shared pool cached checkpoints are part of it."""
        from sgl_hybrid.seams.admission import HeadroomPrefillBudget, SharedPrefillBudget

        shared = self.memory.shared and tree_cache.supports_mamba()
        budget = SharedPrefillBudget if shared else HeadroomPrefillBudget
        return budget(self, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens)

    def alloc(self, need_size: int) -> torch.Tensor | None:
        pages = self._take(-(-need_size // self.page_size))
        return None if pages is None else self._tensor(self._block_ids(pages)[:need_size])

    def get_extend_allocation_demand(
        self, prefix_lens_cpu: torch.Tensor, seq_lens_cpu: torch.Tensor, **options: Any
    ) -> int:
        """Tokens of the blocks that a prefill opens; SGLang would evict for one more block a request."""
        prefixes, lengths = prefix_lens_cpu.numpy(), seq_lens_cpu.numpy()
        return int((-(-lengths // self.page_size) - -(-prefixes // self.page_size)).sum()) * self.page_size

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        """Ids of the new tokens of each request, in order: the rest of its last block, then new blocks; None if short.

        prefix_lens_cpu, seq_lens_cpu: [batch] int64. last_loc: [batch] int64, id of the last token held, -1 if none.
        """
        prefixes, lengths, last = prefix_lens_cpu.tolist(), seq_lens_cpu.tolist(), last_loc.tolist()
        counts = [
            -(-length // self.page_size) - -(-prefix // self.page_size)
            for prefix, length in zip(prefixes, lengths, strict=True)
        ]
        pages = self._take(sum(counts))
        if pages is None:
            return None
        parts, taken = [], 0
        for prefix, length, count, loc in zip(prefixes, lengths, counts, last, strict=True):
            in_block = min(-prefix % self.page_size, length - prefix)
            parts.append(np.arange(loc + 1, loc + 1 + in_block))
            parts.append(self._block_ids(pages[taken : taken + count])[: length - prefix - in_block])
            taken += count
        return self._tensor(np.concatenate(parts))

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """One id per request: the next of its block, or the first of a new one; None if short. Waits for nothing on the
        device. seq_lens, seq_lens_cpu: [batch] int64, tokens with the new one."""
        return self.next_ids(last_loc, self.rows_that_open(seq_lens_cpu - 1))

    def rows_that_open(self, held_cpu: torch.Tensor) -> list[int]:
        """Rows whose next token is the first of a block. held_cpu: [batch] int64, tokens that each has.

        A loop, not numpy: behind a model's step numpy's code is out of the processor's cache, and slower than this.
        """
        return [row for row, held in enumerate(held_cpu.tolist()) if held % self.page_size == 0]

    def next_ids(self, last_loc: torch.Tensor, opens: list[int]) -> torch.Tensor | None:
        """As `alloc_decode`, for the rows that are known to open a block."""
        ids = last_loc.to(torch.int64) + 1
        if opens:
            pages = self._take(len(opens))
            if pages is None:
                return None
            firsts = upload([opens, [page * self.pitch for page in pages]], torch.int64, self.device)
            ids.index_copy_(0, firsts[0], firsts[1])
        return ids

    def free(self, free_index: torch.Tensor) -> None:
        """Return the pages that hold these ids; a page is returned whole."""
        if free_index.numel() == 0:
            return
        if self.free_group is not None:
            self.free_group.append(self._copy_for_free_group(free_index))
            return
        self._give_back(np.unique(free_index.cpu().numpy() // self.pitch).tolist())

    def free_segment(self, free_index: torch.Tensor, *, start_pos: int) -> None:
        if free_index.numel() == 0:
            return
        if start_pos % self.page_size:
            raise ValueError(f"expected a segment that starts at a multiple of {self.page_size}, got {start_pos}")
        self.free(free_index[:: self.page_size])

    def clear(self) -> None:
        self.free_group = None
        self._give_back(self.memory.pages.held(PageKind.ATTENTION))

    def verify_byte_accounting(self) -> list[str]:
        """Every ledger of the organization, at idle; the violation found, if any."""
        try:
            self.memory.check()
        except AssertionError as error:
            return [str(error)]
        return []

    def max_new_tokens_for_memory(
        self,
        input_tokens: int,
        max_new_tokens: int,
        *,
        token_capacity: int,
        sliding_window_size: int | None,
        chunk_size: int | None,
    ) -> int | None:
        """Clip generation to what is admitted when no other request runs; None if the prompt cannot fit.

        Beside its tokens a request needs its state slot, the cached checkpoint that it continues from, a page for
        rounding, and one token to spare (`PrefillBudget.check_prefill`).
        """
        blocks = self.memory.pages.num_pages - 2 * self.memory.pages_per_checkpoint - 1
        room = blocks * self.page_size - input_tokens - 1
        return None if room < 1 else min(max_new_tokens, room)

    def _take(self, count: int) -> list[int] | None:
        if count > self.memory.pages.num_free and not self.last_resort(count):
            return None
        try:
            return self.memory.pages.take(PageKind.ATTENTION, count)
        except CapacityError:
            return None

    def _give_back(self, pages: list[int]) -> None:
        self.memory.pages.give_back(pages, kind=PageKind.ATTENTION)
        if POISON_FREED:
            self.memory.pool.poison(attention_pages=pages)

    def _block_ids(self, pages: Iterable[int]) -> np.ndarray:
        starts = np.fromiter(pages, dtype=np.int64) * self.pitch
        return (starts[:, None] + np.arange(self.page_size)).reshape(-1)

    def _tensor(self, ids: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(ids, dtype=np.int64)).to(self.device)


def allocate_decode(original: Callable[..., torch.Tensor], batch: Any, token_per_req: int) -> torch.Tensor:
    """Around `alloc_for_decode_default`: ids [batch] int64 of one new token of each request, also in the request table.

    A batch that still holds the ids of the last decode step has the same rows (SGLang drops them when it filters or
    merges a batch), and the next id of a row is one more. So the last ids are not looked up, as SGLang does in every
    step; nor is anything evicted but for the blocks that the step opens, where SGLang would evict until every request
    has a free one. Where the pages do not suffice, SGLang answers.
    """
    allocator, requests = batch.token_to_kv_pool_allocator, batch.req_to_token_pool
    last = batch.out_cache_loc
    if last is None or last is not allocator.decoded:
        last = requests.req_to_token[batch.req_pool_indices, batch.seq_lens - 1]
    opens = allocator.rows_that_open(batch.seq_lens_cpu)
    if len(opens) > allocator.memory.pages.num_free:
        allocator.evict_to_free_tokens(batch.tree_cache, len(opens) * allocator.page_size)
    ids = allocator.next_ids(last, opens)
    if ids is None:
        return original(batch, token_per_req)
    requests.write((batch.req_pool_indices, batch.seq_lens), ids.to(torch.int32))
    for req in batch.reqs:
        req.kv.kv_allocated_len += 1
        req.kv.kv_committed_len += 1
    allocator.decoded = ids
    return ids


class CheckpointSlots(MambaSlotAllocator):
    """SGLang's state slots: virtual checkpoint ids, each with all its members and its conv state."""

    def __init__(self, memory: StateMemory, device: str) -> None:
        self.memory = memory
        self.store = memory.store
        super().__init__(size=memory.store.num_virtual, device=device)

    def available_size(self) -> int:
        """Slots that could be handed out now: in a shared pool the free pages decide, not the free ids."""
        return self.store.capacity()

    def alloc_group_begin(self, num_reqs: int) -> None:
        """Nothing is set aside for waiting requests: a slot costs pages that running ones may need."""

    def alloc_group_end(self) -> None:
        """See `alloc_group_begin`."""

    def take(self) -> int | None:
        """One slot as a number of the host; None if there is none."""
        try:
            return self.store.allocate_many(1)[0]
        except CapacityError:
            return None

    def alloc(self, need_size: int) -> torch.Tensor | None:
        try:
            slots = self.store.allocate_many(need_size)
        except CapacityError:
            return None
        return upload(slots, torch.int64, self.device)

    def free(self, free_index: torch.Tensor) -> None:
        """Return slots with all their parts: every one of them or, if one cannot be returned, none.

        Raises:
            ValueError: a slot is free already, has execution references, or comes twice.
        """
        slots = free_index.view(-1).tolist()
        kept = [v for v in slots if not self.store.is_live(v) or self.store.references_of(v)]
        if kept or len(set(slots)) != len(slots):
            raise ValueError(f"expected live slots without execution references, each once, got {slots}")
        for v in slots:
            lines = self.store.conv_row(v)
            members = self.store.member_row(v)
            self.store.free(v)
            if POISON_FREED:
                self.memory.pool.poison(recurrent_pages=members, conv_lines=lines)

    def clear(self) -> None:
        self.store.clear()


SEAMS: tuple[Seam, ...] = (
    Seam(
        "sglang.srt.mem_cache.allocation.alloc_for_decode_default",
        "around",
        allocate_decode,
        ("batch", "token_per_req"),
        "a decode step evicts for the blocks that it opens only, and looks nothing up",
    ),
)
