"""One Mamba2 layer's operators on one layer's states: decode in torch on a CPU and in Triton where there is a GPU,
prefill by the operators that the server has chosen (`prefill_scans`).

Imports no SGLang: the mixer comes in as an object with its parameters.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from sgl_hybrid.memory.state_memory import StateMemory
from sgl_hybrid.seams.decode_tables import DecodePlan, Rows
from sgl_hybrid.seams.prefill_scans import Scans
from triton_ops.contract import runs_triton
from triton_ops.conv_update import torch_path as conv_path
from triton_ops.conv_update.api import conv_update
from triton_ops.ssm_update import torch_path as ssm_path
from triton_ops.ssm_update.api import ssm_update


class PrefillPlan(NamedTuple):
    """What the prefill rows of a batch do with states, the same for every layer.

    scans: the operators on the batch. read: rows of the slots to continue from; fresh: [num_seqs] bool, sequences
    without a state (None if there is none). write: rows of the sequences' own slots. kept: rows of the slots that the
    batch's captures go to, in their order. All rows are int64.
    """

    scans: Scans
    read: Rows | None
    fresh: torch.Tensor | None
    write: Rows
    kept: Rows


class Layer:
    """The operators of one layer (see the module)."""

    def __init__(self, memory: StateMemory, mixer: Any, layer_id: int) -> None:
        address = memory.layout.recurrent_slot(layer_id)
        self.copied = memory.copied
        self.mixer = mixer
        self.members: torch.Tensor = memory.pool.ssm_members(layer_id)
        self.lines: torch.Tensor = memory.pool.conv_lines(layer_id)
        self.columns = slice(address.first_member, address.first_member + memory.layout.members)
        self.line_column = address.conv_column
        self.weight = mixer.conv1d.weight.squeeze(1)
        self.silu = mixer.activation == "silu"
        self._step = self._decode_kernels if runs_triton(self.members) else self._decode_torch

    def prefill(self, plan: PrefillPlan, mixed: torch.Tensor, dt: torch.Tensor, out: torch.Tensor) -> None:
        """mixed: [T, channels] before the convolution; dt: [T, H]; out: [T, H * P], written."""
        windows, states = self._gather(plan)
        convolved = plan.scans.convolve(
            mixed, self.weight, self.mixer.conv1d.bias, silu=self.silu, windows=windows, dtype=self.lines.dtype
        )
        x, B, C = _split(self.mixer, convolved.out)
        scanned = plan.scans.scan(
            x,
            dt,
            B,
            C,
            self.mixer,
            states=states,
            dtype=self.members.dtype,
            out=out.view(out.shape[0], -1, self.mixer.head_dim),
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
        """One token per row; shapes as `prefill` with T rows. Where Triton runs, the plan's rows are int32, and neither
        kernel waits for anything."""
        self._step(plan, mixed, dt, out.view(out.shape[0], -1, self.mixer.head_dim))

    def _decode_kernels(self, plan: DecodePlan, mixed: torch.Tensor, dt: torch.Tensor, out: torch.Tensor) -> None:
        convolved = conv_update(
            self.lines.transpose(1, 2),
            self._line(plan.read),
            self._line(plan.write),
            mixed,
            self.weight.t(),
            self.mixer.conv1d.bias,
            activation="silu" if self.silu else None,
        )
        x, B, C = _split(self.mixer, convolved)
        ssm_update(
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
            out=out,
        )

    def _decode_torch(self, plan: DecodePlan, mixed: torch.Tensor, dt: torch.Tensor, out: torch.Tensor) -> None:
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
            out,
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
