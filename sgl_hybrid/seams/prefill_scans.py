"""The Mamba2 operators of a prefill: what a server does with a packed batch, chosen once when it starts.

`TorchScans` runs on any device and rounds states at the boundaries of the absolute grid, so that what follows a found
state has the bits of what follows a computed one. `stock_scans` runs SGLang's Triton kernels, which round nothing at a
boundary and begin their chunks at the first row of the batch: a state then depends on its company in its last bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from triton_ops.conv_scan.api import ConvScanResult, conv_scan
from triton_ops.ssm_scan.api import ScanResult, ssm_scan


class Batch(NamedTuple):
    """Where the sequences of a packed batch lie and what is kept of them, on the host.

    starts: tokens each sequence has consumed. row_ends: packed rows, num_seqs + 1, the first 0. captures: (sequence,
    absolute boundary) whose window and state are wanted.
    """

    starts: Sequence[int]
    row_ends: Sequence[int]
    captures: Sequence[tuple[int, int]]


class Scans(Protocol):
    """The two operators on one batch, the same for every layer."""

    def convolve(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        silu: bool,
        windows: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> ConvScanResult:
        """Convolve x [T, C] with weight [C, W] and bias [C].

        windows: [num_seqs, C, W - 1] to continue from, in `dtype`; they may be overwritten. None: zeros.
        dtype: the type of windows, those returned too.
        """
        ...

    def scan(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        mixer: Any,
        *,
        states: torch.Tensor | None,
        dtype: torch.dtype,
        out: torch.Tensor,
    ) -> ScanResult:
        """Scan x [T, H, P] with dt [T, H] before its softplus and B, C [T, G, N]; write out [T, H, P].

        mixer: has A, D and dt_bias, [H] each. states: [num_seqs, H, P, N] to continue from, in `dtype`; None: zeros.
        dtype: the type of states, those returned too.
        """
        ...


MakeScans = Callable[[Batch], Scans]
"""The operators of a server, for a batch of it."""


class TorchScans:
    """The torch operators of `triton_ops`. grid_tokens: distance of two boundaries.

    Their chunks never straddle a boundary, and each is some thirty operations.
    """

    def __init__(self, batch: Batch, *, grid_tokens: int) -> None:
        self.position: dict[str, Any] = {
            "query_start_loc": batch.row_ends,
            "start_positions": batch.starts,
            "grid_tokens": grid_tokens,
            "captures": batch.captures,
        }

    def convolve(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        silu: bool,
        windows: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> ConvScanResult:
        return conv_scan(x, weight, bias, window_dtype=dtype, silu=silu, initial_windows=windows, **self.position)

    def scan(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        mixer: Any,
        *,
        states: torch.Tensor | None,
        dtype: torch.dtype,
        out: torch.Tensor,
    ) -> ScanResult:
        return ssm_scan(
            x,
            dt,
            mixer.A,
            B,
            C,
            state_dtype=dtype,
            D=mixer.D,
            dt_bias=mixer.dt_bias,
            initial_states=states,
            out=out,
            **self.position,
        )
