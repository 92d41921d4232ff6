"""SGLang's side of a GPU on tensors that have its name and no memory (see `tests/unit/test_gpu_tensors.py`): ids of
tokens and slots go to the device without waiting, and slots of both sides meet there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_hybrid.memory import ORGANIZATIONS
from sgl_hybrid.memory.state_memory import StateMemory
from sgl_hybrid.seams.allocators import BlockAllocator, CheckpointSlots, allocate_decode
from sgl_hybrid.seams.decode_tables import StaticRows
from sgl_hybrid.seams.mamba_backend import BoundaryMamba2Backend, choose_scans
from sgl_hybrid.seams.prefill_scans import TorchScans
from sgl_hybrid.seams.state_pool import TableStatePool
from sgl_hybrid.seams.stock_scans import StockScans
from tests.seams.tree_fixture import tiny_plan

pytestmark = pytest.mark.usefixtures("gpu_tensors")

CUDA = torch.device("cuda", 0)


@pytest.fixture(params=sorted(ORGANIZATIONS))
def memory(request: pytest.FixtureRequest) -> StateMemory:
    dtypes = dict.fromkeys(("kv_dtype", "ssm_dtype", "conv_dtype"), torch.bfloat16)
    return StateMemory(tiny_plan(request.param, pages=60, checkpoints=6).units, device="cuda", **dtypes)


def states_of(memory: StateMemory) -> Any:
    """The pool of states without SGLang's part."""
    states = object.__new__(TableStatePool)
    states.memory, states.source_writes = memory, 0
    states.source = torch.arange(memory.store.num_virtual + 1, device=CUDA)
    return states


def test_slots_are_given_to_the_device_and_taken_on_the_host(memory: StateMemory) -> None:
    slots = CheckpointSlots(memory, "cuda")
    assert slots.alloc(2).device == CUDA
    assert slots.alloc(0).device == CUDA
    assert isinstance(slots.take(), int)


def test_sources_on_the_host_meet_slots_on_the_device(memory: StateMemory) -> None:
    states = states_of(memory)
    states.copy_from(torch.tensor([1]), torch.ones(1, dtype=torch.int64, device=CUDA))
    states.clear_slots(torch.tensor([1, 2]))
    assert states.source_writes == 2


@pytest.mark.parametrize("held", [3, 16])
def test_the_ids_of_a_decode_step_wait_for_nothing(memory: StateMemory, held: int) -> None:
    """In the middle of a block, and where one opens."""
    tokens = BlockAllocator(memory, dtype=torch.bfloat16, device="cuda", kvcache=None)
    written = []
    requests = SimpleNamespace(
        req_to_token=torch.zeros(4, 64, dtype=torch.int32, device=CUDA),
        write=lambda places, ids: written.append(ids),
    )
    lengths = torch.full((2,), held, device=CUDA)
    with torch._subclasses.fake_tensor.unset_fake_temporarily():
        lengths_cpu = torch.full((2,), held)
    batch = SimpleNamespace(
        token_to_kv_pool_allocator=tokens,
        req_to_token_pool=requests,
        out_cache_loc=None,
        req_pool_indices=torch.ones(2, dtype=torch.int64, device=CUDA),
        seq_lens=lengths,
        seq_lens_cpu=lengths_cpu,
        tree_cache=None,
        reqs=[SimpleNamespace(kv=SimpleNamespace(kv_allocated_len=held, kv_committed_len=held)) for _ in range(2)],
    )
    ids = allocate_decode(lambda batch, count: None, batch, 1)
    assert ids.device == CUDA
    assert [tensor.device for tensor in written] == [CUDA]


def backend_of(memory: StateMemory) -> BoundaryMamba2Backend:
    """The backend without SGLang's part."""
    backend, states = object.__new__(BoundaryMamba2Backend), states_of(memory)
    backend.memory, backend.layout, backend.audit = memory, memory.layout, None
    backend.states, backend.source, backend.captures = states, states.source, {}
    pool = memory.pool
    backend.static_rows = StaticRows(4, pool.tables.shape[1], memory.layout.member_pages, pool.device)
    return backend


def test_the_head_of_a_graph_and_an_eager_plan_wait_for_nothing(memory: StateMemory) -> None:
    backend = backend_of(memory)
    slots = torch.zeros(4, dtype=torch.int32, device=CUDA)
    mask = torch.zeros(4, dtype=torch.bool, device=CUDA)
    backend.forward_metadata = SimpleNamespace(mamba_cache_indices=slots, mamba_track_indices=slots.long())
    backend.init_forward_metadata_in_graph(SimpleNamespace(mamba_track_mask=mask))
    plan = backend._plan_decode(SimpleNamespace(mamba_track_mask=mask), 3)
    assert plan.read.members.device == CUDA
    assert plan.write.lines.dtype == torch.int32


@pytest.mark.parametrize(("exact", "operators"), [(False, StockScans), (True, TorchScans)])
def test_the_plan_of_a_prefill_waits_for_nothing(memory: StateMemory, exact: bool, operators: type) -> None:
    """Three requests: a fresh one that keeps two boundaries, one that continues and keeps one, one that keeps none."""
    backend, grid = backend_of(memory), memory.layout.checkpoint_interval
    batches = []
    make_scans = choose_scans(memory, exact=exact, chunk_tokens=64)
    backend.make_scans = lambda batch: batches.append(batch) or make_scans(batch)
    backend.captures["first"] = [(grid, 4)]
    backend.forward_metadata = SimpleNamespace(
        mamba_cache_indices=torch.ones(3, dtype=torch.int32, device=CUDA), has_mamba_track_mask=True
    )
    batch = SimpleNamespace(
        rids=["first", "second", "third"],
        extend_prefix_lens_cpu=[0, grid, 0],
        extend_seq_lens_cpu=[2 * grid, grid + 1, 3],
        mamba_prefill_track_mask_cpu=[True, True, False],
        mamba_track_seqlens_cpu=[2 * grid, 2 * grid + 1, -1],
        mamba_track_indices=torch.ones(3, dtype=torch.int64, device=CUDA),
    )
    plan = backend._plan_prefill(batch, 3)
    assert isinstance(plan.scans, operators)
    (asked,) = batches
    assert asked.captures == [(0, 2 * grid), (1, 2 * grid), (0, grid)]
    assert asked.row_ends == [0, 2 * grid, 3 * grid + 1, 3 * grid + 4]
    assert {rows.members.device for rows in (plan.read, plan.write, plan.kept)} == {plan.fresh.device} == {CUDA}
    assert plan.kept.members.shape[0] == 3
    assert not backend.captures
