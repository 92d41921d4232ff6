"""Mamba2 chunked scan in vectorized torch.

Chunks are scanned one after another and every chunk runs the same operations on buffers of one fixed shape, padded with
zeros. A chunk's result therefore depends on its tokens and on the state before it, not on the chunks, the sequences or
the rows around it: a sequence resumed at a boundary repeats the arithmetic of one that passed it, bit for bit.

Letters: T tokens, L tokens of a chunk, H heads, P head dimension, N state dimension, G groups of B and C.
Source: Dao and Gu, "Transformers are SSMs", 2024, section 6 (block decomposition of the semiseparable matrix).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

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
    """Buffers of one chunk, float32, rows past its tokens zero, and the operations on them.

    Decays are powers of two: torch's exp2 takes half the time of its exp, which is slower still at -inf. The future is
    masked in C B^T, once per group and not per head.
    """

    def __init__(self, inputs: ScanInputs, chunk_tokens: int) -> None:
        self.inputs = inputs
        _, H, P = inputs.x.shape
        _, G, N = inputs.B.shape
        L = self.length = chunk_tokens
        self.H, self.P, self.G, self.N = H, P, G, N

        def buffer(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=inputs.x.device)

        self.x, self.xdt, self.y, self.product = buffer(L, H, P), buffer(L, H, P), buffer(L, H, P), buffer(L, H, P)
        self.z = buffer(L, H, P) if inputs.z is not None else None
        self.dt, self.log_decay, self.log_decay_by_head = buffer(L, H), buffer(L, H), buffer(H, L)
        self.B, self.C = buffer(L, G, N), buffer(L, G, N)
        self.CB, self.mixing, self.y_inside = buffer(G, L, L), buffer(H, L, L), buffer(H, L, P)
        self.log2_A = inputs.A.float() * math.log2(math.e)
        self.dt_bias = None if inputs.dt_bias is None else inputs.dt_bias.float()
        self.D = None
        if inputs.D is not None:
            self.D = (inputs.D if inputs.D.dim() == 2 else inputs.D[:, None]).float().expand(H, P).contiguous()

    def load(self, chunk: Chunk) -> None:
        """Copy the chunk's tokens in, discretize dt, and sum the log decay up to and including each token."""
        inputs, n = self.inputs, chunk.num_tokens
        rows = slice(chunk.row, chunk.row + n)
        pairs = [(self.x, inputs.x), (self.B, inputs.B), (self.C, inputs.C), (self.dt, inputs.dt)]
        if self.z is not None and inputs.z is not None:
            pairs.append((self.z, inputs.z))
        for target, source in pairs:
            target[:n].copy_(source[rows])
            target[n:].zero_()
        dt = self.dt
        if self.dt_bias is not None:
            dt.add_(self.dt_bias)
        if inputs.dt_softplus:
            torch.nn.functional.softplus(dt, out=dt)
        dt.clamp_(*inputs.dt_limit)
        torch.mul(dt, self.log2_A, out=self.log_decay)
        torch.cumsum(self.log_decay, dim=0, out=self.log_decay)
        self.log_decay_by_head.copy_(self.log_decay.t())
        torch.mul(self.x, dt[:, :, None], out=self.xdt)

    def outputs(self, state: Tensor) -> Tensor:
        """Return y [L, H, P] of the loaded chunk, valid until the next call; state: [H, P, N] before it."""
        L, H, P, G, N = self.length, self.H, self.P, self.G, self.N
        by_group = self.C.transpose(0, 1)
        torch.bmm(by_group, self.B.permute(1, 2, 0), out=self.CB).tril_()
        decay = self.log_decay_by_head
        torch.sub(decay[:, :, None], decay[:, None, :], out=self.mixing).clamp_(max=0.0).exp2_()
        self.mixing.view(G, H // G, L, L).mul_(self.CB[:, None])
        torch.bmm(self.mixing, self.xdt.transpose(0, 1), out=self.y_inside)
        for group, columns in enumerate(self.y.view(L, G, H // G * P).unbind(1)):
            torch.mm(by_group[group], state.view(G, H // G * P, N)[group].t(), out=columns)
        y = self.y.mul_(self.log_decay.exp2()[:, :, None]).add_(self.y_inside.transpose(0, 1))
        if self.D is not None:
            y.add_(torch.mul(self.x, self.D, out=self.product))
        if self.z is not None:
            y.mul_(torch.nn.functional.silu(self.z))
        return y

    def advance(self, state: Tensor, num_tokens: int) -> None:
        """Advance `state` [H, P, N] in place by the first `num_tokens` >= 1 tokens of the loaded chunk."""
        L, H, P, G, N = self.length, self.H, self.P, self.G, self.N
        total = self.log_decay[num_tokens - 1]
        weight = (total - self.log_decay).clamp_(max=0.0).exp2_()
        weight[num_tokens:].zero_()
        weighted = torch.mul(self.xdt, weight[:, :, None], out=self.product).view(L, G, H // G * P)
        state.mul_(total.exp2()[:, None, None])
        state.view(G, H // G * P, N).baddbmm_(weighted.permute(1, 2, 0), self.B.transpose(0, 1))


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
    state = torch.empty(H, P, N, dtype=torch.float32, device=device)
    sequence = -1
    for chunk in chunks:
        if chunk.sequence != sequence:
            sequence = chunk.sequence
            state.copy_(final[sequence] if initial_states is None else initial_states[sequence])
        scanner.load(chunk)
        out[chunk.row : chunk.row + chunk.num_tokens].copy_(scanner.outputs(state)[: chunk.num_tokens])
        end = chunk.position + chunk.num_tokens
        for position, index in wanted.get(sequence, ()):
            if chunk.position < position < end:
                inner = state.clone()
                scanner.advance(inner, position - chunk.position)
                captured[index].copy_(inner)
        scanner.advance(state, chunk.num_tokens)
        if chunk.ends_at_boundary:
            state.copy_(state.to(state_dtype))
        final[sequence].copy_(state)
        for position, index in wanted.get(sequence, ()):
            if position == end:
                captured[index].copy_(state)
    return final, captured
