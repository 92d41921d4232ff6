"""A decode step of whole layers as a GPU runs it: rows found on the device, the Triton kernels on the pool's views."""

from __future__ import annotations

import pytest
import torch

from sgl_hybrid.memory import ORGANIZATIONS
from sgl_hybrid.memory.budget import Budget, Units
from sgl_hybrid.memory.state_memory import StateMemory
from sgl_hybrid.seams.decode_tables import DecodePlan, StaticRows, find_rows
from tests.tiny_layouts import tiny_layout
from tests.tiny_mixer import layers_of, step_layers

ROWS = 5
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-5}


def memory_of(org: str, ssm_dtype: torch.dtype) -> StateMemory:
    """Two recurrent layers in groups of their own, ten checkpoints, everything random."""
    channels = 64 if ssm_dtype is torch.bfloat16 else 48
    layout = tiny_layout(org, groups=2, conv_channels=channels, ssm_itemsize=ssm_dtype.itemsize)
    sizes = {"num_pages": 120} if layout.shared else {"num_attention_pages": 4, "num_checkpoints": 10}
    units = Units(layout=layout, budget=Budget(text="tiny", total_bytes=0, planes=1), **sizes)
    memory = StateMemory(units, device="cpu", kv_dtype=torch.bfloat16, ssm_dtype=ssm_dtype, conv_dtype=torch.bfloat16)
    memory.store.allocate_many(8)
    memory.pool.update_tables(memory.store)
    generator = torch.Generator().manual_seed(3)
    for views in (memory.pool.member_planes(), *(memory.pool.conv_planes(group) for group in range(layout.groups))):
        views.copy_(torch.randn(views.shape, generator=generator).to(views.dtype))
    return memory


def plan_of(memory: StateMemory) -> DecodePlan:
    """In place; from an adopted state; across a boundary; two rows of padding, of a graph and of a batch."""
    pool = memory.pool
    source = torch.arange(memory.store.num_virtual + 1)
    source[2] = 7
    slots, kept = torch.tensor([1, 2, 3, -1, 0], dtype=torch.int32), torch.tensor([0, 0, 8, 0, 0])
    static = StaticRows(ROWS, pool.tables.shape[1], memory.layout.member_pages, pool.device)
    static.fill(find_rows(pool.tables, source, slots, kept, kept > 0))
    assert source[[2, 3, 8]].tolist() == [2, 8, 8]
    return static.plan(ROWS)


@pytest.mark.parametrize("ssm_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("org", sorted(ORGANIZATIONS))
def test_the_kernels_do_what_the_torch_paths_do(org: str, ssm_dtype: torch.dtype) -> None:
    memory = memory_of(org, ssm_dtype)
    before = memory.pool.recurrent_planes.clone()
    plan = plan_of(memory)

    layers = layers_of(memory)
    for layer in layers:
        layer._step = layer._decode_torch
    expected, states = step_layers(memory, plan, ROWS, layers=layers), memory.pool.recurrent_planes.clone()
    memory.pool.recurrent_planes.copy_(before)

    layers = layers_of(memory)
    assert all(layer._step == layer._decode_kernels for layer in layers)
    found = step_layers(memory, plan, ROWS, layers=layers)
    for outputs, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(outputs, wanted, rtol=2e-2, atol=2e-2)
        assert not outputs[3:].any()
    changed = (memory.pool.recurrent_planes != before).any(-1)
    assert torch.equal(changed, (states != before).any(-1)), "the same pages are written"
    written = plan.write.lines[:3, 0].long()
    members, windows = memory.pool.member_planes().clone(), memory.pool.conv_planes(0)[:, written].clone()
    memory.pool.recurrent_planes.copy_(states)
    tolerance = TOLERANCE[ssm_dtype]
    torch.testing.assert_close(members, memory.pool.member_planes(), rtol=tolerance, atol=tolerance)
    assert torch.equal(windows, memory.pool.conv_planes(0)[:, written])
