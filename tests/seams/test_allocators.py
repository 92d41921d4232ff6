"""SGLang's token and slot allocators over pages and checkpoints, in every organization."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_hybrid.memory import ORGANIZATIONS
from sgl_hybrid.memory.pages import PageKind
from sgl_hybrid.seams.allocators import BlockAllocator, CheckpointSlots
from tests.seams.tree_fixture import Cache, start, tiny_plan
from tests.tiny_layouts import PAGE_TOKENS

ORGS = sorted(ORGANIZATIONS)
pytestmark = pytest.mark.usefixtures("published")


@pytest.fixture(params=ORGS)
def cache(request: pytest.FixtureRequest) -> Cache:
    return start(tiny_plan(request.param, pages=24, checkpoints=5))


def snapshot(cache: Cache) -> tuple[object, ...]:
    memory = cache.memory
    pages = [memory.pages.held(kind) for kind in PageKind]
    store = memory.store
    rows = [(store.member_row(v), store.conv_row(v), store.life_of(v)) for v in range(store.num_virtual + 1)]
    return pages, rows, store.free_ids(), store.ledgers()


def extend(tokens: BlockAllocator, rows: Sequence[list[int]], lengths: Sequence[int]) -> torch.Tensor | None:
    """Ask for the ids that bring each row to its length, as SGLang does."""
    prefixes = torch.tensor([len(row) for row in rows])
    ends = torch.tensor(list(lengths))
    last = torch.tensor([row[-1] if row else -1 for row in rows])
    return tokens.alloc_extend(prefixes, prefixes, ends, ends, last, int((ends - prefixes).sum()))


def decode(tokens: BlockAllocator, rows: Sequence[list[int]]) -> torch.Tensor | None:
    """Ask for one more id of each row, as SGLang does."""
    lengths = torch.tensor([len(row) + 1 for row in rows])
    return tokens.alloc_decode(lengths, lengths, torch.tensor([row[-1] for row in rows]))


def test_a_token_id_is_the_row_of_the_token_in_the_planes(cache: Cache) -> None:
    tokens, pool = cache.tokens, cache.memory.pool
    assert (tokens.pitch > PAGE_TOKENS) == (cache.memory.layout.organization == "s0")
    ids = tokens.alloc(2 * PAGE_TOKENS)
    cache.contents.write_tokens(ids, list(range(1, 2 * PAGE_TOKENS + 1)))
    block = cache.memory.layout.block_bytes
    for number, page in enumerate((ids[::PAGE_TOKENS] // tokens.pitch).tolist()):
        found = pool.attention_planes[0, page].view(torch.int16)
        assert found[: block // 2].unique().tolist() == list(range(16 * number + 1, 16 * number + 17))
        assert not found[block // 2 :].any()
    assert ids.unique().numel() == ids.numel()
    assert sorted((ids // tokens.pitch).unique().tolist()) == cache.memory.pages.held(PageKind.ATTENTION)


@pytest.mark.parametrize("org", ORGS)
@settings(deadline=None, max_examples=60)
@given(
    batches=st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=4), min_size=1, max_size=4),
    steps=st.integers(0, 40),
)
def test_extend_and_decode_fill_blocks_in_order(org: str, batches: list[list[int]], steps: int) -> None:
    """The ids of a row run through whole blocks, block after block, whatever the chunks; None changes nothing."""
    cache = start(tiny_plan(org, pages=40, checkpoints=5))
    tokens = cache.tokens
    rows: list[list[int]] = [[] for _ in range(4)]

    def grow(chosen: list[list[int]], lengths: list[int], ids: torch.Tensor | None) -> None:
        blocks = sum(
            -(-length // PAGE_TOKENS) - -(-len(row) // PAGE_TOKENS) for row, length in zip(chosen, lengths, strict=True)
        )
        if ids is None:
            assert blocks > free
            assert cache.memory.pages.num_free == free
            return
        assert blocks == free - cache.memory.pages.num_free
        given = iter(ids.tolist())
        for row, length in zip(chosen, lengths, strict=True):
            row.extend(next(given) for _ in range(length - len(row)))
        assert next(given, None) is None

    for grown in batches:
        free = cache.memory.pages.num_free
        chosen = rows[: len(grown)]
        lengths = [len(row) + more for row, more in zip(chosen, grown, strict=True)]
        grow(chosen, lengths, extend(tokens, chosen, lengths))
    for _ in range(steps):
        free = cache.memory.pages.num_free
        chosen = [row for row in rows if row]
        if chosen:
            grow(chosen, [len(row) + 1 for row in chosen], decode(tokens, chosen))
    pages = [row[begin] // tokens.pitch for row in rows for begin in range(0, len(row), PAGE_TOKENS)]
    assert sorted(pages) == cache.memory.pages.held(PageKind.ATTENTION)
    for row in rows:
        for begin in range(0, len(row), PAGE_TOKENS):
            block = row[begin : begin + PAGE_TOKENS]
            first = block[0] // tokens.pitch * tokens.pitch
            assert block == list(range(first, first + len(block)))


def test_b39_a_batch_that_does_not_fit_takes_nothing(cache: Cache) -> None:
    tokens = cache.tokens
    blocks = cache.memory.pages.num_free
    held = tokens.alloc((blocks - 2) * PAGE_TOKENS)
    before = snapshot(cache)
    assert tokens.alloc(3 * PAGE_TOKENS) is None
    assert extend(tokens, [[], []], [PAGE_TOKENS + 1, PAGE_TOKENS]) is None
    full = held[:PAGE_TOKENS].tolist()
    assert decode(tokens, [full, full, full]) is None
    assert snapshot(cache) == before
    assert extend(tokens, [[], []], [PAGE_TOKENS, PAGE_TOKENS]) is not None


def test_a_prefill_evicts_for_the_blocks_that_it_opens(cache: Cache) -> None:
    prefixes, ends = (
        torch.tensor([0, 3, PAGE_TOKENS, 5]),
        torch.tensor([1, PAGE_TOKENS, PAGE_TOKENS + 1, 3 * PAGE_TOKENS]),
    )
    wanted = cache.tokens.get_extend_allocation_demand(prefixes, ends, conservative_num_tokens=10**6, shard_size=1)
    assert wanted == (1 + 0 + 1 + 2) * PAGE_TOKENS


@pytest.mark.parametrize("again", ["twice", "a part", "with a held one", "the padding page", "a foreign page"])
def test_b42_a_page_that_is_not_held_is_refused(cache: Cache, again: str) -> None:
    tokens = cache.tokens
    ids, other = tokens.alloc(2 * PAGE_TOKENS), tokens.alloc(PAGE_TOKENS)
    tokens.free(ids)
    slot = cache.slots.alloc(1)
    foreign = cache.memory.store.member_row(int(slot))[0] if cache.memory.shared else cache.memory.pages.num_pages + 1
    wrong = {
        "twice": ids,
        "a part": ids[3:5],
        "with a held one": torch.cat((other, ids)),
        "the padding page": torch.arange(3),
        "a foreign page": torch.tensor([foreign * tokens.pitch]),
    }[again]
    before = snapshot(cache)
    with pytest.raises(ValueError, match="expected"):
        tokens.free(wrong)
    assert snapshot(cache) == before


def test_a_free_group_frees_at_its_end_what_it_was_given(cache: Cache) -> None:
    tokens = cache.tokens
    ids = tokens.alloc(3 * PAGE_TOKENS)
    before = snapshot(cache)
    tokens.free_group_begin()
    view = ids.clone()
    tokens.free(view[:PAGE_TOKENS])
    tokens.free_segment(view[PAGE_TOKENS : PAGE_TOKENS + 5], start_pos=0)
    tokens.free(view[:0])
    view.zero_()
    assert snapshot(cache) == before
    tokens.free_group_end()
    assert cache.memory.pages.held(PageKind.ATTENTION) == [int(ids[-1]) // tokens.pitch]
    tokens.free_group_begin()
    tokens.free_group_end()
    assert tokens.free_group is None


def test_a_segment_frees_each_of_its_pages_once(cache: Cache) -> None:
    tokens = cache.tokens
    ids = tokens.alloc(3 * PAGE_TOKENS)
    with pytest.raises(ValueError, match=f"multiple of {PAGE_TOKENS}, got 3"):
        tokens.free_segment(ids[3:], start_pos=3)
    tokens.free_segments([(ids[:20], 0), (ids[32:40], 32)])
    tokens.free_segment(ids[:0], start_pos=1)
    assert cache.memory.pages.held(PageKind.ATTENTION) == []


def test_size_is_what_attention_has_and_could_have(cache: Cache) -> None:
    tokens, memory = cache.tokens, cache.memory
    whole = memory.pages.num_pages * PAGE_TOKENS
    assert tokens.size == tokens.available_size() == whole
    ids = tokens.alloc(PAGE_TOKENS + 1)
    assert (tokens.size, tokens.available_size()) == (whole, whole - 2 * PAGE_TOKENS)
    cache.slots.alloc(2)
    states = memory.pages.num_pages - memory.pages.num_free - 2
    assert (states > 0) == memory.shared
    assert (tokens.size, tokens.available_size()) == (
        whole - states * PAGE_TOKENS,
        whole - (states + 2) * PAGE_TOKENS,
    )
    tokens.size = 1
    assert tokens.size == whole - states * PAGE_TOKENS
    tokens.free(ids)
    assert tokens.available_size() == tokens.size_full == whole - states * PAGE_TOKENS


def test_clearing_tokens_leaves_states(cache: Cache) -> None:
    cache.tokens.alloc(5 * PAGE_TOKENS)
    (slot,) = cache.slots.alloc(1).tolist()
    cache.contents.write_state(slot, 9)
    cache.tokens.free_group_begin()
    cache.tokens.clear()
    assert cache.memory.pages.held(PageKind.ATTENTION) == []
    assert cache.tokens.free_group is None
    assert cache.contents.wrong_states({slot: 9}) == []
    cache.memory.check()


def test_byte_accounting_names_what_is_wrong(cache: Cache) -> None:
    cache.slots.alloc(1)
    assert cache.tokens.verify_byte_accounting() == []
    cache.memory.store.num_cached += 1
    (message,) = cache.tokens.verify_byte_accounting()
    assert "cached" in message


def test_a_prompt_that_can_never_fit_is_told_so(cache: Cache) -> None:
    """Beside the tokens: three checkpoints in a shared pool, a page for rounding, and a token to spare."""
    pages = 24 - 1 - 2 * {"s0": 1, "s1": 3, "s2": 3, "d0": 0}[cache.memory.layout.organization]
    room = pages * PAGE_TOKENS - 1
    options = {"token_capacity": 0, "sliding_window_size": None, "chunk_size": None}
    assert cache.tokens.max_new_tokens_for_memory(room, 5, **options) is None
    assert cache.tokens.max_new_tokens_for_memory(room - 3, 5, **options) == 3
    assert cache.tokens.max_new_tokens_for_memory(1, 5, **options) == 5


@pytest.mark.parametrize("attention", range(0, 24, 3))
def test_b3_available_slots_are_those_that_can_be_allocated(cache: Cache, attention: int) -> None:
    """Whatever attention holds of the pages, and however full the slabs are."""
    cache.tokens.alloc(attention * PAGE_TOKENS)
    slots = cache.slots
    held: list[torch.Tensor] = []
    for number in count(1):
        left = slots.available_size()
        assert left == slots.schedulable_available_size()
        before = snapshot(cache)
        assert slots.alloc(left + 1) is None
        assert snapshot(cache) == before
        if left == 0:
            break
        held.append(slots.alloc(1))
        if number % 3 == 0:
            slots.free(held.pop(0))
        if number > 20:
            slots.alloc(slots.available_size())
    cache.memory.check()


@pytest.mark.parametrize("org", ["s0", "s1", "s2"])
def test_b1_a_slot_is_taken_as_a_whole_or_not_at_all(org: str) -> None:
    """With k pages free, for each k below the pages of one checkpoint, nothing is taken."""
    cache = start(tiny_plan(org, pages=24, checkpoints=0, members=3, groups=2))
    needed = cache.memory.store.pages_needed(1)
    for free in range(needed):
        ids = cache.tokens.alloc(cache.tokens.available_size() - free * PAGE_TOKENS)
        before = snapshot(cache)
        assert cache.slots.alloc(1) is None
        assert snapshot(cache) == before
        cache.tokens.free(ids)
    cache.tokens.alloc(cache.tokens.available_size() - needed * PAGE_TOKENS)
    assert cache.slots.alloc(1) is not None
    assert cache.memory.pages.num_free == 0


def test_b38_ids_that_were_returned_do_not_change(cache: Cache) -> None:
    slots = cache.slots
    first = slots.alloc(2)
    kept = first.tolist()
    slots.free(slots.alloc(1))
    slots.free(first.clone())
    slots.alloc(3)
    assert first.tolist() == kept
    ids = cache.tokens.alloc(PAGE_TOKENS)
    kept = ids.tolist()
    cache.tokens.free(ids)
    cache.tokens.alloc(2 * PAGE_TOKENS)
    assert ids.tolist() == kept


@pytest.mark.parametrize("wrong", ["free", "twice", "referenced", "the padding slot"])
def test_b42_slots_that_cannot_be_freed_are_refused_together(cache: Cache, wrong: str) -> None:
    """The others of the call are kept as well: the pool is unchanged."""
    slots, store = cache.slots, cache.memory.store
    live, published, freed = slots.alloc(3).split(1)
    store.publish(int(published))
    store.acquire(int(published))
    slots.free(freed)
    bad = {"free": freed, "twice": live, "referenced": published, "the padding slot": torch.tensor([0])}[wrong]
    before = snapshot(cache)
    with pytest.raises(ValueError, match="expected"):
        slots.free(torch.cat((live, bad)))
    assert snapshot(cache) == before
    store.release(int(published))
    slots.free(torch.cat((live, published)))
    assert store.ledgers().ids.free == store.num_virtual


def test_no_slot_is_set_aside_for_waiting_requests(cache: Cache) -> None:
    slots: CheckpointSlots = cache.slots
    before = snapshot(cache)
    slots.alloc_group_begin(3)
    assert snapshot(cache) == before
    held = slots.alloc(1)
    slots.alloc_group_end()
    assert cache.memory.store.num_active == held.numel() == 1


def test_slots_of_every_life_are_cleared(cache: Cache) -> None:
    slots, store = cache.slots, cache.memory.store
    _, published, referenced = slots.alloc(3).tolist()
    for v in (published, referenced):
        store.publish(v)
    store.acquire(referenced)
    slots.clear()
    assert slots.available_size() == store.num_virtual
    assert cache.memory.pages.num_free == cache.memory.pages.num_pages
    cache.memory.check()
