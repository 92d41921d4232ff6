"""The memory, pools, allocators and tree of one organization on the CPU: the real seams, small, without a model.

`Contents` plays what a model computes: the state and the attention at a position are a number that depends on the salt
and on every token up to there. A page that was lost, reused or mixed up then shows as a wrong number. What the
allocators get back is filled with NaN, and published checkpoints are hashed.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from sgl_hybrid.config import MemorySettings
from sgl_hybrid.memory import layout_for
from sgl_hybrid.memory.budget import Budget, Units
from sgl_hybrid.memory.state_memory import StateMemory
from sgl_hybrid.seams import allocators, bare_tree, factory, process
from sgl_hybrid.seams.allocators import BlockAllocator, CheckpointSlots
from sgl_hybrid.seams.sizing import MemoryPlan
from tests.oracles.tree import Prefix
from tests.tiny_layouts import PAGE_TOKENS, tiny_geometry

MAX_REQUESTS = 32
MAX_TOKENS = 512
NUM_CODES = 0x7000  # Read as bfloat16 these are finite, so NaN is no code.


class Cache(NamedTuple):
    """What `start` builds. `tree` is the prefix cache, `requests` SGLang's pool of request rows and state slots."""

    memory: StateMemory
    tokens: BlockAllocator
    slots: CheckpointSlots
    requests: HybridReqToTokenPool
    tree: factory.OrganizationRadixCache
    contents: Contents


@contextmanager
def published_arguments() -> Iterator[None]:
    """Publish SGLang's arguments as a server does and poison what is freed; put the process's state back afterwards."""
    before = HybridReqToTokenPool.mamba_pool_cls, process._served, allocators.POISON_FREED, process.DEBUG_CHECKPOINTS
    allocators.POISON_FREED = process.DEBUG_CHECKPOINTS = True
    try:
        with bare_tree.published_arguments(PAGE_TOKENS):
            yield
    finally:
        HybridReqToTokenPool.mamba_pool_cls, process._served, allocators.POISON_FREED, process.DEBUG_CHECKPOINTS = (
            before
        )


def tiny_plan(
    org: str,
    *,
    pages: int,
    checkpoints: int,
    grid_blocks: int = 1,
    slab_reclaim: str | None = None,
    placement: str = "branch",
    **shape: int,
) -> MemoryPlan:
    """Plan a pool of `pages`; in a dual organization that is the attention pool, beside one of `checkpoints`.

    grid_blocks: the checkpoint grid in blocks. placement: `--checkpoint-placement`. shape: `tiny_geometry`'s.
    """
    geometry = tiny_geometry(**shape)
    layout = layout_for(org, geometry, page_tokens=PAGE_TOKENS, checkpoint_interval=grid_blocks * PAGE_TOKENS, planes=1)
    budget = Budget(text="tiny", total_bytes=0, planes=1)
    sizes = {"num_pages": pages} if layout.shared else {"num_attention_pages": pages, "num_checkpoints": checkpoints}
    units = Units(layout=layout, budget=budget, **sizes)
    settings = MemorySettings(
        memory_org=org, slab_reclaim=slab_reclaim, checkpoint_placement=placement, admission_headroom=0.0
    )
    return MemoryPlan(settings, geometry, layout, units)


def start(plan: MemoryPlan, *, sessions: bool = False) -> Cache:
    """Build everything for a plan and serve it in this process. Needs `published_arguments`.

    sessions: `--enable-session-radix-cache`.
    """
    bare = bare_tree.build(plan, num_requests=MAX_REQUESTS, max_tokens=MAX_TOKENS, sessions=sessions)
    memory = process.served().memory
    return Cache(memory, bare.tokens, bare.slots, bare.requests, bare.tree, Contents(memory))


@lru_cache(maxsize=4096)
def codes(salt: str | None, tokens: tuple[int, ...]) -> tuple[int, ...]:
    """Return a number for each position, a function of the salt and of the tokens up to it."""
    value, found = zlib.crc32(repr(salt).encode()), []
    for token in tokens:
        value = zlib.crc32(token.to_bytes(8, "little"), value)
        found.append(value % NUM_CODES)
    return tuple(found)


