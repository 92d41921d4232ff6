"""Decode under a graph: what is captured once reads and writes, at each run, what an eager step would.

SGLang's own buffers, padding and metadata functions are used; the graph is a recording of tensor operations, since
there is no GPU here (`recorded`). The scenario numbers are those of faults that other engines had.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.cuda_graph_buffer_registry import build_decode_registry
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import build_replay_fb_view

from sgl_hybrid.memory import ORGANIZATIONS
from sgl_hybrid.memory.ledger import ABSENT
from sgl_hybrid.seams.decode_tables import DecodePlan, Rows
from sgl_hybrid.seams.mamba_backend import BoundaryMamba2Backend
from tests.seams.recorded import Recording
from tests.seams.tree_fixture import Cache, start, tiny_plan
from tests.tiny_mixer import step_layers

pytestmark = pytest.mark.usefixtures("published")

CAPTURED = 4
"""Rows of the captured batch, the largest and the only one."""


@pytest.fixture(params=sorted(ORGANIZATIONS))
def cache(request: pytest.FixtureRequest) -> Cache:
    """Two recurrent layers in groups of their own: equal in shape, each with its own columns of the tables."""
    return start(tiny_plan(request.param, pages=120, checkpoints=10, groups=2, conv_channels=64))


def backend_of(cache: Cache) -> BoundaryMamba2Backend:
    """The backend as SGLang builds it, without a model."""
    config = SimpleNamespace(hf_text_config=SimpleNamespace(mamba_chunk_size=16))
    arguments = SimpleNamespace(enable_mis=False)
    return BoundaryMamba2Backend(
        SimpleNamespace(
            device="cpu",
            req_to_token_pool=cache.requests,
            token_to_kv_pool=None,
            is_draft_worker=False,
            model_config=config,
            server_args=arguments,
        )
    )


class Graph:
    """The decode graph of a batch of `CAPTURED` rows, and steps that run it."""

    def __init__(self, cache: Cache) -> None:
        self.cache, self.backend = cache, backend_of(cache)
        self.backend.audit = None
        self.backend.init_cuda_graph_state(CAPTURED, CAPTURED)
        self.registry = build_decode_registry(
            device=torch.device("cpu"),
            max_bs=CAPTURED,
            max_num_token=CAPTURED,
            seq_len_fill_value=1,
            cache_loc_dtype=torch.int64,
            enable_mamba_track=True,
            share_pool=False,
        )
        names = self.registry.slot_names()
        self.buffers = SimpleNamespace(**{name: self.registry.get_slot(name).buffer for name in names})
        captured = self.batch(CAPTURED, **vars(self.buffers))
        self.backend.init_forward_metadata_out_graph(captured, in_capture=True)
        self.recording = Recording()
        with self.recording:
            self.backend.init_forward_metadata_in_graph(captured)
        self.plan: DecodePlan = self.backend.decode_plan

    def batch(self, size: int, **tensors: torch.Tensor) -> Any:
        """What of a `ForwardBatch` counts here."""
        return SimpleNamespace(batch_size=size, forward_mode=ForwardMode.DECODE, spec_info=None, **tensors)

    def bind(self, slots: torch.Tensor) -> torch.Tensor:
        """Give the slots to the first request rows; return those."""
        rows = torch.arange(1, len(slots) + 1)
        self.cache.requests.req_index_to_mamba_index_mapping[rows] = slots.to(torch.int32)
        return rows

    def step(self, slots: torch.Tensor, kept: torch.Tensor | None = None) -> DecodePlan:
        """Run the graph on a batch; kept: the tracking slot of each row that crosses a boundary, 0 for no crossing."""
        size = len(slots)
        kept = torch.zeros(size, dtype=torch.int64) if kept is None else kept
        batch = self.batch(
            size,
            req_pool_indices=self.bind(slots),
            seq_lens=torch.full((size,), 32),
            seq_lens_cpu=torch.full((size,), 32),
            mamba_track_indices=kept,
            mamba_track_mask=kept != 0,
            input_ids=torch.ones(size, dtype=torch.int64),
            positions=torch.full((size,), 31),
            out_cache_loc=torch.ones(size, dtype=torch.int64),
        )
        for name in ("seq_lens_sum", "max_seq_len_host", "out_cache_loc_virtual", "kv_loc_plan", "kv_loc_cols"):
            setattr(batch, name, None)
        batch.max_seq_len_override = batch.lora_ids = batch.can_run_decode_cuda_graph = None
        self.registry.fill_from(batch, raw_bs=size, padded_bs=CAPTURED, raw_num_tokens=size, padded_num_tokens=CAPTURED)
        view = build_replay_fb_view(
            batch, self.buffers, CAPTURED, size, CAPTURED, None, 1, ForwardMode.DECODE, is_encoder_decoder=False
        )
        self.backend.init_forward_metadata_out_graph(view)
        self.recording.run()
        return self.plan

    def says(self, slots: torch.Tensor, written: torch.Tensor, read: torch.Tensor | None = None) -> bool:
        """Whether the graph read and wrote the rows that the store has for these slots, and none beyond them."""
        store = self.cache.memory.store
        expected = []
        for wanted in (slots if read is None else read, written):
            members = [list(store.member_row(v)) for v in wanted.tolist()]
            lines = [list(store.conv_row(v)) for v in wanted.tolist()]
            absent = CAPTURED - len(wanted)
            members += [[ABSENT] * self.plan.read.members.shape[1]] * absent
            lines += [[ABSENT] * self.plan.read.lines.shape[1]] * absent
            expected.append((members, lines))
        return [(rows.members.tolist(), rows.lines.tolist()) for rows in self.plan] == expected


def test_a_captured_step_finds_other_requests_and_other_pages(cache: Cache) -> None:
    graph, slots = Graph(cache), cache.slots.alloc(3)
    graph.step(slots)
    assert graph.says(slots, slots)
    graph.step(slots.flip(0)[:2])
    assert graph.says(slots.flip(0)[:2], slots.flip(0)[:2])
    cache.slots.free(slots)
    cache.tokens.alloc(cache.tokens.page_size)
    again = cache.slots.alloc(2)
    graph.step(again)
    assert graph.says(again, again)


def test_a_captured_step_crosses_a_boundary_and_the_next_goes_on_from_there(cache: Cache) -> None:
    graph, slots, kept = Graph(cache), cache.slots.alloc(2), cache.slots.alloc(1)
    graph.step(slots)
    graph.backend.states.copy_from(slots[1:], kept)  # What the slot's last owner may have left.
    written = torch.cat((kept, slots[1:]))
    graph.step(slots, torch.tensor([int(kept), 0]))
    assert graph.says(slots, written)
    assert graph.backend.source[kept] == kept
    graph.step(slots)
    assert graph.says(slots, slots, read=written)
    graph.step(slots)
    assert graph.says(slots, slots)


def test_an_adopted_state_is_read_once(cache: Cache) -> None:
    graph, slots, other = Graph(cache), cache.slots.alloc(2), cache.slots.alloc(1)
    graph.step(slots)
    graph.backend.states.copy_from(other, slots[1:])
    graph.step(slots)
    assert graph.says(slots, slots, read=torch.cat((slots[:1], other)))
    graph.step(slots)
    assert graph.says(slots, slots)


def test_a_row_whose_request_has_ended_keeps_nothing(cache: Cache) -> None:
    """SGLang leaves the mask of such a row set and marks its tracking slot with -1."""
    graph, slots = Graph(cache), cache.slots.alloc(2)
    graph.step(slots, torch.tensor([-1, 0]))
    assert graph.says(slots, slots)
    assert graph.backend.source.tolist() == list(range(cache.memory.store.num_virtual + 1))


def test_b14_padding_has_no_slot_whatever_the_step_before_left_there(cache: Cache) -> None:
    graph, slots, kept = Graph(cache), cache.slots.alloc(4), cache.slots.alloc(4)
    graph.step(slots, kept)
    source = graph.backend.source.clone()
    graph.step(slots[:3])
    assert graph.says(slots[:3], slots[:3], read=kept[:3])
    source[slots[:3]] = slots[:3]
    assert torch.equal(graph.backend.source, source), "the row that left the batch still goes on from what it kept"


def test_b26_capturing_a_graph_touches_no_state(cache: Cache) -> None:
    """SGLang runs the batch several times while it captures, with request row 0 in every place."""
    slots = cache.slots.alloc(2)
    planes = [cache.memory.pool.attention_planes, cache.memory.pool.recurrent_planes]
    for plane in planes:
        plane.random_(0, 100)
    before = [plane.clone() for plane in planes]
    graph = Graph(cache)
    graph.recording.run()
    assert graph.says(slots[:0], slots[:0])
    step_layers(cache.memory, graph.plan, CAPTURED)
    assert all(map(torch.equal, planes, before))
    assert graph.backend.source.tolist() == list(range(cache.memory.store.num_virtual + 1))


@pytest.mark.parametrize("crosses", [False, True])
def test_b13_states_after_a_captured_step_have_the_bits_of_an_eager_one(cache: Cache, crosses: bool) -> None:
    """Two layers of equal shape, a padded batch, one row with an adopted state, and if it crosses, one whose state is
    kept; the tables have changed since the capture."""
    graph = Graph(cache)
    pool, slots, other = cache.memory.pool, cache.slots.alloc(3), cache.slots.alloc(2)
    generator = torch.Generator().manual_seed(7)
    for planes in {pool.attention_planes, pool.recurrent_planes}:
        values = torch.randn(planes.numel() // 2, generator=generator).to(torch.bfloat16)
        planes.copy_(values.view(torch.uint8).view(planes.shape))
    before = pool.recurrent_planes.clone()
    kept = torch.tensor([0, int(other[1]) if crosses else 0, 0])

    def adopt() -> None:
        graph.backend.source.copy_(torch.arange(len(graph.backend.source)))
        graph.backend.states.copy_from(other[:1], slots[2:])

    adopt()
    eager = SimpleNamespace(mamba_track_mask=kept != 0)
    graph.backend.forward_metadata = SimpleNamespace(
        mamba_cache_indices=slots.to(torch.int32), mamba_track_indices=kept, has_mamba_track_mask=crosses
    )
    pool.update_tables(cache.memory.store)
    expected = step_layers(cache.memory, graph.backend._plan_decode(eager, 3), 3)
    states = pool.recurrent_planes.clone()
    assert not torch.equal(states, before)

    pool.recurrent_planes.copy_(before)
    adopt()
    found = step_layers(cache.memory, graph.step(slots, kept), CAPTURED)
    assert torch.equal(pool.recurrent_planes, states)
    for outputs, wanted in zip(found, expected, strict=True):
        assert outputs.isfinite().all()
        assert torch.equal(outputs[:3], wanted)
        assert not outputs[3:].any()


def test_a_recording_refuses_what_a_graph_cannot_hold() -> None:
    with pytest.raises(RuntimeError, match="cannot be captured"), Recording():
        torch.arange(3).nonzero()


def test_a_number_read_while_recording_would_show(cache: Cache) -> None:
    """The graph of a backend that decides on the host at capture: what it says of the next batch is wrong."""
    graph, slots = Graph(cache), cache.slots.alloc(2)
    stale = Recording()
    with stale:
        rows = cache.memory.pool.tables[torch.tensor(slots.tolist())]
        graph.backend.static_rows.fill(torch.stack((rows, rows)))
    graph.recording = stale
    graph.step(slots.flip(0))
    assert not graph.says(slots.flip(0), slots.flip(0))


def test_rows_are_views_of_one_static_tensor(cache: Cache) -> None:
    graph = Graph(cache)
    pointers = {rows.members.data_ptr() for rows in graph.plan}
    graph.step(cache.slots.alloc(1))
    assert {rows.members.data_ptr() for rows in graph.backend.decode_plan} == pointers
    assert all(rows.members.dtype == torch.int32 for rows in graph.plan)
    assert isinstance(graph.plan.read, Rows)
