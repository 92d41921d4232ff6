"""One Mamba2 decode step over a paged state: contract and dispatch.

For row b and head h, with the member column m = h // heads_per_member and the member's head k = h % heads_per_member:

    dt    = softplus(dt[b, h] + dt_bias[h])
    S     = S_src * exp(A[h] * dt) + (B[b, g] * dt) (x) x[b, h]
    y     = S . C[b, g] + D[h] * x[b, h]

S_src is `state[src_table[b, m], k]`, S goes to `state[dst_table[b, m], k]` and y to `out[b, h]`.

Everything is computed in float32; the state is rounded to its storage dtype only when stored. With z the output is
rounded to the dtype of `out`, multiplied by silu(z) rounded likewise, and rounded again, as SGLang's gate does.

The id -1 means absent. An absent source reads as zero, an absent destination is not written, a row absent on both sides
(padding) gets a zero output and touches no page. A table of several groups is passed as the columns of one,
`table[:, g * M : (g + 1) * M]`. Two rows may read one page; a page that is written may be read at the same place of the
source table only (`triton_ops.contract.check_tables`).

Source: Dao and Gu, "Transformers are SSMs", 2024, equation (1), discretized as in Mamba2's `selective_state_update`.
"""

from __future__ import annotations

import torch

from triton_ops.contract import (
    ACTIVATION_DTYPES,
    PARAMETER_DTYPES,
    STATE_DTYPES,
    check_tensor,
    expect,
    runs_triton,
)


def ssm_update(
    state: torch.Tensor,
    src_table: torch.Tensor,
    dst_table: torch.Tensor | None,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    z: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    may_start_early: bool = False,
) -> torch.Tensor:
    """Advance the states of a batch by one token and return the output of the layer.

    Runs the Triton kernel on CUDA (and in Triton's interpreter), the vectorized torch path on the CPU. Does not
    synchronize. Allocates only `out`, and only where it is not given.

    Args:
        state: `[num_pages, heads_per_member, P, N]` bfloat16 or float32, a view of one plane; strides
            (page_stride, head_stride, N, 1) elements. Written in place.
        src_table: `[batch, M] int32`, pages to read; M * heads_per_member = H.
        dst_table: `[batch, M] int32`, pages to write; None means in place, `src_table`.
        x: `[batch, H, P]`, any row stride, heads contiguous. `out` and z alike.
        dt: `[batch, H]`, before bias and softplus.
        A: `[H] float32`, negative.
        B: `[batch, G, N]`; head h uses group h // (H // G). C alike.
        D: `[H]`.
        dt_bias: `[H]`.
        z: gate, `[batch, H, P]`.
        out: `[batch, H, P]`.
        may_start_early: permission: the previous kernel on the stream writes neither `state` nor the tables. On Hopper
            and later this one then loads its states while that one ends; elsewhere it changes nothing.

    Raises:
        ValueError: a dtype, device, shape, stride or table width that the contract excludes.
    """
    _check(state, src_table, dst_table, x, dt, A, B, C, D, dt_bias, z)
    batch, H, P = x.shape
    if out is None:
        out = torch.empty((batch, H, P), dtype=x.dtype, device=x.device)
    else:
        _check_rows("out", out, batch, H, P, x.device)
    if batch == 0:
        return out
    if runs_triton(x):
        from triton_ops.ssm_update.kernel import prepare

        prepare(state, src_table, dst_table, x, dt, A, B, C, D, dt_bias, z, out, may_start_early=may_start_early).run()
    else:
        from triton_ops.ssm_update import torch_path

        torch_path.ssm_update(state, src_table, dst_table, x, dt, A, B, C, D, dt_bias, z, out)
    return out


def _check(
    state: torch.Tensor,
    src_table: torch.Tensor,
    dst_table: torch.Tensor | None,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    z: torch.Tensor | None,
) -> None:
    """Check everything but `out`."""
    device = state.device
    check_tensor("state", state, (None, None, None, None), STATE_DTYPES, device)
    _, heads_per_member, P, N = state.shape
    expect(heads_per_member > 0 and P > 0, "state.shape[1:3]", "at least one head and one row", list(state.shape[1:3]))
    expect(N > 0 and N & (N - 1) == 0, "state.shape[3] (N)", "a power of two", N)
    expect(state.stride(2) == N or P == 1, "state.stride(2)", f"{N} (rows of a head contiguous)", state.stride(2))
    check_tensor("x", x, (None, None, P), ACTIVATION_DTYPES, device)
    batch, H, _ = x.shape
    _check_rows("x", x, batch, H, P, device)
    expect(H % heads_per_member == 0, "x.shape[1] (H)", f"a multiple of {heads_per_member} heads per member", H)
    M = H // heads_per_member
    check_tensor("src_table", src_table, (batch, M), (torch.int32,), device)
    if dst_table is not None:
        check_tensor("dst_table", dst_table, (batch, M), (torch.int32,), device)
    check_tensor("dt", dt, (batch, H), ACTIVATION_DTYPES, device)
    check_tensor("A", A, (H,), (torch.float32,), device)
    check_tensor("D", D, (H,), PARAMETER_DTYPES, device)
    check_tensor("dt_bias", dt_bias, (H,), PARAMETER_DTYPES, device)
    check_tensor("B", B, (batch, None, N), ACTIVATION_DTYPES, device)
    G = B.shape[1]
    expect(G > 0 and H % G == 0, "B.shape[1] (G)", f"a divisor of {H} heads", G)
    check_tensor("C", C, (batch, G, N), ACTIVATION_DTYPES, device)
    if z is not None:
        _check_rows("z", z, batch, H, P, device)


def _check_rows(name: str, tensor: torch.Tensor, batch: int, H: int, P: int, device: torch.device) -> None:
    check_tensor(name, tensor, (batch, H, P), ACTIVATION_DTYPES, device)
    expect(H == 1 or tensor.stride(1) == P, f"{name}.stride(1)", f"{P} (heads contiguous)", tensor.stride(1))
