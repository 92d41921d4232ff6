"""The Mamba2 backend of the memory organizations: SGLang's projections and norms around the operators of `triton_ops`.

Prefill gathers the states it continues from once, scans from the request's absolute position by the operators that
`choose_scans` names, and scatters the final states and those at tracked boundaries. Decode reads a state through the
table row of the slot that holds it and writes through the row of the slot that is to hold it: its own, or at a boundary
the tracking slot, from where the next step goes on. Nothing else copies a state.

In a CUDA graph the rows of a step are found by the graph itself, from what the batch's buffers, the source table and
the tables say when it runs (`decode_tables`); before it runs the host uploads what has changed in the tables. Only
decode is captured: a prefill decides on the host.

Source: SGLang 0.5.23, `sglang/srt/layers/attention/hybrid_linear_attn_backend.py` and `mamba/mamba.py`.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.attention.hybrid_linear_attn_backend import Mamba2AttnBackend

from sgl_hybrid.memory.state_memory import StateMemory
from sgl_hybrid.memory.transfer import upload
from sgl_hybrid.seams import exact, process
from sgl_hybrid.seams.decode_tables import DecodePlan, Rows, StaticRows, find_rows, split_plan, split_rows
from sgl_hybrid.seams.hooks import Seam
from sgl_hybrid.seams.mamba_layer import Layer, PrefillPlan
from sgl_hybrid.seams.prefill_scans import Batch, MakeScans, TorchScans
from sgl_hybrid.seams.stock_scans import StockScans, stock_operators


class SteadyDecode(NamedTuple):
    """The plan of a batch that reads where it writes, which is the next step's too as long as neither its indices nor a
    table has changed. writes: writes to the source table and to the tables of states when it was made."""

    indices: torch.Tensor
    writes: tuple[int, int]
    plan: DecodePlan


def choose_scans(memory: StateMemory, *, exact: bool, chunk_tokens: int) -> MakeScans:
    """Return how a server makes the operators of a prefill: SGLang's kernels on a GPU, unless continuation is exact.

    chunk_tokens: chunk of the model's scan.
    """
    layout, device = memory.layout, memory.pool.device
    if device.type != "cuda" or exact:
        return partial(TorchScans, grid_tokens=layout.checkpoint_interval)
    taps = layout.geometry.d_conv
    return partial(StockScans, operators=stock_operators(), chunk_tokens=chunk_tokens, taps=taps, device=device)


class BoundaryMamba2Backend(Mamba2AttnBackend):
    """`Mamba2AttnBackend` over member and line tables (see the module)."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self.memory = process.served().memory
        self.audit = process.served().audit
        self.layout = self.memory.layout
        self.states = self.req_to_token_pool.mamba_pool
        self.source = self.states.source
        self.captures = self.states.captures
        self.make_scans = choose_scans(self.memory, exact=exact.is_exact(), chunk_tokens=self.mamba_chunk_size)
        self.prefill_plan: PrefillPlan | None = None
        self.decode_plan: DecodePlan | None = None
        self.steady: SteadyDecode | None = None
        self.static_rows: StaticRows | None = None
        self.layers: dict[int, Layer] = {}

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        self.memory.pool.update_tables(self.memory.store)
        metadata = self.forward_metadata
        self.prefill_plan = self._plan_prefill(forward_batch, metadata.num_prefills) if metadata.num_prefills else None
        self.decode_plan = self._plan_decode(forward_batch, metadata.num_decodes) if metadata.num_decodes else None

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        pool = self.memory.pool
        self.static_rows = StaticRows(max_bs, pool.tables.shape[1], self.layout.member_pages, pool.device)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Before a graph is captured or runs: SGLang fills its static slots, and the tables are brought up to date."""
        super().init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)
        self.prefill_plan = self.steady = None
        self.decode_plan = self.static_rows.plan(forward_batch.batch_size)
        if not in_capture:
            self.memory.pool.update_tables(self.memory.store)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """In a graph, before its first layer: find the rows of the step. forward_batch: the one of the capture, whose
        tensors are the buffers that SGLang fills before each run."""
        metadata = self.forward_metadata
        kept, crossing = metadata.mamba_track_indices, forward_batch.mamba_track_mask
        self.static_rows.fill(self._find_rows(metadata.mamba_cache_indices, kept, crossing))

    def _find_rows(self, slots: torch.Tensor, kept: torch.Tensor | None, crossing: torch.Tensor | None) -> torch.Tensor:
        return find_rows(self.memory.pool.tables, self.source, slots, kept, crossing)

    def _init_track_conv_indices(self, *args: Any) -> None:
        """Boundaries are tracked by `Batch.captures`."""

    def _init_track_ssm_indices(self, *args: Any) -> tuple[None, ...]:
        return (None,) * 9

    def _rows(self, slots: torch.Tensor) -> Rows:
        return split_rows(self.memory.pool.table_rows(slots), self.layout.member_pages)

    def _plan_prefill(self, forward_batch: Any, num_prefills: int) -> PrefillPlan:
        starts = [int(start) for start in forward_batch.extend_prefix_lens_cpu[:num_prefills]]
        row_ends = [0]
        for length in forward_batch.extend_seq_lens_cpu[:num_prefills]:
            row_ends.append(row_ends[-1] + int(length))
        slots = self.forward_metadata.mamba_cache_indices[:num_prefills].to(torch.int64)
        captures: list[tuple[int, int]] = []
        kept = slots[:0]
        if self.forward_metadata.has_mamba_track_mask:
            mask, lengths = forward_batch.mamba_prefill_track_mask_cpu, forward_batch.mamba_track_seqlens_cpu
            tracked = [row for row in range(num_prefills) if mask[row]]
            grid = self.layout.checkpoint_interval
            captures = [(row, lengths[row] // grid * grid) for row in tracked]
            kept = forward_batch.mamba_track_indices[upload(tracked, torch.int64, slots.device)].to(torch.int64)
        if self.captures:
            further = [
                (row, *capture)
                for row, rid in enumerate(forward_batch.rids[:num_prefills])
                for capture in self.captures.pop(rid, ())
            ]
            captures += [(row, position) for row, position, _ in further]
            kept = torch.cat((kept, upload([slot for _, _, slot in further], torch.int64, slots.device)))
        read = fresh = None
        if any(starts):
            read = self._rows(self.source[slots])
            fresh = upload([start == 0 for start in starts], torch.bool, slots.device)
        if self.audit is not None:
            ends = [start + end - first for start, (first, end) in zip(starts, pairwise(row_ends), strict=True)]
            kept_at = [position for _, position in captures]
            self._check_states(self.source[slots], torch.cat((slots, kept)), [*ends, *kept_at])
        written = torch.cat((slots, kept))
        self.states.set_source(written, written)
        scans = self.make_scans(Batch(starts, row_ends, captures))
        return PrefillPlan(scans, read, fresh, self._rows(slots), self._rows(kept))

    def _plan_decode(self, forward_batch: Any, num_decodes: int) -> DecodePlan:
        indices = self.forward_metadata.mamba_cache_indices[-num_decodes:]
        if not indices.is_cpu:
            return self._plan_decode_on_device(forward_batch, indices)
        # Most steps cross no boundary, and read and write where the last one did.
        crosses_none = not self.forward_metadata.has_mamba_track_mask
        steady = self.steady
        if (
            crosses_none
            and steady is not None
            and steady.writes == (self.states.source_writes, self.memory.pool.table_writes)
            and torch.equal(indices, steady.indices)
        ):
            self._check_decode(forward_batch, indices, indices)
            return steady.plan
        slots = indices.to(torch.int64)
        read, written = self.source[slots], slots
        tracked = forward_batch.mamba_track_mask
        if tracked is not None:
            kept = self.forward_metadata.mamba_track_indices[-num_decodes:].to(torch.int64)
            # SGLang marks the tracking slot of a row whose request has ended meanwhile with -1.
            mask = tracked[-num_decodes:] & (kept >= 0)
            written = torch.where(mask, kept, slots)
            self.states.set_source(written, written)
        self.states.set_source(slots, written)
        self._check_decode(forward_batch, read, written)
        both = self.memory.pool.table_rows(torch.stack((read, written)))
        plan = split_plan(both, self.layout.member_pages)
        if crosses_none and torch.equal(both[0], both[1]):
            self.steady = SteadyDecode(indices, (self.states.source_writes, self.memory.pool.table_writes), plan)
        return plan

    def _plan_decode_on_device(self, forward_batch: Any, indices: torch.Tensor) -> DecodePlan:
        kept, crossing = self.forward_metadata.mamba_track_indices, forward_batch.mamba_track_mask
        if kept is not None and crossing is not None:
            kept, crossing = kept[-len(indices) :], crossing[-len(indices) :]
        if self.audit is not None:
            read = self.source[indices]
            written = indices if crossing is None else torch.where(crossing & (kept > 0), kept, indices)
            self._check_decode(forward_batch, read, written)
        return split_plan(self._find_rows(indices, kept, crossing), self.layout.member_pages)

    def _check_decode(self, forward_batch: Any, read: torch.Tensor, written: torch.Tensor) -> None:
        if self.audit is not None:
            self._check_states(read, written, forward_batch.seq_lens_cpu[-len(written) :].tolist())

    def _check_states(self, read: torch.Tensor, written: torch.Tensor, consumed: list[int]) -> None:
        """Debug checks before a step: what it reads is as published, what it writes is not published."""
        for v in read.tolist():
            self.audit.read(v)
        self.audit.wrote(zip(written.tolist(), consumed, strict=True))

    def forward(
        self,
        mixer: Any,
        hidden_states: torch.Tensor,
        output: torch.Tensor | None,
        layer_id: int,
        forward_batch: Any,
        mup_vector: torch.Tensor | None = None,
        use_triton_causal_conv: bool = False,
    ) -> torch.Tensor:
        """Run one Mamba2 layer. hidden_states: [num_tokens, hidden]; the result has its shape, in `output` too."""
        metadata = self.forward_metadata
        projected, _ = mixer.in_proj(hidden_states)
        if mup_vector is not None:
            projected = projected * mup_vector
        inner, channels = mixer.intermediate_size // mixer.tp_size, mixer.conv_dim // mixer.tp_size
        gate, mixed, dt = projected.split([inner, channels, mixer.num_heads // mixer.tp_size], dim=-1)
        out = torch.empty((projected.shape[0], inner), dtype=hidden_states.dtype, device=hidden_states.device)
        num_prefill, num_decode = metadata.num_prefill_tokens, metadata.num_decodes
        out[num_prefill + num_decode :].zero_()
        layer = self.layers.get(layer_id)
        if layer is None:
            layer = self.layers[layer_id] = Layer(self.memory, mixer, layer_id)
        if self.prefill_plan is not None:
            layer.prefill(self.prefill_plan, mixed[:num_prefill], dt[:num_prefill], out[:num_prefill])
        if self.decode_plan is not None:
            rows = slice(num_prefill, num_prefill + num_decode)
            layer.decode(self.decode_plan, mixed[rows], dt[rows], out[rows])
        result, _ = mixer.out_proj(mixer.norm(out, gate))
        if output is not None:
            output[: result.shape[0]].copy_(result)
        return result


SEAMS: tuple[Seam, ...] = (
    Seam(
        "sglang.srt.layers.attention.hybrid_linear_attn_backend.Mamba2AttnBackend",
        "replace",
        BoundaryMamba2Backend,
        (),
        "states are read and written through the tables of the organization",
    ),
)
