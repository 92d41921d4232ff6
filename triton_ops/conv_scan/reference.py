"""Depthwise causal convolution token by token in numpy float32: the oracle of the tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def convolve_sequence(
    x: Array,
    weight: Array,
    bias: Array | None,
    *,
    silu: bool,
    initial_window: Array | None = None,
    start_position: int = 0,
    grid_tokens: int | None = None,
    storage: Callable[[Array], Array] = lambda window: window,
) -> tuple[Array, Array]:
    """Convolve one sequence; return y [T, C] and the windows [T + 1, C, W - 1], row t being the inputs before token t.

    x: [T, C]. weight: [C, W]. bias: [C] or None. All float32.
    storage: rounds a window to the storage type; applied where an absolute position is a multiple of `grid_tokens`.
    """
    T, channels = x.shape
    past = weight.shape[1] - 1
    window = np.zeros((channels, past), np.float32) if initial_window is None else initial_window.astype(np.float32)
    windows, y = np.empty((T + 1, channels, past), np.float32), np.empty((T, channels), np.float32)
    windows[0] = window
    for t in range(T):
        inputs = np.concatenate((window, x[t][:, None]), axis=1)
        total = (inputs * weight).sum(axis=1)
        if bias is not None:
            total = total + bias
        y[t] = total / (1.0 + np.exp(-total)) if silu else total
        window = inputs[:, 1:]
        if grid_tokens is not None and (start_position + t + 1) % grid_tokens == 0:
            window = storage(window).astype(np.float32)
        windows[t + 1] = window
    return y, windows
