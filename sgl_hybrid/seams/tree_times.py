"""What the prefix tree costs: a process that builds one tree without a model and times its operations.

    python -m sgl_hybrid.seams.tree_times ARM --nodes 100000

ARM is an organization, or `stock-512` or `stock-16`: SGLang's own component over its Python tree core, with pages of
so many tokens. The pools are full: some prompts of `PROMPT_TOKENS` tokens, which are the oldest, and `--nodes` others
of one boundary, each with a state. A turn takes a prompt that is new: it is looked up; eviction makes room for it,
which costs the oldest prompt and so as much in every arm; it is inserted, and looked up again.

Each line on stdin is a number of turns. The answer is a line of JSON: the nanoseconds of this thread for each operation
of each turn. `bench micro tree` drives several such processes. Layout and states are tiny, counts are real.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from array import array
from contextlib import AbstractContextManager

from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from sgl_hybrid.config import ORGANIZATION_NAMES, MemorySettings
from sgl_hybrid.memory import Layout, StateGeometry, layout_for
from sgl_hybrid.memory.budget import Budget, Units, pages_for
from sgl_hybrid.seams import bare_tree
from sgl_hybrid.seams.bare_tree import BareTree
from sgl_hybrid.seams.sizing import MemoryPlan

PROMPT_TOKENS = 3332
BOUNDARY_TOKENS = 512
STOCK_PAGES = {"stock-512": 512, "stock-16": 16}
"""Tokens of a page of SGLang's own arms, as those of the shared organizations and of D0."""
NUM_PROMPTS = 64
"""Prompts that wait to be evicted, one for each turn."""
OPERATIONS = ("match_new", "evict", "insert", "match_cached")

GEOMETRY = StateGeometry(
    name="tree-times",
    family="tiny",
    num_layers=1,
    attention_layers=(0,),
    recurrent_layers=(0,),
    kv_heads=1,
    head_dim=1,
    kv_itemsize=2,
    ssm_heads=24,
    ssm_head_dim=8,
    d_state=16,
    ssm_itemsize=2,
    conv_channels=20,
    d_conv=3,
    conv_itemsize=2,
)
"""Falcon-H1-7B's proportions, 1 : 1536 : 20 elements, with 2 KiB for 512 tokens."""
FILLING = array("q", (position % 251 for position in range(PROMPT_TOKENS)))
"""The tokens of a prompt behind those that tell it from others."""


class Turns:
    """Fills a tree and takes turns on it. num_nodes: cached nodes besides the prompts that turns evict."""

    def __init__(self, built: BareTree, num_nodes: int) -> None:
        self._built = built
        self._serial = 0
        self._depth = PROMPT_TOKENS // BOUNDARY_TOKENS * BOUNDARY_TOKENS
        for _ in range(NUM_PROMPTS):
            self._insert(self._tokens(self._depth))
        for _ in range(num_nodes):
            self._insert(self._tokens(BOUNDARY_TOKENS))

    def take(self) -> dict[str, int]:
        """Take a turn; return the thread time of each operation [ns]."""
        tree, params = self._built.tree, MatchPrefixParams(key=RadixKey(self._tokens(PROMPT_TOKENS)))
        times = [time.thread_time_ns()]
        found = tree.match_prefix(params).device_prefix_len
        times.append(time.thread_time_ns())
        evicted = tree.evict_for_alloc(EvictParams(num_tokens=self._depth, mamba_num=1))
        times.append(time.thread_time_ns())
        if (found, evicted.num_tokens_evicted, evicted.mamba_num_evicted) != (0, self._depth, 1):
            raise RuntimeError(f"expected the oldest prompt to be evicted for a new one, got {found} and {evicted}")
        insert = self._insertion(params.key.token_ids[: self._depth])
        spent = {"match_new": times[1] - times[0], "evict": times[2] - times[1]}
        begun = time.thread_time_ns()
        tree.insert(insert)
        inserted = time.thread_time_ns()
        found = tree.match_prefix(params).device_prefix_len
        matched = time.thread_time_ns()
        if found != self._depth:
            raise RuntimeError(f"expected to find {self._depth} tokens, got {found}")
        return {**spent, "insert": inserted - begun, "match_cached": matched - inserted}

    def _insert(self, tokens: array[int]) -> None:
        self._built.tree.insert(self._insertion(tokens))

    def _insertion(self, tokens: array[int]) -> InsertParams:
        """Allocate what a request would have written, as the arguments of the tree's insertion."""
        ids, slot = self._built.tokens.alloc(len(tokens)), self._built.slots.alloc(1)
        if ids is None or slot is None:
            raise RuntimeError("expected room for a prompt, got none")
        return InsertParams(key=RadixKey(tokens), value=ids, mamba_value=slot, prev_prefix_len=0)

    def _tokens(self, length: int) -> array[int]:
        """A prompt that shares no block with another. The tree keeps the first block of a node as a tuple of integers;
        Python has small ones once, so that 100,000 nodes fit into a few GiB."""
        self._serial += 1
        return array("q", list(self._serial.to_bytes(4, "little"))) + FILLING[: length - 4]


