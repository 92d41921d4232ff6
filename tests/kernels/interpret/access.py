"""Watch the memory accesses of kernels in Triton's interpreter.

`MemoryWatch` holds a list of granted byte ranges, each readable, writable or both. Every address that a program loads
or stores must lie in a range that grants it; a masked lane accesses nothing. The watch also remembers which program
touched what, so that `races` can tell whether two programs of a launch conflict. `shuffled` runs the programs of a
launch in another order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from triton.runtime.interpreter import InterpreterBuilder, interpreter_builder

CELL_BYTES = 2
"""Granularity at which conflicts are looked for: the smallest element that the kernels store."""


class AccessError(Exception):
    """A program touched memory that was not granted to it."""


class MemoryWatch:
    """Grants, checks and remembers accesses while it is entered."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int, bool, bool]] = []
        self._log: list[tuple[np.ndarray, int, bool]] = []

    def grant(self, tensor: torch.Tensor, *, read: bool = False, write: bool = False) -> None:
        """Grant the bytes from the tensor's first to its last element."""
        if tensor.numel():
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            start = tensor.data_ptr()
            self._ranges.append((start, start + (last + 1) * tensor.element_size(), read, write))

    def grant_units(self, units: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Grant reading of the units named in `src` and writing of those in `dst`; every other unit is forbidden."""
        readable, writable = set(src.flatten().tolist()), set(dst.flatten().tolist())
        for unit in sorted(readable | writable):
            if unit >= 0:
                self.grant(units[unit], read=unit in readable, write=unit in writable)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Check every access of the launches inside.

        Raises:
            AccessError: at the first access that is not granted, wrapped in the interpreter's own error.
        """
        ranges = sorted(self._ranges)
        bounds = np.array([(start, end) for start, end, _, _ in ranges], dtype=np.int64)
        allowed = np.array([(read, write) for _, _, read, write in ranges], dtype=bool)
        if (bounds[1:, 0] < bounds[:-1, 1]).any():
            raise ValueError("expected disjoint grants, got overlapping ones")
        load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

        def check(pointers: Any, mask: Any, element_bytes: int, write: bool) -> None:
            addresses = pointers.data[np.broadcast_to(mask.data.astype(bool), pointers.data.shape)].astype(np.int64)
            if addresses.size == 0:
                return
            index = np.searchsorted(bounds[:, 0], addresses, side="right") - 1
            inside = (index >= 0) & (addresses + element_bytes <= bounds[index, 1]) & allowed[index, int(write)]
            if not inside.all():
                kind, program = "store" if write else "load", interpreter_builder.grid_idx
                raise AccessError(f"{kind} outside the granted ranges by program {program}")
            cells = (addresses[:, None] + np.arange(0, element_bytes, CELL_BYTES)).ravel() // CELL_BYTES
            x, y, z = interpreter_builder.grid_idx
            program = (x * interpreter_builder.grid_dim[1] + y) * interpreter_builder.grid_dim[2] + z
            self._log.append((cells, program, write))

        def checked_load(self: Any, pointers: Any, mask: Any, other: Any, *rest: Any) -> Any:
            check(pointers, mask, _element_bytes(pointers), False)
            return load(self, pointers, mask, other, *rest)

        def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
            check(pointers, mask, _element_bytes(pointers), True)
            return store(self, pointers, value, mask, *rest)

        InterpreterBuilder.create_masked_load = checked_load
        InterpreterBuilder.create_masked_store = checked_store
        try:
            yield
        finally:
            InterpreterBuilder.create_masked_load = load
            InterpreterBuilder.create_masked_store = store

    def races(self) -> int:
        """Return the number of cells that one program wrote and another program touched."""
        writes = [(cells, program) for cells, program, write in self._log if write]
        reads = [(cells, program) for cells, program, write in self._log if not write]
        written, writers = _flatten(writes)
        conflicting = set(written[1:][(written[1:] == written[:-1]) & (writers[1:] != writers[:-1])].tolist())
        read, readers = _flatten(reads)
        if written.size and read.size:
            place = np.minimum(np.searchsorted(written, read), written.size - 1)
            conflicting.update(read[(written[place] == read) & (writers[place] != readers)].tolist())
        return len(conflicting)

    def bytes_touched(self) -> int:
        """Return the distinct bytes read plus the distinct bytes written."""
        total = 0
        for write in (False, True):
            cells = [cells for cells, _, is_write in self._log if is_write == write]
            total += np.unique(np.concatenate(cells)).size * CELL_BYTES if cells else 0
        return total


@contextmanager
def shuffled(seed: int) -> Iterator[None]:
    """Run the programs of the launches inside in a random order."""
    original = InterpreterBuilder.set_grid_idx

    def permuted(self: Any, x: int, y: int, z: int) -> None:
        shape = self.grid_dim
        order = np.random.default_rng(seed).permutation(int(np.prod(shape)))
        original(self, *(int(i) for i in np.unravel_index(order[np.ravel_multi_index((x, y, z), shape)], shape)))

    InterpreterBuilder.set_grid_idx = permuted
    try:
        yield
    finally:
        InterpreterBuilder.set_grid_idx = original


def _element_bytes(pointers: Any) -> int:
    return int(pointers.get_element_ty().primitive_bitwidth) // 8


def _flatten(accesses: list[tuple[np.ndarray, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return all cells sorted, each with its program."""
    if not accesses:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    cells = np.concatenate([cells for cells, _ in accesses])
    programs = np.concatenate([np.full(cells.size, program) for cells, program in accesses])
    order = np.lexsort((programs, cells))
    return cells[order], programs[order]
