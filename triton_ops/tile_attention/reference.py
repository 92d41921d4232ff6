"""Causal attention token by token in numpy float64: the oracle of the tests."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def attend(query: Array, key: Array, value: Array, *, scale: float) -> Array:
    """Return [T, H, E]: what each of the last T tokens sees of all tokens up to itself.

    query: [T, H, D]. key: [start + T, K, D]. value: [start + T, K, E]. K divides H.
    """
    T, H, _ = query.shape
    tokens, K, E = value.shape
    out = np.empty((T, H, E))
    for t in range(T):
        seen = tokens - T + t + 1
        for head in range(H):
            group = head * K // H
            scores = scale * (key[:seen, group].astype(np.float64) @ query[t, head].astype(np.float64))
            weights = np.exp(scores - scores.max())
            out[t, head] = weights / weights.sum() @ value[:seen, group].astype(np.float64)
    return out
