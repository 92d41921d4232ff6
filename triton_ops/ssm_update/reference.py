"""Oracle of the paged Mamba2 decode step: numpy float32, the operations in the order of the kernel.

exp and log are numpy's because torch's differ from them by one unit in the last place; the kernel under Triton's
interpreter uses numpy's. Loads convert to float32, stores round to nearest even.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[np.float32]


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
    z: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Update `state` and `out` in place, as `api.ssm_update`; all sources are read before a destination is written."""
    dst_table = src_table if dst_table is None else dst_table
    batch, H, P = x.shape
    _, heads_per_member, _, N = state.shape
    group_of_head = np.arange(H) // (H // B.shape[1])

    S = torch.zeros((batch, H, P, N), dtype=torch.float32)
    for b, m, page in _present(src_table):
        S[b, m * heads_per_member : (m + 1) * heads_per_member] = state[page].float()
    x_f, B_f, C_f = _float(x), _float(B)[:, group_of_head], _float(C)[:, group_of_head]

    step = _float(dt) + _float(dt_bias)
    small = step <= 20.0
    step[small] = np.log(np.exp(step[small]) + np.float32(1.0))
    decay = np.exp(_float(A) * step)
    dB = B_f * step[:, :, None]
    S_new = S.numpy() * decay[:, :, None, None] + dB[:, :, None, :] * x_f[:, :, :, None]
    y = np.sum(S_new * C_f[:, :, None, :], axis=3) + x_f * _float(D)[:, None]
    if z is not None:
        y = _round(y, out.dtype) * _round(_silu(_float(z)), out.dtype)

    padded = ((src_table < 0) & (dst_table < 0)).repeat_interleave(heads_per_member, dim=1)
    out.copy_(torch.from_numpy(y).masked_fill(padded[:, :, None], 0.0))
    for b, m, page in _present(dst_table):
        heads = S_new[b, m * heads_per_member : (m + 1) * heads_per_member]
        state[page] = torch.from_numpy(heads).to(state.dtype)


def _present(table: torch.Tensor) -> list[tuple[int, int, int]]:
    """Return (row, member, page) of every id that is not absent."""
    return [(b, m, page) for b, row in enumerate(table.tolist()) for m, page in enumerate(row) if page >= 0]


def _float(tensor: torch.Tensor) -> Array:
    array: Array = tensor.float().numpy()
    return array


def _silu(array: Array) -> Array:
    with np.errstate(over="ignore"):
        return np.divide(array, np.float32(1.0) + np.exp(-array), dtype=np.float32)


def _round(array: Array, dtype: torch.dtype) -> Array:
    """Round a float32 array to `dtype` and back."""
    return _float(torch.from_numpy(array).to(dtype))