def build(arm: str, num_nodes: int) -> BareTree:
    """Build the pools, full after `Turns`, and the tree of an arm. Needs `published_arguments`."""
    states = NUM_PROMPTS + num_nodes
    boundaries = NUM_PROMPTS * (PROMPT_TOKENS // BOUNDARY_TOKENS) + num_nodes
    if arm not in STOCK_PAGES:
        return bare_tree.build(_plan(arm, boundaries, states), num_requests=1, max_tokens=PROMPT_TOKENS)
    return bare_tree.build_stock(
        GEOMETRY,
        num_tokens=boundaries * BOUNDARY_TOKENS,
        num_states=states,
        page_tokens=STOCK_PAGES[arm],
        grid=BOUNDARY_TOKENS,
        max_tokens=PROMPT_TOKENS,
    )


def published_arguments(arm: str) -> AbstractContextManager[None]:
    """Publish SGLang's arguments as a server of the arm does."""
    return bare_tree.published_arguments(STOCK_PAGES.get(arm) or _layout(arm).page_tokens)


def _layout(arm: str) -> Layout:
    return layout_for(arm, GEOMETRY, checkpoint_interval=BOUNDARY_TOKENS, planes=1)


def _plan(arm: str, boundaries: int, states: int) -> MemoryPlan:
    layout = _layout(arm)
    blocks = boundaries * BOUNDARY_TOKENS // layout.page_tokens
    sizes = {"num_attention_pages": blocks, "num_checkpoints": states}
    if layout.shared:
        sizes = {"num_pages": pages_for(layout, blocks, states)}
    units = Units(layout=layout, budget=Budget(text="tree times", total_bytes=0, planes=1), **sizes)
    return MemoryPlan(MemorySettings(memory_org=arm), GEOMETRY, layout, units)


def main(arguments: list[str] | None = None) -> int:
    """Build the tree, say so, and answer each line of stdin; 0 when stdin ends."""
    parser = argparse.ArgumentParser(prog="python -m sgl_hybrid.seams.tree_times", description=__doc__.split("\n")[0])
    parser.add_argument("arm", choices=(*ORGANIZATION_NAMES, *STOCK_PAGES))
    parser.add_argument("--nodes", type=int, default=1000)
    options = parser.parse_args(arguments)
    with published_arguments(options.arm):
        # As SGLang's own /freeze_gc: what has been built is not scanned again by the collector. Nor while it is built,
        # when all that the collector finds is what stays.
        gc.disable()
        built = build(options.arm, options.nodes)
        turns = Turns(built, options.nodes)
        gc.collect()
        gc.freeze()
        gc.enable()
        core = type(built.tree.tree_core).__name__
        print(json.dumps({"arm": options.arm, "nodes": options.nodes, "tree_core": core}), flush=True)
        for line in sys.stdin:
            print(json.dumps([turns.take() for _ in range(int(line))]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
