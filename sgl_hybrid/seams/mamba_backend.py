"""The Mamba2 backend of the memory organizations: SGLang's projections and norms around the operators of `triton_ops`.

Prefill scans start at the request's absolute position and hand out the state at the tracked boundary, wherever a chunk
of the prompt began. Decode updates the states in place and copies the rows that have just reached a boundary.

On a device other than the CPU SGLang's own kernels run instead (`Mamba2AttnBackend.forward`); they find a tracked
boundary only where it lies a whole number of kernel chunks behind the chunk's start.

Source: SGLang 0.5.23, `sglang/srt/layers/attention/hybrid_linear_attn_backend.py` and `mamba/mamba.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from sglang.srt.layers.attention.hybrid_linear_attn_backend import Mamba2AttnBackend

from sgl_hybrid.seams import process
from sgl_hybrid.seams.hooks import Seam
from triton_ops.conv_scan.api import conv_scan
from triton_ops.conv_update import torch_path as conv_update
from triton_ops.ssm_scan.api import ssm_scan
from triton_ops.ssm_update import torch_path as ssm_update


class PrefillPlan(NamedTuple):
    """What a prefill batch does with states, the same for every layer.

    starts: tokens each sequence has consumed. rows: packed rows, num_seqs + 1. slots: [num_seqs] state slots.
    fresh: [num_seqs] bool, sequences without a state. captures: (sequence, absolute boundary) whose state is kept in
    the slot of the same position in capture_slots.
    """

    starts: list[int]
    rows: list[int]
    slots: torch.Tensor
    fresh: torch.Tensor
    captures: list[tuple[int, int]]
    capture_slots: torch.Tensor


class BoundaryMamba2Backend(Mamba2AttnBackend):
    """`Mamba2AttnBackend` whose prefill tracks absolute boundaries (see the module)."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self.grid_tokens = process.served().plan.layout.checkpoint_interval
        self.on_cpu = torch.device(self.device).type == "cpu"
        self.prefill_plan: PrefillPlan | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        self.prefill_plan = None
        if self.on_cpu and self.forward_metadata.num_prefills > 0:
            self.prefill_plan = self._plan_prefill(forward_batch)

    def _init_track_conv_indices(self, *args: Any) -> torch.Tensor | None:
        return None if self.on_cpu else super()._init_track_conv_indices(*args)

    def _init_track_ssm_indices(self, *args: Any) -> tuple[torch.Tensor | None, ...]:
        return (None,) * 9 if self.on_cpu else super()._init_track_ssm_indices(*args)

    def _plan_prefill(self, forward_batch: Any) -> PrefillPlan:
        num_prefills = self.forward_metadata.num_prefills
        starts = [int(start) for start in forward_batch.extend_prefix_lens_cpu[:num_prefills]]
        rows = [0]
        for length in forward_batch.extend_seq_lens_cpu[:num_prefills]:
            rows.append(rows[-1] + int(length))
        slots = self.forward_metadata.mamba_cache_indices[:num_prefills].to(torch.int64)
        captures: list[tuple[int, int]] = []
        capture_slots = slots[:0]
        if self.forward_metadata.has_mamba_track_mask:
            tracked = forward_batch.mamba_track_mask[:num_prefills].nonzero().flatten()
            lengths = forward_batch.mamba_track_seqlens[:num_prefills].tolist()
            captures = [(row, lengths[row] // self.grid_tokens * self.grid_tokens) for row in tracked.tolist()]
            capture_slots = forward_batch.mamba_track_indices[:num_prefills][tracked].to(torch.int64)
        fresh = torch.tensor([start == 0 for start in starts])
        return PrefillPlan(starts, rows, slots, fresh, captures, capture_slots)

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
        if not self.on_cpu:
            return super().forward(
                mixer, hidden_states, output, layer_id, forward_batch, mup_vector, use_triton_causal_conv
            )
        metadata = self.forward_metadata
        cache = self.req_to_token_pool.mamba2_layer_cache(layer_id)
        projected, _ = mixer.in_proj(hidden_states)
        if mup_vector is not None:
            projected = projected * mup_vector
        inner = mixer.intermediate_size // mixer.tp_size
        channels = mixer.conv_dim // mixer.tp_size
        gate, mixed, dt = projected.split([inner, channels, mixer.num_heads // mixer.tp_size], dim=-1)
        out = torch.empty((projected.shape[0], inner), dtype=hidden_states.dtype, device=hidden_states.device)
        num_prefill, num_decode = metadata.num_prefill_tokens, metadata.num_decodes
        out[num_prefill + num_decode :].zero_()
        if num_prefill:
            self._prefill(mixer, cache, mixed[:num_prefill], dt[:num_prefill], out[:num_prefill])
        if num_decode:
            rows = slice(num_prefill, num_prefill + num_decode)
            self._decode(mixer, cache, mixed[rows], dt[rows], out[rows], forward_batch)
        result, _ = mixer.out_proj(mixer.norm(out, gate))
        if output is not None:
            output[: result.shape[0]].copy_(result)
        return result

    def _prefill(self, mixer: Any, cache: Any, mixed: torch.Tensor, dt: torch.Tensor, out: torch.Tensor) -> None:
        plan, windows, states = self.prefill_plan, cache.conv[0], cache.temporal
        position = {
            "query_start_loc": plan.rows,
            "start_positions": plan.starts,
            "grid_tokens": self.grid_tokens,
            "captures": plan.captures,
        }
        started = not bool(plan.fresh.all())
        convolved = conv_scan(
            mixed,
            mixer.conv1d.weight.squeeze(1),
            mixer.conv1d.bias,
            window_dtype=windows.dtype,
            silu=mixer.activation == "silu",
            initial_windows=_initial(windows, plan) if started else None,
            **position,
        )
        x, B, C = _split(mixer, convolved.out)
        scanned = ssm_scan(
            x,
            dt,
            mixer.A,
            B,
            C,
            state_dtype=states.dtype,
            D=mixer.D,
            dt_bias=mixer.dt_bias,
            initial_states=_initial(states, plan) if started else None,
            out=out.view(out.shape[0], -1, mixer.head_dim),
            **position,
        )
        windows[plan.slots] = convolved.final_windows
        states[plan.slots] = scanned.final_states
        windows[plan.capture_slots] = convolved.captured_windows
        states[plan.capture_slots] = scanned.captured_states

    def _decode(
        self, mixer: Any, cache: Any, mixed: torch.Tensor, dt: torch.Tensor, out: torch.Tensor, forward_batch: Any
    ) -> None:
        windows, states = cache.conv[0], cache.temporal
        num_decode = mixed.shape[0]
        slots = self.forward_metadata.mamba_cache_indices[-num_decode:].to(torch.int64)
        convolved = torch.empty_like(mixed)
        conv_update.update_slots(
            windows,
            mixed,
            mixer.conv1d.weight.squeeze(1),
            mixer.conv1d.bias,
            slots,
            silu=mixer.activation == "silu",
            out=convolved,
        )
        x, B, C = _split(mixer, convolved)
        inputs = ssm_update.StepInputs(x, dt, mixer.A, B, C, mixer.D, None, mixer.dt_bias)
        ssm_update.update_slots(states, inputs, slots, out=out.view(num_decode, -1, mixer.head_dim))
        if forward_batch.mamba_track_mask is not None:
            tracked = forward_batch.mamba_track_mask[-num_decode:].nonzero().flatten()
            if tracked.numel():
                kept = self.forward_metadata.mamba_track_indices[-num_decode:][tracked].to(torch.int64)
                windows[kept] = windows[slots[tracked]]
                states[kept] = states[slots[tracked]]


def _initial(pool: torch.Tensor, plan: PrefillPlan) -> torch.Tensor:
    """Gather the states that the sequences continue from; a fresh sequence starts from zeros, not from its slot."""
    gathered = pool[plan.slots]
    gathered[plan.fresh] = 0
    return gathered


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
        "states are tracked at absolute boundaries and read from the organization's pools",
    ),
)
