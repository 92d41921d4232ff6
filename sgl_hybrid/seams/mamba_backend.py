"""The Mamba2 backend of the memory organizations: SGLang's projections and norms around the operators of `triton_ops`.

Prefill gathers the states it continues from once, scans from the request's absolute position, and scatters the final
states and those at tracked boundaries. Decode reads a state through the table row of the slot that holds it and writes
through the row of the slot that is to hold it: its own, or at a boundary the tracking slot, from where the next step
goes on. Nothing else copies a state.

Source: SGLang 0.5.23, `sglang/srt/layers/attention/hybrid_linear_attn_backend.py` and `mamba/mamba.py`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.attention.hybrid_linear_attn_backend import Mamba2AttnBackend

from sgl_hybrid.memory.organization import RecurrentAddress
from sgl_hybrid.seams import exact, process
from sgl_hybrid.seams.hooks import Seam
from triton_ops.conv_scan.api import conv_scan
from triton_ops.conv_update import torch_path as conv_path
from triton_ops.ssm_scan.api import ssm_scan
from triton_ops.ssm_update import torch_path as ssm_path


class Rows(NamedTuple):
    """Table rows of some slots. members: [num, groups * M] int64 pages; lines: [num, conv_columns] int64."""

    members: torch.Tensor
    lines: torch.Tensor


class PrefillPlan(NamedTuple):
    """What the prefill rows of a batch do with states, the same for every layer.

    starts: tokens each sequence has consumed. row_ends: packed rows, num_seqs + 1. read: rows of the slots to continue
    from; fresh: [num_seqs] bool, sequences without a state (None if there is none). write: rows of the sequences' own
    slots. captures: (sequence, absolute boundary) whose state goes to the slot of the same position in `kept`.
    """

    starts: list[int]
    row_ends: list[int]
    read: Rows | None
    fresh: torch.Tensor | None
    write: Rows
    captures: list[tuple[int, int]]
    kept: Rows


class DecodePlan(NamedTuple):
    """Rows of the slots that decode reads from and writes to."""

    read: Rows
    write: Rows


class SteadyDecode(NamedTuple):
    """The plan of a batch that reads where it writes, which is the next step's too as long as neither its indices nor a
    table has changed. writes: writes to the source table and to the tables of states when it was made."""

    indices: torch.Tensor
    writes: tuple[int, int]
    plan: DecodePlan


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
        self.prefill_plan: PrefillPlan | None = None
        self.decode_plan: DecodePlan | None = None
        self.steady: SteadyDecode | None = None
        self.layers: dict[int, Layer] = {}

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        self.memory.pool.update_tables(self.memory.store)
        metadata = self.forward_metadata
        exact.begin_forward(num_prefills=metadata.num_prefills)
        self.prefill_plan = self._plan_prefill(forward_batch, metadata.num_prefills) if metadata.num_prefills else None
        self.decode_plan = self._plan_decode(forward_batch, metadata.num_decodes) if metadata.num_decodes else None

    def _init_track_conv_indices(self, *args: Any) -> None:
        """Boundaries are tracked by `PrefillPlan.captures`."""

    def _init_track_ssm_indices(self, *args: Any) -> tuple[None, ...]:
        return (None,) * 9

    def _rows(self, slots: torch.Tensor) -> Rows:
        return self._split_rows(self.memory.pool.table_rows(slots))

    def _split_rows(self, rows: torch.Tensor) -> Rows:
        width = self.layout.member_pages
        return Rows(rows[:, :width], rows[:, width:])

    def _plan_prefill(self, forward_batch: Any, num_prefills: int) -> PrefillPlan:
        starts = [int(start) for start in forward_batch.extend_prefix_lens_cpu[:num_prefills]]
        row_ends = [0]
        for length in forward_batch.extend_seq_lens_cpu[:num_prefills]:
            row_ends.append(row_ends[-1] + int(length))
        slots = self.forward_metadata.mamba_cache_indices[:num_prefills].to(torch.int64)
        captures: list[tuple[int, int]] = []
        kept = slots[:0]
        if self.forward_metadata.has_mamba_track_mask:
            tracked = forward_batch.mamba_track_mask[:num_prefills].nonzero().flatten()
            lengths = forward_batch.mamba_track_seqlens[:num_prefills].tolist()
            grid = self.layout.checkpoint_interval
            captures = [(row, lengths[row] // grid * grid) for row in tracked.tolist()]
            kept = forward_batch.mamba_track_indices[:num_prefills][tracked].to(torch.int64)
        further = [
            (row, *capture) for row, slot in enumerate(slots.tolist()) for capture in self.captures.pop(slot, ())
        ]
        captures += [(row, position) for row, position, _ in further]
        kept = torch.cat((kept, slots.new_tensor([slot for _, _, slot in further])))
        read = fresh = None
        if any(starts):
            read = self._rows(self.source[slots])
            fresh = torch.tensor([start == 0 for start in starts], device=slots.device)
        if self.audit is not None:
            ends = [start + end - first for start, (first, end) in zip(starts, pairwise(row_ends), strict=True)]
            kept_at = [position for _, position in captures]
            self._check_states(self.source[slots], torch.cat((slots, kept)), [*ends, *kept_at])
        written = torch.cat((slots, kept))
        self.states.set_source(written, written)
        return PrefillPlan(starts, row_ends, read, fresh, self._rows(slots), captures, self._rows(kept))

    def _plan_decode(self, forward_batch: Any, num_decodes: int) -> DecodePlan:
        indices = self.forward_metadata.mamba_cache_indices[-num_decodes:]
        # Most steps cross no boundary, and read and write where the last one did. Only a host that holds the tensors
        # sees that without waiting.
        crosses_none = indices.is_cpu and not self.forward_metadata.has_mamba_track_mask
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
        plan = DecodePlan(self._split_rows(both[0]), self._split_rows(both[1]))
        if crosses_none and torch.equal(both[0], both[1]):
            self.steady = SteadyDecode(indices, (self.states.source_writes, self.memory.pool.table_writes), plan)
        return plan

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
            layer = self.layers[layer_id] = Layer(self, mixer, layer_id)
        if self.prefill_plan is not None:
            layer.prefill(self.prefill_plan, mixed[:num_prefill], dt[:num_prefill], out[:num_prefill])
        if self.decode_plan is not None:
            rows = slice(num_prefill, num_prefill + num_decode)
            layer.decode(self.decode_plan, mixed[rows], dt[rows], out[rows])
        result, _ = mixer.out_proj(mixer.norm(out, gate))
        if output is not None:
            output[: result.shape[0]].copy_(result)
        return result


class Layer:
    """One Mamba2 layer's operators on one layer's states."""

    def __init__(self, backend: BoundaryMamba2Backend, mixer: Any, layer_id: int) -> None:
        pool = backend.memory.pool
        self.copied = backend.memory.copied
        self.mixer = mixer
        self.members: torch.Tensor = pool.ssm_members(layer_id)
        self.lines: torch.Tensor = pool.conv_lines(layer_id)
        address: RecurrentAddress = backend.layout.recurrent_slot(layer_id)
        self.columns = slice(address.first_member, address.first_member + backend.layout.members)
        self.line_column = address.conv_column
        self.grid_tokens = backend.layout.checkpoint_interval
        self.weight = mixer.conv1d.weight.squeeze(1)
        self.silu = mixer.activation == "silu"

    def prefill(self, plan: PrefillPlan, mixed: torch.Tensor, dt: torch.Tensor, out: torch.Tensor) -> None:
        """mixed: [T, channels] before the convolution; dt: [T, H]; out: [T, H * P], written."""
        position = {
            "query_start_loc": plan.row_ends,
            "start_positions": plan.starts,
            "grid_tokens": self.grid_tokens,
            "captures": plan.captures,
        }
        initial_windows, initial_states = self._gather(plan)
        convolved = conv_scan(
            mixed,
            self.weight,
            self.mixer.conv1d.bias,
            window_dtype=self.lines.dtype,
            silu=self.silu,
            initial_windows=initial_windows,
            **position,
        )
        x, B, C = _split(self.mixer, convolved.out)
        scanned = ssm_scan(
            x,
            dt,
            self.mixer.A,
            B,
            C,
            state_dtype=self.members.dtype,
            D=self.mixer.D,
            dt_bias=self.mixer.dt_bias,
            initial_states=initial_states,
            out=out.view(out.shape[0], -1, self.mixer.head_dim),
            **position,
        )
        for rows, windows, states in (
            (plan.write, convolved.final_windows, scanned.final_states),
            (plan.kept, convolved.captured_windows, scanned.captured_states),
        ):
            if states.shape[0]:
                self.lines[self._line(rows)] = windows
                pages = rows.members[:, self.columns].reshape(-1)
                self.members[pages] = states.view(len(pages), *self.members.shape[1:])
                self.copied.prefill_scatter += windows.nbytes + states.nbytes

    def decode(self, plan: DecodePlan, mixed: torch.Tensor, dt: torch.Tensor, out: torch.Tensor) -> None:
        """One token per row; shapes as `prefill` with T rows."""
        convolved = torch.empty_like(mixed)
        conv_path.update_lines(
            self.lines,
            mixed,
            self.weight,
            self.mixer.conv1d.bias,
            self._line(plan.read),
            self._line(plan.write),
            silu=self.silu,
            out=convolved,
        )
        x, B, C = _split(self.mixer, convolved)
        ssm_path.ssm_update(
            self.members,
            plan.read.members[:, self.columns],
            plan.write.members[:, self.columns],
            x,
            dt,
            self.mixer.A,
            B,
            C,
            self.mixer.D,
            self.mixer.dt_bias,
            None,
            out.view(out.shape[0], -1, self.mixer.head_dim),
        )

    def _line(self, rows: Rows) -> torch.Tensor:
        return rows.lines[:, self.line_column]

    def _gather(self, plan: PrefillPlan) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Windows [num_seqs, channels, d_conv - 1] and states [num_seqs, H, P, N] to continue from, zero for a sequence
        that has none: a fresh slot may hold what its last owner left. Copies; None if no sequence has any."""
        if plan.read is None:
            return None, None
        windows = self.lines[self._line(plan.read)]
        states = self.members[plan.read.members[:, self.columns]].flatten(1, 2)
        for gathered in (windows, states):
            gathered[plan.fresh] = 0
            self.copied.prefill_gather += gathered.nbytes
        return windows, states


def _split(mixer: Any, convolved: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cut the convolved channels into x [T, H, P], B and C [T, G, N]."""
    states = mixer.groups_ssm_state_size // mixer.tp_size
    x, B, C = convolved.split([mixer.intermediate_size // mixer.tp_size, states, states], dim=-1)
    T, groups = convolved.shape[0], mixer.n_groups // mixer.tp_size
    return x.view(T, -1, mixer.head_dim), B.view(T, groups, -1), C.view(T, groups, -1)


SEAMS: tuple[Seam, ...] = (
    Seam(
        "sglang.srt.layers.attention.hybrid_linear_attn_backend.Mamba2AttnBackend",
        "replace",
        BoundaryMamba2Backend,
        (),
        "states are read and written through the tables of the organization",
    ),
)
