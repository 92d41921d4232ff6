"""A decode step of real layers in a real CUDA graph, where there is a GPU. Needs no SGLang:

pytest -m gpu tests/kernels/test_graph_on_gpu.py
"""

from __future__ import annotations

import pytest
import torch

from sgl_hybrid.memory import ORGANIZATIONS
from sgl_hybrid.memory.budget import Budget, Units
from sgl_hybrid.memory.state_memory import StateMemory
from sgl_hybrid.memory.transfer import upload
from sgl_hybrid.seams.decode_tables import StaticRows, find_rows, split_plan
from sgl_hybrid.seams.mamba_layer import Layer
from tests.tiny_layouts import tiny_layout
from tests.tiny_mixer import mixer_of

pytestmark = pytest.mark.gpu
CAPTURED = 4


@pytest.fixture(params=sorted(ORGANIZATIONS))
def memory(request: pytest.FixtureRequest) -> StateMemory:
    """Eight checkpoints with random states in pools on the GPU."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    layout = tiny_layout(request.param, groups=2, conv_channels=64)
    sizes = {"num_pages": 120} if layout.shared else {"num_attention_pages": 4, "num_checkpoints": 10}
    units = Units(layout=layout, budget=Budget(text="tiny", total_bytes=0, planes=1), **sizes)
    dtypes = dict.fromkeys(("kv_dtype", "ssm_dtype", "conv_dtype"), torch.bfloat16)
    memory = StateMemory(units, device="cuda", **dtypes)
    memory.store.allocate_many(8)
    memory.pool.update_tables(memory.store)
    planes = memory.pool.recurrent_planes
    planes.copy_(torch.randn(planes.numel() // 2, device="cuda").bfloat16().view(torch.uint8).view(planes.shape))
    return memory


class Step:
    """A decode step of all layers on buffers at fixed addresses, eager or captured."""

    def __init__(self, memory: StateMemory) -> None:
        self.memory, pool = memory, memory.pool
        self.slots = torch.full((CAPTURED,), -1, dtype=torch.int32, device="cuda")
        self.kept = torch.zeros(CAPTURED, dtype=torch.int64, device="cuda")
        self.source = torch.arange(memory.store.num_virtual + 1, device="cuda")
        self.static = StaticRows(CAPTURED, pool.tables.shape[1], memory.layout.member_pages, pool.device)
        self.layers = [layer_on_gpu(memory, layer_id) for layer_id in memory.layout.geometry.recurrent_layers]
        channels, self.heads = memory.layout.geometry.conv_channels, memory.layout.geometry.ssm_heads
        self.projected = torch.randn(CAPTURED, channels + self.heads, device="cuda").bfloat16()
        self.outs = torch.empty(2, CAPTURED, self.layers[0].mixer.intermediate_size, device="cuda").bfloat16()

    def run(self, *, static: bool) -> None:
        rows = find_rows(self.memory.pool.tables, self.source, self.slots, self.kept, self.kept > 0)
        if static:
            self.static.fill(rows)
        plan = self.static.plan(CAPTURED) if static else split_plan(rows, self.memory.layout.member_pages)
        mixed, dt = self.projected.split([self.projected.shape[1] - self.heads, self.heads], dim=-1)
        for layer, out in zip(self.layers, self.outs, strict=True):
            layer.decode(plan, mixed, dt, out)

    def load(self, slots: list[int], kept: list[int]) -> None:
        padding = CAPTURED - len(slots)
        self.slots.copy_(upload(slots + [-1] * padding, torch.int32, "cuda"))
        self.kept.copy_(upload(kept + [0] * padding, torch.int64, "cuda"))


def layer_on_gpu(memory: StateMemory, layer_id: int) -> Layer:
    mixer = mixer_of(memory.layout.geometry, layer_id)
    for owner, names in ((mixer, ("A", "D", "dt_bias")), (mixer.conv1d, ("weight", "bias"))):
        for name in names:
            setattr(owner, name, getattr(owner, name).cuda())
    return Layer(memory, mixer, layer_id)


STEPS = [([1, 2, 3, 4], [0, 0, 0, 0]), ([1, 2, 3], [0, 7, 0]), ([1, 2, 3], [0, 0, 0]), ([5, 1], [0, 8]), ([2], [0])]
"""Slots and tracking slots: a full batch, a boundary, the step after it, other requests, one."""


def test_a_captured_step_has_the_bits_of_an_eager_one(memory: StateMemory) -> None:
    step, planes = Step(memory), memory.pool.recurrent_planes
    before = planes.clone()
    step.run(static=True)  # Compiles the kernels; padding touches nothing.
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run(static=True)
    assert torch.equal(planes, before)

    def walk(captured: bool) -> list[torch.Tensor]:
        planes.copy_(before)
        step.source.copy_(torch.arange(len(step.source)))
        found = []
        for slots, kept in STEPS:
            step.load(slots, kept)
            graph.replay() if captured else step.run(static=False)
            found += [step.outs.clone(), planes.clone(), step.source.clone()]
        return found

    assert all(map(torch.equal, walk(captured=True), walk(captured=False)))