class Contents:
    """The planes' bytes as numbers of 16 bits."""

    def __init__(self, memory: StateMemory) -> None:
        pool, layout = memory.pool, memory.layout
        layer = layout.geometry.attention_layers[0]
        self.memory = memory
        self.rows = [rows.view(torch.int16) for rows in (pool.key_rows(layer), pool.value_rows(layer))]
        self.members = pool.member_planes().view(torch.int16)
        self.lines = [pool.conv_planes(group).view(torch.int16) for group in range(layout.groups)]

    def write_tokens(self, ids: torch.Tensor, numbers: Sequence[int]) -> None:
        """Write K and V of some token ids."""
        for rows in self.rows:
            rows[ids] = torch.tensor(numbers, dtype=torch.int16)[:, None, None]

    def wrong_tokens(self, ids: torch.Tensor, numbers: Sequence[int]) -> list[int]:
        """Return the token ids whose K or V is another number."""
        expected = torch.tensor(numbers, dtype=torch.int16)[:, None, None]
        wrong = torch.stack([(rows[ids] != expected).flatten(1).any(1) for rows in self.rows]).any(0)
        return ids[wrong].tolist()

    def write_state(self, slot: int, number: int) -> None:
        """Write the recurrent and conv state of a slot, where the device tables say it is."""
        members, lines = self._rows_of([slot])
        self.members[:, members[0]] = number
        for group, plane in enumerate(self.lines):
            plane[:, lines[0, group % lines.shape[1]]] = number + group + 1

    def wrong_states(self, expected: dict[int, int]) -> list[int]:
        """Return the slots that hold another number than expected. expected: {slot: number}."""
        if not expected:
            return []
        slots = list(expected)
        members, lines = self._rows_of(slots)
        numbers = torch.tensor(list(expected.values()), dtype=torch.int16)
        found = self.members[:, members].transpose(0, 1).flatten(1)
        wrong = (found != numbers[:, None]).any(1) | (members < 0).any(1)
        for group, plane in enumerate(self.lines):
            column = lines[:, group % lines.shape[1]]
            wrong |= (plane[:, column].transpose(0, 1).flatten(1) != numbers[:, None] + group + 1).any(1) | (column < 0)
        return [slot for slot, bad in zip(slots, wrong.tolist(), strict=True) if bad]

    def _rows_of(self, slots: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        pool = self.memory.pool
        pool.update_tables(self.memory.store)
        return pool.member_table[slots].long(), pool.conv_line[slots].long()


def named_units(cache: Cache) -> tuple[dict[Prefix, int], dict[Prefix, int]]:
    """Return the attention page of each cached block and the checkpoint of each cached state, by prefix."""
    blocks: dict[Prefix, int] = {}
    states: dict[Prefix, int] = {}
    size, pitch = cache.tokens.page_size, cache.tokens.pitch
    component = cache.tree.checkpoints
    pending: list[tuple[Any, tuple[int, ...]]] = [(cache.tree.root_node, ())]
    while pending:
        node, before = pending.pop()
        tokens = before + tuple(node.key.token_ids[: len(node.key)])
        salt = node.key.cache_salt
        if node is not cache.tree.root_node:
            ids = node.component_data[ComponentType.FULL].value.tolist()
            assert len(ids) == len(node.key)
            for start in range(0, len(ids), size):
                page, rest = divmod(ids[start], pitch)
                assert rest == 0
                assert ids[start : start + size] == list(range(ids[start], ids[start] + size))
                blocks[salt, tokens[: len(before) + start + size]] = page
            checkpoint = component.checkpoint_of(node)
            if checkpoint is not None:
                states[salt, tokens] = checkpoint
        pending.extend((child, tokens) for child in node.children.values())
    return blocks, states
