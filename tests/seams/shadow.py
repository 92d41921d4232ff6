"""A small server with the naive tree beside it: after each call both agree, or the call fails.

What the server publishes is compared with what the tree then names, every eviction with the locks, and in a shared
organization with all candidates there were; `check` compares all units, sizes, bytes and the recency order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, EvictResult
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from radix.eviction import Candidate, Kind
from sgl_hybrid.memory.pages import PageKind
from sgl_hybrid.seams.sizing import MemoryPlan
from tests.oracles.tree import Found, NaiveTree, Prefix
from tests.seams.request_flow import Running, TinyServer
from tests.seams.tree_fixture import codes, named_units, start
from tests.tiny_layouts import PAGE_TOKENS


class Flight:
    """A running request and the prefix that it locks, with its state while `reads_state`."""

    def __init__(self, running: Running, locked: Prefix) -> None:
        self.running = running
        self.locked = locked
        self.reads_state = True

    @property
    def length(self) -> int:
        """Tokens consumed."""
        return self.running.req.kv.kv_committed_len

    @property
    def prompt_tokens(self) -> int:
        return len(self.running.req.origin_input_ids)

    @property
    def tokens_left(self) -> int:
        """Decode steps until the request has all the tokens that it asked for."""
        return self.running.req.sampling_params.max_new_tokens - len(self.running.req.output_ids) - 1

    @property
    def prefilled(self) -> bool:
        return self.running.req.prefix_len >= self.prompt_tokens

    def prefix(self, length: int) -> Prefix:
        return self.running.salt, self.running.tokens[:length]


Serve = Callable[..., "ShadowedServer"]


class ShadowedServer:
    """`TinyServer` and `NaiveTree`, call by call."""

    def __init__(self, plan: MemoryPlan) -> None:
        self.cache = start(plan)
        self.server = TinyServer(self.cache)
        self.shared = self.cache.memory.shared
        self.naive = NaiveTree(PAGE_TOKENS, plan.layout.checkpoint_interval)
        self.placement = plan.settings.placement
        self.flights: list[Flight] = []
        self.pins: list[tuple[Any, Prefix]] = []
        self.victims: Counter[Kind] = Counter()
        self._carry_out, self.cache.tree._carry_out = self.cache.tree._carry_out, self.watch
        self._evict, self.cache.tree.evict_for_alloc = self.cache.tree.evict_for_alloc, self.note_evictions
        self._evict_between, self.cache.tree.evict_between = self.cache.tree.evict_between, self.note_between

    def admit(self, *prompts: Prefix, new_tokens: int = 24) -> list[Flight]:
        """Let requests in, in one pass of the scheduler; those behind the first that has to wait are not looked at."""
        expected = [self.naive.find(salt, tokens[:-1]) for salt, tokens in prompts]
        admitted = self.server.admit(*prompts, new_tokens=new_tokens)
        for (salt, tokens), found, running in zip_longest(prompts, expected, admitted):
            prefix = (salt, tokens[: found.depth])
            self.naive.touch(prefix)
            if running is None:
                break
            assert (running.req.prefix_len, running.req.mamba_branching_seqlen) == (found.depth, found.branch)
            self.naive.locks[prefix] += 1
            self.flights.append(Flight(running, prefix))
        self.settle()
        return self.flights[len(self.flights) - len(admitted) :]

    def extend(self, *batch: Flight, end: int | None = None) -> bool:
        """Prefill requests in one batch, up to `end` at most, and publish; False if they had to be taken back."""
        begins = [flight.running.req.prefix_len for flight in batch]
        whole = [flight.prompt_tokens for flight in batch]
        stop = None if end is None or end >= min(whole) else end
        ends = [prompt_tokens if stop is None else stop for prompt_tokens in whole]
        wanted = [self.wanted(*chunk) for chunk in zip(batch, begins, ends, strict=True)]
        skipped = self.cache.memory.store.counts.skipped
        if not self.server.extend(*[flight.running for flight in batch], end=stop):
            for flight in batch:
                self.abort(flight)
            return False
        self.settle()
        taken = [self.tracked(flight) for flight in batch]
        assert all(set(some) <= set(positions) for some, positions in zip(taken, wanted, strict=True))
        assert sum(map(len, wanted)) - sum(map(len, taken)) == self.cache.memory.store.counts.skipped - skipped
        for flight, boundaries in zip(batch, taken, strict=True):
            self._publish(flight, boundaries)
        return True

    def wanted(self, flight: Flight, begin: int, end: int) -> list[int]:
        """The boundaries that a prefill of the tokens from `begin` to `end` is to keep."""
        grid = self.naive.grid
        boundaries = range(grid, flight.prompt_tokens + 1, grid)
        last = max((position for position in boundaries if position < flight.prompt_tokens), default=0)
        branch = flight.running.req.mamba_branching_seqlen or 0
        kept = {"all": set(boundaries), "last": {last}, "branch": {last, branch}}[self.placement]
        return sorted(position for position in kept if begin < position <= end)

    def tracked(self, flight: Flight) -> list[int]:
        """The boundaries whose states a request holds unpublished, by position."""
        req = flight.running.req
        before = [capture.position for capture in self.cache.tree.checkpoints.captures.of_request.get(req.rid, ())]
        return before if req.kv.mamba_last_track_seqlen is None else [*before, req.kv.mamba_last_track_seqlen]

    def _publish(self, flight: Flight, boundaries: Sequence[int]) -> None:
        """Publish what the last chunk has tracked."""
        self.server.publish(flight.running)
        self._relock(flight, flight.locked, state=False)
        _, states = named_units(self.cache)
        for boundary in boundaries:
            prefix = flight.prefix(boundary)
            self.naive.publish(prefix, self.pages_of(flight, boundary), states[prefix])
        self.settle()
        if boundaries:
            self._relock(flight, flight.prefix(boundaries[-1]), state=False)
            assert flight.running.req.kv.cache_protected_len == boundaries[-1]

    def decode(self, flight: Flight, token: int) -> bool:
        """Run one decode step; False if the request had to be taken back."""
        skipped = self.cache.memory.store.counts.skipped
        if not self.server.decode(flight.running, token):
            self.abort(flight)
            return False
        self._relock(flight, flight.locked, state=False)
        if flight.length % self.naive.grid or self.cache.memory.store.counts.skipped > skipped:
            self.settle()
        else:
            self._settle_published(flight, flight.length, state=True)
        return True

    def finish(self, flight: Flight) -> None:
        self.server.finish(flight.running)
        self.settle()
        self._drop(flight)

    def abort(self, flight: Flight) -> None:
        self.server.abort(flight.running)
        self.settle()
        self._drop(flight)

    def serve(self, tokens: Sequence[int], *, salt: str | None = None, chunk: int | None = None) -> int:
        """Serve a prompt without output, in chunks; return the tokens it found cached."""
        (flight,) = self.admit((salt, tuple(tokens)))
        found = flight.running.req.prefix_len
        while not flight.prefilled:
            assert self.extend(flight, end=None if chunk is None else flight.running.req.prefix_len + chunk)
        self.finish(flight)
        return found

    def probe(self, tokens: Sequence[int], salt: str | None = None, *, pin: bool = False) -> Found:
        """Look a prefix up; nodes are split. With `pin`, lock what was found."""
        found = self.naive.find(salt, tokens)
        result = self.server.match(tokens, salt)
        branch = found.branch if len(tokens) >= PAGE_TOKENS else None
        assert (result.device_prefix_len, result.full_kv_hit_length) == (found.depth, found.attention)
        assert result.mamba_branching_seqlen == branch
        prefix = (salt, tuple(tokens[: found.depth]))
        self.naive.touch(prefix)
        if pin:
            self.pins.append((self.cache.tree.lock(result.last_device_node), prefix))
            self.naive.locks[prefix] += 1
        self.settle()
        return found

    def depths(self, tokens: tuple[int, ...]) -> list[int]:
        """Return the lengths, in blocks, of the prefixes of `tokens` whose state is cached."""
        return sorted(len(prefix) // PAGE_TOKENS for _, prefix in self.naive.states if tokens[: len(prefix)] == prefix)

    def unpin(self, position: int = 0) -> None:
        lock, prefix = self.pins.pop(position)
        self.cache.tree.unlock(lock)
        self.naive.locks[prefix] -= 1

    def run_short(self, *, pages: int = 0, slots: int = 0) -> None:
        """Evict for missing pages or slots as SGLang asks for it: they are there then, or nothing was left to evict."""
        before = self.available(slots > 0)
        self.cache.tree.evict_for_alloc(EvictParams(num_tokens=pages * PAGE_TOKENS, mamba_num=slots))
        self.settle()
        assert self.available(slots > 0) >= before + pages + slots or self.nothing_left(slots > 0)

    def run_dry(self, *, slots: bool) -> int:
        """Take all pages or slots that can be had, one by one, and give them back; return how many there were."""
        taken = []
        while (unit := self._take_one(slots)) is not None:
            taken.append(unit)
        self.settle()
        assert self.nothing_left(slots)
        if taken:
            (self.cache.slots if slots else self.cache.tokens).free(torch.cat(taken))
        return len(taken)

    def reclaim(self, page: int) -> list[Prefix]:
        """Take a slab back; return the prefixes that had their state in it. They, all of them and no others, are out of
        the tree, and the page is free."""
        store = self.cache.memory.store
        mates = set(store.reclaim(page))
        before = dict(self.naive.states)
        lost = self._lose_to(Candidate(Kind.SLAB, 0.0, page))
        assert {before[prefix] for prefix in lost} == mates
        assert store.pages.kind_of(page) is PageKind.FREE
        return lost

    def evict_state(self, prefix: Prefix) -> None:
        """Evict the state of one prefix, whatever its turn."""
        node = self.cache.tree.checkpoints.node_of[self.naive.states[prefix]]
        assert self._lose_to(Candidate(Kind.CHECKPOINT, 0.0, node.id)) == [prefix]

    def flush(self) -> None:
        """End all requests and drop everything cached."""
        while self.flights:
            self.abort(self.flights[0])
        while self.pins:
            self.unpin()
        self.server.flush()
        self.naive.clear()
        memory = self.cache.memory
        assert (memory.pages.num_free, memory.store.num_free_ids) == (memory.pages.num_pages, memory.store.num_virtual)

    def watch(self, victim: Candidate, tracker: dict[Any, int]) -> None:
        """Carry out an eviction: the victim is the least recent of all that could go, in D0 of its kind."""
        self.victims[victim.kind] += 1
        component, core, naive = self.cache.tree.checkpoints, self.cache.tree.tree_core, self.naive
        unlocked = [naive.states[prefix] for prefix in naive.by_use() if prefix not in naive.locked_states()]
        times = [component.recency(component.node_of[v]) for v in unlocked]
        leaves = [node.last_access_time for node in core._collect_all_nodes() if core._is_device_leaf(node)]
        if self.shared:
            times += leaves
        elif victim.kind is Kind.ATTENTION:
            times = leaves
        assert victim.recency == min(times)
        if victim.kind is Kind.CHECKPOINT:
            assert victim.key == component.node_of[unlocked[0]].id
        self._carry_out(victim, tracker)
        naive.lose(*naive.lost_to(*named_units(self.cache)))

    def note_evictions(self, params: EvictParams, **options: Any) -> EvictResult:
        """Evict; tell the oracle what is gone, unless `watch` has, and compare the counts returned."""
        blocks, states = len(self.naive.blocks), len(self.naive.states)
        result = self._evict(params, **options)
        self.naive.lose(*self.naive.lost_to(*named_units(self.cache)))
        assert result.num_tokens_evicted == (blocks - len(self.naive.blocks)) * PAGE_TOKENS
        assert result.mamba_num_evicted == states - len(self.naive.states)
        return result

    def note_between(self) -> bool:
        """Evict one checkpoint to make room for one between others: the least recent, no branch point of the tree."""
        by_use = [prefix for prefix in self.naive.by_use() if prefix not in self.naive.locked_states()]
        evicted = self._evict_between()
        blocks, states = self.naive.lost_to(*named_units(self.cache))
        self.naive.lose(blocks, states)
        assert states == ({by_use[0]} if evicted else set())
        return evicted

    def settle(self, publisher: Flight | None = None, depth: int = 0, pages: Sequence[int] = ()) -> None:
        """Tell the oracle what `publisher` has given the tree; then both name the same units."""
        blocks, states = named_units(self.cache)
        if publisher is not None:
            prefix = publisher.prefix(depth)
            self.naive.publish(prefix, pages, states[prefix])
        assert (blocks, states) == (self.naive.blocks, self.naive.states)

    def available(self, slots: bool) -> int:
        return self.cache.slots.available_size() if slots else self.cache.tokens.available_size() // PAGE_TOKENS

    def nothing_left(self, slots: bool) -> bool:
        """Tell whether everything cached that could be evicted for one kind is locked."""
        states = self.naive.states.keys() <= self.naive.locked_states()
        blocks = self.naive.blocks.keys() <= self.naive.locked_blocks()
        return (states and blocks) if self.shared else (states if slots else blocks)

    def pages_of(self, flight: Flight, length: int, *, begin: int = 0) -> list[int]:
        """Return the attention pages of a request's tokens."""
        row = self.cache.requests.req_to_token[flight.running.req.kv.req_pool_idx, begin:length]
        return (row[::PAGE_TOKENS] // self.cache.tokens.pitch).tolist()

    def check(self) -> None:
        """Verify every ledger, the tree, and that both hold what the oracle says."""
        self.cache.memory.check()
        self.cache.tree.sanity_check()
        self.naive.check()
        self._check_holders()
        self._check_bytes()
        self._check_recency()

    def _check_holders(self) -> None:
        """Every state slot and attention page has one holder, a request or the tree, and the sizes say so."""
        store, tree, naive = self.cache.memory.store, self.cache.tree, self.naive
        slots = [slot for flight in self.flights for slot in flight.running.slots]
        named = list(naive.states.values())
        assert len({*slots, *named}) == len(slots) + len(named)
        assert (store.num_active, store.num_cached + store.num_referenced) == (len(slots), len(named))
        assert store.num_referenced == len(naive.locked_states())
        assert tree.checkpoints.node_of.keys() == set(named)
        pages = list(naive.blocks.values())
        for flight in self.flights:
            kv = flight.running.req.kv
            if kv.holds_kv:
                pages += self.pages_of(flight, kv.kv_allocated_len, begin=kv.cache_protected_len)
        assert sorted(pages) == self.cache.memory.pages.held(PageKind.ATTENTION)
        assert tree.full_evictable_size() == len(naive.blocks.keys() - naive.locked_blocks()) * PAGE_TOKENS
        assert tree.mamba_evictable_size() == len(named) - store.num_referenced

    def _check_bytes(self) -> None:
        """Every state and token that the tree names or a request stands on is what was written there once."""
        expected = {v: codes(*prefix)[-1] for prefix, v in self.naive.states.items()}
        for flight in self.flights:
            if flight.running.req.kv.holds_mamba:
                source = self.cache.requests.mamba_pool.source[int(flight.running.req.kv.mamba_pool_idx)]
                expected[int(source)] = codes(flight.running.salt, flight.running.tokens)[flight.length - 1]
        assert self.cache.contents.wrong_states(expected) == []
        pitch, size = self.cache.tokens.pitch, PAGE_TOKENS
        ids = [page * pitch + position for page in self.naive.blocks.values() for position in range(size)]
        numbers = [code for prefix in self.naive.blocks for code in codes(*prefix)[-size:]]
        assert self.cache.contents.wrong_tokens(torch.tensor(ids, dtype=torch.int64), numbers) == []

    def _check_recency(self) -> None:
        """The tree's order of checkpoints is the oracle's."""
        component = self.cache.tree.checkpoints
        nodes = [component.node_of[self.naive.states[prefix]] for prefix in self.naive.by_use()]
        times = [component.recency(node) for node in nodes]
        assert times == sorted(times)
        lru, found = self.cache.tree.tree_core.lru_lists[ComponentType.MAMBA], []
        node = lru.tail.lru_prev[lru._pt]
        while node is not lru.head:
            found.append(node)
            node = node.lru_prev[lru._pt]
        assert found == nodes

    def _lose_to(self, victim: Candidate) -> list[Prefix]:
        """Carry out an eviction that no shortage asked for; return the prefixes that lost their state."""
        self._carry_out(victim, dict.fromkeys(self.cache.tree.tree_components, 0))
        blocks, states = self.naive.lost_to(*named_units(self.cache))
        self.naive.lose(blocks, states)
        return list(states)

    def _take_one(self, slots: bool) -> torch.Tensor | None:
        if slots:
            slot = self.cache.tree.checkpoints.slot_or_none(evict=True)
            return None if slot is None else torch.tensor([slot])
        self.cache.tokens.evict_to_free_tokens(self.cache.tree, PAGE_TOKENS)
        return self.cache.tokens.alloc(PAGE_TOKENS)

    def _drop(self, flight: Flight) -> None:
        self.flights.remove(flight)
        self._lock_of(flight)[flight.locked] -= 1

    def _settle_published(self, flight: Flight, boundary: int, *, state: bool) -> None:
        self.settle(flight, boundary, self.pages_of(flight, boundary))
        self._relock(flight, flight.prefix(boundary), state=state)
        assert flight.running.req.kv.cache_protected_len == boundary

    def _relock(self, flight: Flight, prefix: Prefix, *, state: bool) -> None:
        """Move the lock of a request to `prefix`, with its state or without."""
        self._lock_of(flight)[flight.locked] -= 1
        flight.locked, flight.reads_state = prefix, state
        self._lock_of(flight)[prefix] += 1

    def _lock_of(self, flight: Flight) -> Counter[Prefix]:
        return self.naive.locks if flight.reads_state else self.naive.path_locks
