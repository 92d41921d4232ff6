"""CPU stand-ins for the Mamba2 kernels that SGLang 0.5.23 calls, with its signatures and contracts.

They take the place of `causal_conv1d_fn`, `causal_conv1d_update` (and their `_triton` names), `selective_state_update`
and `mamba_chunk_scan_combined` in `sglang.srt.layers.attention.mamba.mamba`, and of `track_mamba_states_if_needed` in
`sglang.srt.layers.attention.hybrid_linear_attn_backend`. Arguments that only speculative decoding passes are refused.

One difference is on purpose: SGLang's kernels lay one chunk grid over the packed batch, here every sequence has its own
grid from its first token, so that a sequence's result does not depend on its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from triton_ops.conv_scan.api import conv_scan
from triton_ops.conv_update import torch_path as conv_update
from triton_ops.ssm_scan.api import CHUNK_TOKENS, ssm_scan
from triton_ops.ssm_update import torch_path as ssm_update

PAD_SLOT_ID = -1


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    conv_states: Tensor | None = None,
    activation: str | None = "silu",
    pad_slot_id: int = PAD_SLOT_ID,
    seq_lens_cpu: Sequence[int] | None = None,
    **kwargs: object,
) -> Tensor:
    """Convolve a packed batch, update `conv_states` in place and return the output, channel-last like x.

    x: [C, T]. weight: [C, W]. query_start_loc: [num_seqs + 1]. conv_states: [num_slots, C, >= W - 1].
    A sequence whose cache index is `pad_slot_id` is not processed and its output is zero; an empty one keeps its state.
    """
    _refuse(kwargs)
    channels, num_tokens = x.shape
    past = weight.shape[1] - 1
    rows = [0, num_tokens] if query_start_loc is None else query_start_loc.tolist()
    num_seqs = len(rows) - 1
    slots = list(range(num_seqs)) if cache_indices is None else cache_indices.tolist()
    active = [index for index in range(num_seqs) if slots[index] != pad_slot_id and rows[index + 1] > rows[index]]
    out = torch.zeros(num_tokens, channels, dtype=x.dtype, device=x.device)
    if not active:
        return out.t()

    windows = None
    if conv_states is not None and has_initial_state is not None:
        windows = torch.zeros(num_seqs, channels, past, dtype=conv_states.dtype, device=x.device)
        for index in active:
            if bool(has_initial_state[index]):
                windows[index] = conv_states[slots[index], :, :past]
    result = conv_scan(
        x.t(),
        weight,
        bias,
        query_start_loc=rows,
        window_dtype=x.dtype if conv_states is None else conv_states.dtype,
        silu=_is_silu(activation),
        initial_windows=windows,
        out=out,
    )
    for index in range(num_seqs):
        if index in active:
            if conv_states is not None:
                conv_states[slots[index], :, :past] = result.final_windows[index]
        else:
            out[rows[index] : rows[index + 1]] = 0.0
    return out.t()


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: bool | str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
    num_accept_tokens: Tensor | None = None,
    intermediate_conv_window: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    retrieve_next_token: Tensor | None = None,
    retrieve_next_sibling: Tensor | None = None,
    retrieve_parent_token: Tensor | None = None,
    pad_slot_id: int = PAD_SLOT_ID,
    metadata: object = None,
    validate_data: bool = False,
) -> Tensor:
    """Convolve one token per row, shift `conv_state` in place and return the output, shaped like x.

    x: [R, C] or [R, C, 1]. conv_state: [num_slots, C, >= W - 1]. A padded row's output is zero.
    """
    _refuse(
        {
            "cache_seqlens": cache_seqlens,
            "num_accept_tokens": num_accept_tokens,
            "intermediate_conv_window": intermediate_conv_window,
            "intermediate_state_indices": intermediate_state_indices,
            "retrieve_next_token": retrieve_next_token,
            "retrieve_next_sibling": retrieve_next_sibling,
            "retrieve_parent_token": retrieve_parent_token,
        }
    )
    tokens = x if x.dim() == 2 else x.squeeze(2)
    if tokens.dim() != 2:
        raise NotImplementedError(f"expected one token per row on the CPU platform, got x {tuple(x.shape)}")
    out = torch.empty(tokens.shape, dtype=x.dtype, device=x.device)
    conv_update.update_slots(
        conv_state[:, :, : weight.shape[1] - 1],
        tokens,
        weight,
        bias,
        conv_state_indices,
        silu=_is_silu(activation),
        out=out,
        pad_slot=pad_slot_id,
    )
    return out.view(x.shape)


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
    pad_slot_id: int = PAD_SLOT_ID,
    out: Tensor | None = None,
    disable_state_update: bool = False,
    intermediate_states_buffer: Tensor | None = None,
    cache_steps: int | None = None,
    retrieve_parent_token: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
) -> None:
    """Advance the states of a decode batch by one token in place and write `out`; a padded row's output is zero.

    state: [num_slots, H, P, N]. x, z, out: [R, H, P]. B, C: [R, G, N]. dt [R, H, P], A [H, P, N], dt_bias and D [H, P]
    come from SGLang expanded over P and N; only dt, A and dt_bias that are one value per head are taken.
    """
    _refuse(
        {
            "intermediate_states_buffer": intermediate_states_buffer,
            "cache_steps": cache_steps,
            "retrieve_parent_token": retrieve_parent_token,
            "intermediate_state_indices": intermediate_state_indices,
        }
    )
    if x.dim() != 3 or out is None:
        raise NotImplementedError(f"expected x [rows, heads, head_dim] and out, got x {tuple(x.shape)}")
    ssm_update.update_slots(
        state,
        ssm_update.StepInputs(
            x,
            _one_per_head("dt", dt, 1),
            _one_per_head("A", A, 2),
            B,
            C,
            D,
            z,
            None if dt_bias is None else _one_per_head("dt_bias", dt_bias, 1),
            dt_softplus,
        ),
        state_batch_indices,
        out=out,
        pad_slot=pad_slot_id,
        write_states=not disable_state_update,
    )


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    chunk_offsets: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    out: Tensor | None = None,
    return_final_states: bool = False,
    return_varlen_states: bool = False,
    return_intermediate_states: bool = False,
    state_dtype: torch.dtype | None = None,
    return_track_states: bool = False,
    track_seq_idx: Tensor | None = None,
    track_end_locs: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Scan a packed batch, write `out` in place, and return (states, final states per sequence, tracked states).

    x, z, out: [1, T, H, P]. dt: [1, T, H]. B, C: [1, T, G, N]. cu_seqlens: [num_seqs + 1].
    initial_states: [num_seqs, H, P, N] or None. track_seq_idx, track_end_locs: [k] sequence and packed row.

    states: [1, ceil(T / chunk_size), H, P, N]; entry c is the state before packed row c * chunk_size, of the sequence
    that holds the row before it (entry 0: the first initial state). SGLang's track plan reads only entries that are
    also on that sequence's own grid; the others are NaN. Final states: [num_seqs, H, P, N]. Tracked states:
    [1, k, H, P, N] or None. All in `state_dtype`, which is C's type if not given.

    `seq_idx`, `chunk_indices` and `chunk_offsets` repeat what cu_seqlens says and are not read.
    """
    if not (return_varlen_states and return_track_states) or return_final_states or return_intermediate_states:
        raise NotImplementedError("expected the call of MambaMixer2: varlen and track states, no others")
    if cu_seqlens is None or out is None or x.shape[0] != 1:
        raise NotImplementedError(f"expected one packed batch with cu_seqlens and out, got x {tuple(x.shape)}")
    dtype = C.dtype if state_dtype is None else state_dtype
    rows = cu_seqlens.tolist()

    captures: list[tuple[int, int]] = []
    rows_of_states: list[int] = []
    num_chunks = -(-x.shape[1] // chunk_size)
    sequence = 0
    for index in range(1, num_chunks):
        while rows[sequence + 1] < index * chunk_size:
            sequence += 1
        position = index * chunk_size - rows[sequence]
        if position % chunk_size == 0:
            captures.append((sequence, position))
            rows_of_states.append(index)
    num_tracked = 0
    if track_seq_idx is not None and track_end_locs is not None:
        num_tracked = track_end_locs.numel()
        for tracked, end in zip(track_seq_idx.tolist(), track_end_locs.tolist(), strict=True):
            captures.append((tracked, end - rows[tracked]))

    result = ssm_scan(
        x[0],
        dt[0],
        A,
        B[0],
        C[0],
        query_start_loc=rows,
        state_dtype=dtype,
        D=D,
        z=None if z is None else z[0],
        dt_bias=dt_bias,
        dt_softplus=dt_softplus,
        dt_limit=dt_limit,
        initial_states=initial_states,
        chunk_tokens=math.gcd(chunk_size, CHUNK_TOKENS),
        captures=captures,
        out=out[0],
    )
    states = torch.full((1, num_chunks, *result.final_states.shape[1:]), float("nan"), dtype=dtype, device=x.device)
    if num_chunks:
        states[0, 0] = 0.0 if initial_states is None else initial_states[0]
    states[0, rows_of_states] = result.captured_states[: len(rows_of_states)]
    track_states = result.captured_states[len(rows_of_states) :].unsqueeze(0) if num_tracked else None
    return states, result.final_states, track_states


def track_mamba_states_if_needed(
    conv_states: Tensor,
    ssm_states: Tensor,
    cache_indices: Tensor,
    mamba_track_mask: Tensor,
    mamba_track_indices: Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """Copy the states of the masked rows from `cache_indices` to `mamba_track_indices`, in place.

    conv_states, ssm_states: [num_slots, ...]. Indices and mask: [batch_size]. A negative index names a freed slot and
    is skipped; SGLang asks for that with `check_freed_slots`, without it none may occur.
    """
    tracked = mamba_track_mask[:batch_size].nonzero()[:, 0]
    if tracked.numel() == 0:
        return
    sources = cache_indices[tracked].to(torch.int64)
    destinations = mamba_track_indices[tracked].to(torch.int64)
    valid = (sources >= 0) & (destinations >= 0)
    if not bool(valid.all()):
        if not check_freed_slots:
            raise ValueError(f"expected slots >= 0, got {sources.tolist()} to {destinations.tolist()}")
        sources, destinations = sources[valid], destinations[valid]
    for states in (conv_states, ssm_states):
        states.index_copy_(0, destinations, states.index_select(0, sources))


def _is_silu(activation: bool | str | None) -> bool:
    if activation in ("silu", "swish", True):
        return True
    if activation in (None, False):
        return False
    raise ValueError(f"expected activation silu, swish or None, got {activation!r}")


def _one_per_head(name: str, tensor: Tensor, num_expanded: int) -> Tensor:
    """Drop the last `num_expanded` dimensions, which must be expanded from one value."""
    expanded = zip(tensor.stride()[-num_expanded:], tensor.shape[-num_expanded:], strict=True)
    if any(stride != 0 and size != 1 for stride, size in expanded):
        raise NotImplementedError(f"expected {name} with one value per head, got strides {tensor.stride()}")
    return tensor[(..., *[0] * num_expanded)]


def _refuse(arguments: dict[str, object]) -> None:
    given = [name for name, value in arguments.items() if value is not None]
    if given:
        raise NotImplementedError(f"the CPU platform does not take {', '.join(given)} (speculative decoding)")
