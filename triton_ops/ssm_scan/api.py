"""Contract of the Mamba2 scan: a packed batch, states in and out, cut at the checkpoint grid.

Recurrence of one head, in float32, with dt' = clamp(softplus(dt + dt_bias)):
    S[t] = exp(dt'[t] A) S[t-1] + dt'[t] x[t] B[t]^T        y[t] = S[t] C[t] + D x[t],   times silu(z[t])
With a grid the state at every absolute position that is a multiple of it is rounded to the storage type, and the scan
goes on from the rounded value: what follows a boundary does not depend on whether the state was computed or found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from triton_ops.chunk_grid import check_captures, cut_chunks

CHUNK_TOKENS = 64
"""Default chunk. 3,332 tokens of 24 heads x 32 x 128 in 2 groups take 43, 40 and 59 ms with chunks of 64, 128 and 256
on two AVX2 cores, 59, 74 and 119 ms on one; shorter chunks also pad less and round less.
"""


class ScanResult(NamedTuple):
    """out [T, H, P]; final_states [num_seqs, H, P, N], captured_states [num captures, H, P, N] in the storage type."""

    out: Tensor
    final_states: Tensor
    captured_states: Tensor


def ssm_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    query_start_loc: Sequence[int],
    state_dtype: torch.dtype,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = True,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    initial_states: Tensor | None = None,
    start_positions: Sequence[int] | None = None,
    grid_tokens: int | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
    captures: Sequence[tuple[int, int]] = (),
    out: Tensor | None = None,
) -> ScanResult:
    """Scan a packed batch of sequences.

    x: [T, H, P] float, any strides; z the same shape. dt: [T, H]. A, dt_bias: [H]. B, C: [T, G, N], G divides H.
    D: [H] or [H, P].
    query_start_loc: num_seqs + 1 rows on the host, from 0 to T.
    start_positions: tokens each sequence has consumed before (None: all 0).
    grid_tokens: distance of two boundaries; None: no rounding and no cut.
    initial_states: [num_seqs, H, P, N] float, or None for zeros.
    captures: (sequence, absolute position) pairs, the position from the sequence's start to its end; the state after
        the tokens before that position is returned.
    out: [T, H, P] written in place; None allocates one like x.

    Raises: ValueError for a wrong shape, device, type or position.
    """
    starts = [0] * (len(query_start_loc) - 1) if start_positions is None else start_positions
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    _check_shapes(x, dt, A, B, C, D, z, dt_bias, initial_states, out, len(starts))
    chunks = cut_chunks(query_start_loc, starts, chunk_tokens=chunk_tokens, grid_tokens=grid_tokens)
    if query_start_loc[-1] != x.shape[0]:
        raise ValueError(f"expected query_start_loc to end at {x.shape[0]} tokens, got {query_start_loc[-1]}")
    check_captures(captures, query_start_loc, starts)

    from triton_ops.ssm_scan.torch_path import ScanInputs, scan_chunks

    final, captured = scan_chunks(
        ScanInputs(x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit),
        chunks,
        initial_states,
        captures,
        num_sequences=len(starts),
        chunk_tokens=chunk_tokens,
        state_dtype=state_dtype,
        out=out,
    )
    return ScanResult(out, final, captured)


def _check_shapes(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    initial_states: Tensor | None,
    out: Tensor,
    num_sequences: int,
) -> None:
    if x.dim() != 3 or B.dim() != 3:
        raise ValueError(f"expected x [T, H, P] and B [T, G, N], got {list(x.shape)} and {list(B.shape)}")
    T, H, P = x.shape
    _, G, N = B.shape
    if G == 0 or H % G:
        raise ValueError(f"expected a number of groups that divides {H} heads, got {G}")
    expected: dict[str, tuple[Tensor | None, list[tuple[int, ...]]]] = {
        "dt": (dt, [(T, H)]),
        "A": (A, [(H,)]),
        "B": (B, [(T, G, N)]),
        "C": (C, [(T, G, N)]),
        "D": (D, [(H,), (H, P)]),
        "z": (z, [(T, H, P)]),
        "dt_bias": (dt_bias, [(H,)]),
        "initial_states": (initial_states, [(num_sequences, H, P, N)]),
        "out": (out, [(T, H, P)]),
    }
    for name, (tensor, shapes) in expected.items():
        if tensor is None:
            continue
        if tuple(tensor.shape) not in shapes:
            raise ValueError(f"expected {name} {' or '.join(map(str, shapes))}, got {tuple(tensor.shape)}")
        if tensor.device != x.device:
            raise ValueError(f"expected {name} on {x.device}, got {tensor.device}")
        if not tensor.is_floating_point():
            raise ValueError(f"expected {name} of a floating point type, got {tensor.dtype}")
