"""What the compiled kernels may cost on Falcon-H1-7B's layer: the one table of budgets.

Loads and stores are per thread and launch. `vector_loads` and `vector_stores` count the 16-byte accesses and are exact:
one fewer means that an access was split. The other columns are upper bounds; they leave room for the difference between
triton 3.6 and 3.8 and between the architectures, about a tenth. No kernel may use stack, local memory or a barrier.
"""

from __future__ import annotations

from typing import NamedTuple


class Budget(NamedTuple):
    """Bounds of one compiled kernel."""

    registers: int
    instructions: int
    vector_loads: int
    vector_stores: int
    scalar_loads: int


SSM = {
    # (state, rows per program, gate): the state is BM rows of 256 elements in one warp; B and C are 8 per thread.
    ("bf16", 4, False): Budget(72, 480, 4 + 2, 4, 7),
    ("bf16", 4, True): Budget(72, 520, 4 + 2, 4, 8),
    ("bf16", 8, False): Budget(112, 720, 8 + 3, 8, 6),
    ("bf16", 8, True): Budget(112, 770, 8 + 3, 8, 7),
    ("fp32", 4, False): Budget(72, 480, 8 + 2, 8, 7),
    ("fp32", 4, True): Budget(72, 520, 8 + 2, 8, 8),
}

CONV = {
    # (lines): x, three taps, four weights and the bias; bf16 lines and parameters, or fp32 lines (two vectors per tap).
    "bf16": Budget(72, 370, 9, 5, 2),
    "fp32": Budget(72, 440, 12, 8, 2),
}

COPY = {
    # Both branches, members and lines, of 32 words of 4 bytes per thread.
    "gather": Budget(56, 230, 16, 16, 2),
    "scatter": Budget(56, 230, 16, 16, 2),
    "copy": Budget(56, 240, 16, 16, 4),
}

PAGED_OVER_CONTIGUOUS = 1.12
"""Instructions of the paged SSM update over those of the contiguous one, on sm_90."""

EXTRA_LOADS = 1
"""Loads of the paged SSM update beyond those of the contiguous one: the destination page."""
