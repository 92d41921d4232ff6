"""The debug checks of published checkpoints notice each mistake they are for."""

from __future__ import annotations

import pytest
import torch

from sgl_hybrid.config import ORGANIZATION_NAMES
from sgl_hybrid.errors import InvariantError
from sgl_hybrid.memory import layout_for
from sgl_hybrid.memory.audit import CheckpointAudit
from sgl_hybrid.memory.budget import Budget, Units
from sgl_hybrid.memory.state_memory import StateMemory
from tests.tiny_layouts import PAGE_TOKENS, tiny_geometry


def state_memory(org: str, groups: int = 1) -> StateMemory:
    layout = layout_for(
        org, tiny_geometry(groups=groups), page_tokens=PAGE_TOKENS, checkpoint_interval=PAGE_TOKENS, planes=1
    )
    sizes = {"num_pages": 40} if layout.shared else {"num_attention_pages": 20, "num_checkpoints": 4}
    units = Units(layout=layout, budget=Budget(text="tiny", total_bytes=0, planes=1), **sizes)
    return StateMemory(
        units, device="cpu", kv_dtype=torch.bfloat16, ssm_dtype=torch.bfloat16, conv_dtype=torch.bfloat16
    )


@pytest.fixture(params=ORGANIZATION_NAMES)
def audit(request: pytest.FixtureRequest) -> CheckpointAudit:
    return CheckpointAudit(state_memory(request.param, groups=2))


def published(audit: CheckpointAudit, depth: int = PAGE_TOKENS) -> int:
    v = audit.memory.store.allocate()
    audit.wrote([(v, depth)])
    audit.memory.store.publish(v)
    audit.published(v, depth)
    return v


def test_an_unchanged_checkpoint_may_be_read_and_leave(audit: CheckpointAudit) -> None:
    v, other = published(audit), published(audit)
    audit.memory.pool.conv_lines(1)[audit.memory.store.conv_row(other)[0]] = 3.0
    audit.read(v)
    audit.left(v)
    with pytest.raises(InvariantError, match=f"checkpoint {other} as published"):
        audit.clear()


@pytest.mark.parametrize("layer", [1, 2])
@pytest.mark.parametrize("part", ["first member", "last member", "conv"])
def test_a_changed_byte_of_any_part_is_noticed(audit: CheckpointAudit, layer: int, part: str) -> None:
    v = published(audit)
    memory = audit.memory
    address = memory.layout.recurrent_slot(layer)
    if part == "conv":
        memory.pool.conv_lines(layer)[memory.store.conv_row(v)[address.conv_column]].view(torch.int16).flatten()[
            -1
        ] += 1
    else:
        members = memory.store.member_row(v)[address.first_member : address.first_member + memory.layout.members]
        page = members[0 if part == "first member" else -1]
        memory.pool.ssm_members(layer)[page].view(torch.int16).flatten()[-1] += 1
    for look in (audit.read, audit.left):
        with pytest.raises(InvariantError, match="as published"):
            look(v)


def test_a_step_that_writes_a_published_checkpoint_is_noticed(audit: CheckpointAudit) -> None:
    v = published(audit)
    with pytest.raises(InvariantError, match="a step that writes it"):
        audit.wrote([(v, 2 * PAGE_TOKENS)])


@pytest.mark.parametrize("depth", [PAGE_TOKENS, 3 * PAGE_TOKENS])
def test_b9_another_depth_than_was_consumed_is_noticed(audit: CheckpointAudit, depth: int) -> None:
    v = audit.memory.store.allocate()
    audit.wrote([(v, 2 * PAGE_TOKENS)])
    with pytest.raises(InvariantError, match=f"at {2 * PAGE_TOKENS} consumed tokens, got {depth}"):
        audit.published(v, depth)


def test_a_state_that_no_step_wrote_is_noticed(audit: CheckpointAudit) -> None:
    with pytest.raises(InvariantError, match="at None consumed tokens"):
        audit.published(audit.memory.store.allocate(), PAGE_TOKENS)


def test_a_checkpoint_that_was_not_published_cannot_leave(audit: CheckpointAudit) -> None:
    v = published(audit)
    audit.left(v)
    with pytest.raises(InvariantError, match="to leave the tree"):
        audit.left(v)


def test_a_slot_may_be_written_again_once_it_has_left(audit: CheckpointAudit) -> None:
    v = published(audit)
    audit.left(v)
    audit.wrote([(v, 5)])
    audit.read(v)
