"""The ids of a decode step: for the blocks that it opens, and behind the last ids otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sgl_hybrid.memory import ORGANIZATIONS
from sgl_hybrid.seams.allocators import allocate_decode
from tests.seams.tree_fixture import Cache, start, tiny_plan
from tests.tiny_layouts import PAGE_TOKENS

FULL = PAGE_TOKENS
"""Tokens of a row whose next one opens a block."""
pytestmark = pytest.mark.usefixtures("published")


@pytest.fixture(params=sorted(ORGANIZATIONS))
def cache(request: pytest.FixtureRequest) -> Cache:
    return start(tiny_plan(request.param, pages=24, checkpoints=5))


def decoding(cache: Cache, rows: Sequence[list[int]]) -> Any:
    """A batch of requests with these ids, as far as a decode step's allocation reads it."""
    table = torch.full((len(rows), 5 * PAGE_TOKENS), -1, dtype=torch.int32)
    for number, row in enumerate(rows):
        table[number, : len(row)] = torch.tensor(row, dtype=torch.int32)
    lengths = torch.tensor([len(row) for row in rows])
    return SimpleNamespace(
        token_to_kv_pool_allocator=cache.tokens,
        req_to_token_pool=SimpleNamespace(req_to_token=table, write=table.__setitem__),
        tree_cache=None,
        out_cache_loc=None,
        req_pool_indices=torch.arange(len(rows)),
        seq_lens=lengths,
        seq_lens_cpu=lengths,
        reqs=[SimpleNamespace(kv=SimpleNamespace(kv_allocated_len=len(r), kv_committed_len=len(r))) for r in rows],
    )


@pytest.mark.parametrize(
    ("lengths", "evicted"), [((3, 5, 7), []), ((3, FULL, 7), []), ((FULL, FULL, 7), [1]), ((FULL, FULL, FULL), [2])]
)
def test_a_decode_step_evicts_for_the_blocks_that_it_opens(
    cache: Cache, lengths: tuple[int, ...], evicted: list[int]
) -> None:
    """With one page free, `evicted` more are asked for; SGLang would ask for one for each of the three requests."""
    tokens, asked = cache.tokens, []
    rows = [tokens.alloc(PAGE_TOKENS).tolist()[:length] for length in lengths]
    rest = tokens.alloc((cache.memory.pages.num_free - 1) * PAGE_TOKENS)

    def evict(params: EvictParams) -> None:
        asked.append(params.num_tokens)
        tokens.free(rest[: params.num_tokens])

    batch = decoding(cache, rows)
    batch.tree_cache = SimpleNamespace(supports_prefix_sharing=lambda: True, evict_for_alloc=evict)
    ids = allocate_decode(pytest.fail, batch, 1)
    assert asked == [PAGE_TOKENS * count for count in evicted]
    opened = [length == FULL for length in lengths]
    assert [int(i) % tokens.pitch == 0 for i in ids] == opened
    assert all(int(i) == row[-1] + 1 for i, row, opens in zip(ids, rows, opened, strict=True) if not opens)


def test_decode_steps_go_on_where_each_request_stands(cache: Cache) -> None:
    """Over blocks, with a request that ends and one that comes; the request table has every id, and no id has two."""
    tokens = cache.tokens
    rows = [tokens.alloc(PAGE_TOKENS).tolist()[:length] for length in (1, FULL - 1, FULL)]
    batch = decoding(cache, rows)
    for step in range(3 * PAGE_TOKENS):
        if step == PAGE_TOKENS:
            del rows[1]
            rows.append(tokens.alloc(PAGE_TOKENS).tolist()[:2])
            batch = decoding(cache, rows)
        batch.out_cache_loc = allocate_decode(pytest.fail, batch, 1)
        batch.seq_lens, batch.seq_lens_cpu = batch.seq_lens + 1, batch.seq_lens_cpu + 1
        for row, token in zip(rows, batch.out_cache_loc.tolist(), strict=True):
            row.append(token)
    for row, number, req in zip(rows, batch.req_pool_indices.tolist(), batch.reqs, strict=True):
        assert batch.req_to_token_pool.req_to_token[number, : len(row)].tolist() == row
        assert req.kv.kv_allocated_len == req.kv.kv_committed_len == len(row)
        firsts = row[::PAGE_TOKENS]
        assert [first % tokens.pitch for first in firsts] == [0] * len(firsts)
        assert row == [first + place for first in firsts for place in range(PAGE_TOKENS)][: len(row)]
    assert len({token for row in rows for token in row}) == sum(map(len, rows))


def test_ids_of_another_batch_are_not_gone_on_from(cache: Cache) -> None:
    """Two batches that decode in turn, as with pipeline stages: each goes on from its own ids."""
    tokens = cache.tokens
    first, second = (decoding(cache, [tokens.alloc(PAGE_TOKENS).tolist()[:2]]) for _ in range(2))
    held = [int(batch.req_to_token_pool.req_to_token[0, 1]) for batch in (first, second)]
    for step in range(1, 3):
        for batch, last in zip((first, second), held, strict=True):
            batch.out_cache_loc = allocate_decode(pytest.fail, batch, 1)
            batch.seq_lens, batch.seq_lens_cpu = batch.seq_lens + 1, batch.seq_lens_cpu + 1
            assert batch.out_cache_loc.tolist() == [last + step]


def test_sglang_answers_a_decode_step_without_pages(cache: Cache) -> None:
    tokens = cache.tokens
    batch = decoding(cache, [tokens.alloc(PAGE_TOKENS).tolist()])
    tokens.alloc(cache.memory.pages.num_free * PAGE_TOKENS)
    batch.tree_cache = SimpleNamespace(supports_prefix_sharing=lambda: False)
    assert allocate_decode(lambda *a: ("theirs", *a), batch, 1) == ("theirs", batch, 1)
    assert batch.reqs[0].kv.kv_committed_len == PAGE_TOKENS
