"""Mamba2 scan token by token in numpy float32: the oracle of the tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def scan_sequence(
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    *,
    D: Array | None = None,
    z: Array | None = None,
    dt_bias: Array | None = None,
    dt_softplus: bool = True,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    initial_state: Array | None = None,
    start_position: int = 0,
    grid_tokens: int | None = None,
    storage: Callable[[Array], Array] = lambda state: state,
) -> tuple[Array, Array]:
    """Scan one sequence; return y [T, H, P] and the states [T + 1, H, P, N], row t being the state before token t.

    x, z: [T, H, P]. dt: [T, H]. A, dt_bias: [H]. B, C: [T, G, N]. D: [H] or [H, P]. All float32.
    storage: rounds a state to the storage type; applied where an absolute position is a multiple of `grid_tokens`.
    """
    T, H, P = x.shape
    _, G, N = B.shape
    step = dt if dt_bias is None else dt + dt_bias
    if dt_softplus:
        step = np.logaddexp(step, np.float32(0.0))
    step = np.clip(step, *dt_limit)
    state = np.zeros((H, P, N), np.float32) if initial_state is None else initial_state.astype(np.float32)
    states, y = np.empty((T + 1, H, P, N), np.float32), np.empty((T, H, P), np.float32)
    states[0] = state
    for t in range(T):
        B_t, C_t = np.repeat(B[t], H // G, axis=0), np.repeat(C[t], H // G, axis=0)
        decay = np.exp(step[t] * A)
        state = decay[:, None, None] * state + (step[t][:, None] * x[t])[:, :, None] * B_t[:, None, :]
        y[t] = np.einsum("hpn,hn->hp", state, C_t)
        if D is not None:
            y[t] += x[t] * (D if D.ndim == 2 else D[:, None])
        if z is not None:
            y[t] *= z[t] / (1.0 + np.exp(-z[t]))
        if grid_tokens is not None and (start_position + t + 1) % grid_tokens == 0:
            state = storage(state).astype(np.float32)
        states[t + 1] = state
    return y, states


def scan_packed(
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    query_start_loc: Sequence[int],
    initial_states: Array | None = None,
    start_positions: Sequence[int] | None = None,
    z: Array | None = None,
    **options: Any,
) -> tuple[Array, list[Array]]:
    """Scan a packed batch; return y [T, H, P] and, per sequence, the states as `scan_sequence` does."""
    y, states = np.empty_like(x), []
    for sequence in range(len(query_start_loc) - 1):
        rows = slice(query_start_loc[sequence], query_start_loc[sequence + 1])
        y[rows], after = scan_sequence(
            x[rows],
            dt[rows],
            A,
            B[rows],
            C[rows],
            z=None if z is None else z[rows],
            initial_state=None if initial_states is None else initial_states[sequence],
            start_position=0 if start_positions is None else start_positions[sequence],
            **options,
        )
        states.append(after)
    return y, states
