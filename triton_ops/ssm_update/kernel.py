"""Triton kernel of the paged Mamba2 decode step.

One program updates BM rows of one head of one batch row. It needs no barrier: the reduction over N stays inside a warp.
All strides are constants, so that the vector width survives the page arithmetic; what is uniform in a program is added
to the base pointer as one 64-bit scalar, so that the rows of the tile become immediate offsets. Vectors are loaded one
dimensional and broadcast; loading them as [BM, 1] or [1, N] tiles doubles the instructions.

Letters: H heads, P head dimension, N state dimension, BM rows of P per program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triton_ops.launch import Launch, can_start_early


@triton.jit(do_not_specialize_on_alignment=["src_table", "dst_table"])
def _ssm_update_kernel(
    state,
    src_table,
    dst_table,
    x,
    dt,
    A,
    B,
    C,
    D,
    dt_bias,
    z,
    out,
    PAGE_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    SRC_STRIDE: tl.constexpr,
    DST_STRIDE: tl.constexpr,
    X_STRIDE: tl.constexpr,
    DT_STRIDE: tl.constexpr,
    B_STRIDE: tl.constexpr,
    B_GROUP_STRIDE: tl.constexpr,
    C_STRIDE: tl.constexpr,
    C_GROUP_STRIDE: tl.constexpr,
    Z_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    HEADS_PER_MEMBER: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    BM: tl.constexpr,
    IN_PLACE: tl.constexpr,
    EARLY: tl.constexpr,
):
    first_row = tl.program_id(0) * BM
    head = tl.program_id(1)
    batch_row = tl.program_id(2).to(tl.int64)
    member = head // HEADS_PER_MEMBER
    group = head // HEADS_PER_GROUP
    m = tl.arange(0, BM)
    n = tl.arange(0, N)

    src = tl.load(src_table + batch_row * SRC_STRIDE + member).to(tl.int64)
    dst = src
    if not IN_PLACE:
        dst = tl.load(dst_table + batch_row * DST_STRIDE + member).to(tl.int64)
    out_rows = out + (batch_row * OUT_STRIDE + head * P + first_row) + m
    if (src < 0) & (dst < 0):
        if EARLY:
            tl.extra.cuda.gdc_wait()
        tl.store(out_rows, tl.zeros([BM], dtype=out.dtype.element_ty))
        return

    in_page = (head % HEADS_PER_MEMBER) * HEAD_STRIDE + first_row * N
    tile = m[:, None] * N + n[None, :]
    S = tl.load(state + (src * PAGE_STRIDE + in_page) + tile, mask=src >= 0, other=0.0).to(tl.float32)
    if EARLY:
        # Tables and states were written long before; the activations come from the kernel that may still run.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    step = tl.load(dt + batch_row * DT_STRIDE + head).to(tl.float32) + tl.load(dt_bias + head).to(tl.float32)
    step = tl.where(step <= 20.0, tl.log(tl.exp(step) + 1.0), step)
    decay = tl.exp(tl.load(A + head).to(tl.float32) * step)
    x_m = tl.load(x + (batch_row * X_STRIDE + head * P + first_row) + m).to(tl.float32)
    B_n = tl.load(B + (batch_row * B_STRIDE + group * B_GROUP_STRIDE) + n).to(tl.float32) * step
    C_n = tl.load(C + (batch_row * C_STRIDE + group * C_GROUP_STRIDE) + n).to(tl.float32)

    S = S * decay + B_n[None, :] * x_m[:, None]
    tl.store(state + (dst * PAGE_STRIDE + in_page) + tile, S.to(state.dtype.element_ty), mask=dst >= 0)

    y = tl.sum(S * C_n[None, :], axis=1) + x_m * tl.load(D + head).to(tl.float32)
    if z is not None:
        gate = tl.load(z + (batch_row * Z_STRIDE + head * P + first_row) + m).to(tl.float32)
        gate = gate / (1.0 + tl.exp(-gate))
        y = y.to(out.dtype.element_ty).to(tl.float32) * gate.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out_rows, y.to(out.dtype.element_ty))


def tile_rows(batch: int, P: int, N: int, itemsize: int) -> int:
    """Return BM: rows of P per program, the largest power of two that divides P within the register budget.

    A warp keeps 1,024 float32 elements of state in registers, 2,048 where a bfloat16 state meets a batch of 8 or more:
    there the bytes in flight decide; below it, and for float32, the number of programs does.
    """
    elements = 2048 if itemsize == 2 and batch >= 8 else 1024
    return min(P & -P, max(1, elements // N))


def prepare(
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
    out: torch.Tensor,
    *,
    BM: int | None = None,
    num_warps: int = 1,
    may_start_early: bool = False,
) -> Launch:
    """Return the launch for arguments that satisfy the contract of `api.ssm_update`; BM None takes `tile_rows`."""
    batch, H, P = x.shape
    _, heads_per_member, _, N = state.shape
    BM = BM or tile_rows(batch, P, N, state.element_size())
    in_place = dst_table is None
    early = may_start_early and can_start_early()
    constants = {
        "PAGE_STRIDE": state.stride(0),
        "HEAD_STRIDE": state.stride(1),
        "SRC_STRIDE": src_table.stride(0),
        "DST_STRIDE": 0 if dst_table is None else dst_table.stride(0),
        "X_STRIDE": x.stride(0),
        "DT_STRIDE": dt.stride(0),
        "B_STRIDE": B.stride(0),
        "B_GROUP_STRIDE": B.stride(1),
        "C_STRIDE": C.stride(0),
        "C_GROUP_STRIDE": C.stride(1),
        "Z_STRIDE": 0 if z is None else z.stride(0),
        "OUT_STRIDE": out.stride(0),
        "HEADS_PER_MEMBER": heads_per_member,
        "HEADS_PER_GROUP": H // B.shape[1],
        "P": P,
        "N": N,
        "BM": BM,
        "IN_PLACE": in_place,
        "EARLY": early,
    }
    tables = (src_table, src_table if dst_table is None else dst_table)
    args = (state, *tables, x, dt, A, B, C, D, dt_bias, z, out)
    return Launch(_ssm_update_kernel, (P // BM, H, batch), args, constants, num_warps, early)
