"""The order in which cells run: arms interleaved, balanced and random, from a seed.

Cells that differ only in the arm are a block and run next to each other, so slow drifts of the machine meet all arms of
a pair alike. Blocks come in random order; within consecutive blocks the arms follow the rows of random Latin squares,
so over as many blocks as there are arms each arm runs once at every place. Source: paper section 4.5 (balanced order).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from bench.cells import Cell


def interleave(cells: Sequence[Cell], seed: int) -> list[Cell]:
    """Return the cells in the order to run them. The same cells and seed give the same order."""
    blocks: dict[tuple[object, ...], list[Cell]] = {}
    for cell in cells:
        blocks.setdefault(cell.block, []).append(cell)
    rng = np.random.default_rng(np.random.SeedSequence([seed, 0x6F72646572]))
    listed = list(blocks.values())
    squares: dict[int, Iterator[list[int]]] = {}
    ordered: list[Cell] = []
    for index in rng.permutation(len(listed)).tolist():
        block = listed[index]
        rows = squares.setdefault(len(block), _latin_rows(len(block), rng))
        ordered += [block[position] for position in next(rows)]
    return ordered


def _latin_rows(size: int, rng: np.random.Generator) -> Iterator[list[int]]:
    """Yield permutations of `size` places without end; every `size` of them have each place once in each column."""
    while True:
        base = rng.permutation(size)
        for shift in rng.permutation(size).tolist():
            yield np.roll(base, shift).tolist()
