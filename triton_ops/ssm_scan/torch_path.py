"""Mamba2 chunked scan in vectorized torch.

Chunks are scanned one after another and every chunk runs the same operations on buffers of one fixed shape, padded with
zeros. A chunk's result therefore depends on its tokens and on the state before it, not on the chunks, the sequences or
the rows around it: a sequence resumed at a boundary repeats the arithmetic of one that passed it, bit for bit.

Letters: T tokens, L tokens of a chunk, H heads, P head dimension, N state dimension, G groups of B and C.
Source: Dao and Gu, "Transformers are SSMs", 2024, section 6 (block decomposition of the semiseparable matrix).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from triton_ops.chunk_grid import Chunk


class ScanInputs(NamedTuple):
    """Packed inputs of a scan: x, z [T, H, P]; dt [T, H]; A [H]; B, C [T, G, N]; D [H] or [H, P]; dt_bias [H]."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    z: Tensor | None
    dt_bias: Tensor | None
    dt_softplus: bool
    dt_limit: tuple[float, float]


class _ChunkScanner:
    """Buffers of one chunk, float32, rows past its tokens zero, and the operations on them."""

    def __init__(self, inputs: ScanInputs, chunk_tokens: int) -> None:
        self.inputs = inputs
        _, H, P = inputs.x.shape
        _, G, N = inputs.B.shape
        L = self.length = chunk_tokens
        self.H, self.P, self.G, self.N = H, P, G, N

        def buffer(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=inputs.x.device)

        self.x = buffer(L, H, P)
        self.xdt = buffer(L, H, P)
        self.dt = buffer(L, H)
        self.B = buffer(L, G, N)
        self.C = buffer(L, G, N)
        self.z = buffer(L, H, P) if inputs.z is not None else None
        self.CB = buffer(G, L, L)
        self.mixing = buffer(H, L, L)
        self.y_inside = buffer(H, L, P)
        self.y_before = buffer(G, L, H // G * P)
        self.future = torch.full((L, L), float("-inf"), device=inputs.x.device).triu_(1)
        self.A = inputs.A.float()
        self.dt_bias = None if inputs.dt_bias is None else inputs.dt_bias.float()
        self.D = None
        if inputs.D is not None:
            self.D = (inputs.D if inputs.D.dim() == 2 else inputs.D[:, None]).float().expand(H, P).contiguous()

    def load(self, chunk: Chunk) -> None:
        """Copy the chunk's tokens in, discretize dt, and sum the log decay [H, L] up to and including each token."""
        inputs, n = self.inputs, chunk.num_tokens
        rows = slice(chunk.row, chunk.row + n)
        pairs = [(self.x, inputs.x), (self.B, inputs.B), (self.C, inputs.C), (self.dt, inputs.dt)]
        if self.z is not None and inputs.z is not None:
            pairs.append((self.z, inputs.z))
        for target, source in pairs:
            target[:n].copy_(source[rows])
            if n < self.length:
                target[n:].zero_()
        dt = self.dt
        if self.dt_bias is not None:
            dt.add_(self.dt_bias)
        if inputs.dt_softplus:
            dt = functional.softplus(dt)
        dt = dt.clamp(*inputs.dt_limit)
        if n < self.length:
            dt[n:].zero_()
        self.log_decay = torch.cumsum((dt * self.A).t().contiguous(), dim=1)
        torch.mul(self.x, dt[:, :, None], out=self.xdt)

    def outputs(self, state: Tensor) -> Tensor:
        """Return y [L, H, P] float32 of the loaded chunk; state: [H, P, N] float32 before its first token."""
        L, H, P, G, N = self.length, self.H, self.P, self.G, self.N
        C = self.C.transpose(0, 1)
        torch.bmm(C, self.B.permute(1, 2, 0), out=self.CB)
        torch.sub(self.log_decay[:, :, None], self.log_decay[:, None, :], out=self.mixing)
        self.mixing.add_(self.future).exp_()
        self.mixing.view(G, H // G, L, L).mul_(self.CB[:, None])
        torch.bmm(self.mixing, self.xdt.transpose(0, 1), out=self.y_inside)
        torch.bmm(C, state.view(G, -1, N).transpose(1, 2), out=self.y_before)
        decay = self.log_decay.exp().view(G, H // G, L).transpose(1, 2)
        y = self.y_before.view(G, L, H // G, P).mul_(decay[..., None]).transpose(0, 1).reshape(L, H, P)
        y = y + self.y_inside.transpose(0, 1)
        if self.D is not None:
            y.add_(self.x * self.D)
        if self.z is not None:
            y.mul_(functional.silu(self.z))
        return y

    def state_after(self, num_tokens: int, state: Tensor) -> Tensor:
        """Return the state [H, P, N] float32 after the first `num_tokens` >= 1 tokens of the loaded chunk."""
        L, H, P, G = self.length, self.H, self.P, self.G
        total = self.log_decay[:, num_tokens - 1 : num_tokens]
        weight = (total - self.log_decay).clamp_(max=0.0).exp_()
        if num_tokens < L:
            weight[:, num_tokens:].zero_()
        weighted = (self.xdt * weight.t()[:, :, None]).view(L, G, H // G * P)
        added = torch.bmm(weighted.permute(1, 2, 0), self.B.transpose(0, 1)).view_as(state)
        return added.add_(state * total.exp()[:, :, None])


def scan_chunks(
    inputs: ScanInputs,
    chunks: Sequence[Chunk],
    initial_states: Tensor | None,
    captures: Sequence[tuple[int, int]],
    *,
    num_sequences: int,
    chunk_tokens: int,
    state_dtype: torch.dtype,
    out: Tensor,
) -> tuple[Tensor, Tensor]:
    """Scan `chunks`, write `out` [T, H, P], and return (final states, captured states) in `state_dtype`.

    chunks: from `cut_chunks`; where one ends at a boundary the scan goes on from the state rounded to `state_dtype`.
    initial_states: [num_sequences, H, P, N] in any float dtype, or None for zeros.
    captures: (sequence, absolute position) in any order; the state before the token at that position is captured. Every
        position lies in the sequence: from its start (the initial state) to its end (the final state).

    Returns final states [num_sequences, H, P, N] and captured states [len(captures), H, P, N]; allocates both.
    """
    _, H, P = inputs.x.shape
    N = inputs.B.shape[2]
    device = inputs.x.device
    captured = torch.empty(len(captures), H, P, N, dtype=state_dtype, device=device)
    final = torch.zeros(num_sequences, H, P, N, dtype=state_dtype, device=device)
    if initial_states is not None:
        final.copy_(initial_states)
    wanted: dict[int, list[tuple[int, int]]] = {}
    for index, (sequence, position) in enumerate(captures):
        captured[index].copy_(final[sequence])
        wanted.setdefault(sequence, []).append((position, index))

    scanner = _ChunkScanner(inputs, chunk_tokens)
    sequence = -1
    for chunk in chunks:
        if chunk.sequence != sequence:
            sequence = chunk.sequence
            state = final[sequence].float() if initial_states is None else initial_states[sequence].float()
        scanner.load(chunk)
        out[chunk.row : chunk.row + chunk.num_tokens].copy_(scanner.outputs(state)[: chunk.num_tokens])
        end = chunk.position + chunk.num_tokens
        for position, index in wanted.get(sequence, ()):
            if chunk.position < position < end:
                captured[index].copy_(scanner.state_after(position - chunk.position, state))
        state = scanner.state_after(chunk.num_tokens, state)
        if chunk.ends_at_boundary:
            state = state.to(state_dtype).float()
        final[sequence].copy_(state)
        for position, index in wanted.get(sequence, ()):
            if position == end:
                captured[index].copy_(state)
    return final, captured
