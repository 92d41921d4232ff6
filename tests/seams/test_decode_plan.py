"""The plan of a decode step: kept from step to step, and made anew when anything that it says has changed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sgl_hybrid.memory import ORGANIZATIONS
from sgl_hybrid.seams.mamba_backend import BoundaryMamba2Backend, DecodePlan
from tests.seams.tree_fixture import Cache, start, tiny_plan

pytestmark = pytest.mark.usefixtures("published")


@pytest.fixture(params=sorted(ORGANIZATIONS))
def cache(request: pytest.FixtureRequest) -> Cache:
    return start(tiny_plan(request.param, pages=60, checkpoints=6))


class Steps:
    """Plans of decode steps over a cache, with SGLang's part of the metadata made up."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.states = cache.requests.mamba_pool
        self.backend = object.__new__(BoundaryMamba2Backend)
        self.backend.__dict__.update(
            memory=cache.memory, audit=None, layout=cache.memory.layout, steady=None, states=self.states
        )
        self.backend.source = self.states.source

    def plan(self, slots: torch.Tensor, kept: torch.Tensor | None = None) -> DecodePlan:
        """Plan a step of `slots`; kept: the slot that each row's state goes to, -1 for its own."""
        mask = torch.zeros(len(slots), dtype=torch.bool) if kept is None else kept >= 0
        self.backend.forward_metadata = SimpleNamespace(
            mamba_cache_indices=slots.to(torch.int32),
            mamba_track_indices=torch.full_like(slots, -1) if kept is None else kept,
            has_mamba_track_mask=bool(mask.any()),
        )
        self.cache.memory.pool.update_tables(self.cache.memory.store)
        return self.backend._plan_decode(SimpleNamespace(mamba_track_mask=mask), len(slots))

    def says(self, plan: DecodePlan, read: torch.Tensor, write: torch.Tensor) -> bool:
        """Whether a plan has the rows that the store has for these slots."""
        store = self.cache.memory.store
        return all(
            rows.members.tolist() == [list(store.member_row(v)) for v in slots.tolist()]
            and rows.lines.tolist() == [list(store.conv_row(v)) for v in slots.tolist()]
            for rows, slots in ((plan.read, read), (plan.write, write))
        )


def test_the_plan_is_kept_while_nothing_changes(cache: Cache) -> None:
    steps, slots = Steps(cache), cache.slots.alloc(3)
    first = steps.plan(slots)
    assert steps.says(first, slots, slots)
    assert steps.plan(slots.clone()) is first


def test_other_requests_have_another_plan(cache: Cache) -> None:
    steps, slots = Steps(cache), cache.slots.alloc(3)
    steps.plan(slots)
    assert steps.says(steps.plan(slots[:2]), slots[:2], slots[:2])
    assert steps.says(steps.plan(slots.flip(0)), slots.flip(0), slots.flip(0))


def test_a_slot_with_other_pages_has_another_plan(cache: Cache) -> None:
    """Slots given back and taken again, in another order: the same ids, other pages."""
    steps, slots = Steps(cache), cache.slots.alloc(2)
    before = steps.plan(slots)
    cache.slots.free(slots)
    cache.tokens.alloc(cache.tokens.page_size)
    again = cache.slots.alloc(2)
    assert sorted(again.tolist()) == sorted(slots.tolist())
    assert steps.says(steps.plan(slots), slots, slots)
    assert steps.plan(slots) is not before


def test_a_state_that_another_slot_holds_is_read_there_once(cache: Cache) -> None:
    steps, slots, other = Steps(cache), cache.slots.alloc(2), cache.slots.alloc(1)
    steps.plan(slots)
    steps.states.copy_from(other, slots[1:])
    assert steps.says(steps.plan(slots), torch.cat((slots[:1], other)), slots)
    assert steps.says(steps.plan(slots), slots, slots)


def test_a_crossing_writes_the_kept_slot_and_the_next_step_reads_it(cache: Cache) -> None:
    steps, slots, kept = Steps(cache), cache.slots.alloc(2), cache.slots.alloc(1)
    steps.plan(slots)
    written = torch.cat((kept, slots[1:]))
    assert steps.says(steps.plan(slots, torch.tensor([int(kept), -1])), slots, written)
    assert steps.says(steps.plan(slots), written, slots)
    steady = steps.plan(slots)
    assert steps.says(steady, slots, slots)
    assert steps.plan(slots) is steady
