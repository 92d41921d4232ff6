"""Checks at the public edge of every op.

A wrong argument is a `ValueError` of one line, `NAME: expected EXPECTED, got GOT`. The checks read metadata only: they
never copy, synchronize or look at table contents. `check_tables` does look at the contents; it synchronizes and is
meant for strict modes and tests.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

ACTIVATION_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
STATE_DTYPES = (torch.bfloat16, torch.float32)
PARAMETER_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def runs_triton(tensor: torch.Tensor) -> bool:
    """Tell whether an op on `tensor` runs its Triton kernel: on CUDA, or on the CPU under `TRITON_INTERPRET=1`."""
    return tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"


def expect(condition: bool, name: str, expected: object, got: object) -> None:
    """Raise `ValueError` naming the argument, the expected value and the one that came, unless `condition` holds."""
    if not condition:
        raise ValueError(f"{name}: expected {expected}, got {got}")


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    *,
    contiguous: bool = True,
) -> None:
    """Check dtype, device and shape of an argument and, with `contiguous`, that its last dimension is contiguous.

    Args:
        shape: the wanted sizes; None stands for any size.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    if tensor.dtype not in dtypes:
        expect(False, f"{name}.dtype", " or ".join(str(dtype) for dtype in dtypes), tensor.dtype)
    if tensor.device != device:
        expect(False, f"{name}.device", device, tensor.device)
    got = tensor.shape
    if len(got) != len(shape) or any(w is not None and w != g for w, g in zip(shape, got, strict=True)):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        expect(False, f"{name}.shape", f"[{wanted}]", list(got))
    if contiguous and got and got[-1] > 1 and tensor.stride(-1) != 1:
        expect(False, f"{name}.stride(-1)", 1, tensor.stride(-1))


def check_tables(src_table: torch.Tensor, dst_table: torch.Tensor, num_units: int) -> None:
    """Check the contents of a source and a destination table against the contract of the kernels.

    The contract: every id is -1 or in `[0, num_units)`; no unit is a destination twice; a destination may be a source
    only at the same place (the update in place); the members of a row are absent together. Copies the tables to the
    host and synchronizes.

    Args:
        src_table: `[batch, M] int32`.
        dst_table: `[batch, M] int32`.
        num_units: pages (or lines) in the pool.

    Raises:
        ValueError: naming the table, the place `[row, column]`, what was expected and what came.
    """
    sources: dict[int, tuple[int, int]] = {}
    src_rows, dst_rows = src_table.tolist(), dst_table.tolist()
    for name, rows in (("src_table", src_rows), ("dst_table", dst_rows)):
        for row, ids in enumerate(rows):
            for column, unit in enumerate(ids):
                expect(-1 <= unit < num_units, f"{name}[{row}, {column}]", f"-1 or 0..{num_units - 1}", unit)
            expect(len({unit == -1 for unit in ids}) <= 1, f"{name}[{row}]", "all members present or all absent", ids)
    readers: dict[int, set[tuple[int, int]]] = {}
    for row, ids in enumerate(src_rows):
        for column, unit in enumerate(ids):
            readers.setdefault(unit, set()).add((row, column))
    for row, ids in enumerate(dst_rows):
        for column, unit in enumerate(ids):
            if unit == -1:
                continue
            place = (row, column)
            first = sources.setdefault(unit, place)
            expect(first == place, f"dst_table{list(place)}", f"a unit not yet written at {list(first)}", unit)
            others = readers.get(unit, set()) - {place}
            expect(not others, f"dst_table{list(place)}", "a unit that no other place reads", unit)
