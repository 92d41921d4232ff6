"""The SSM update of a real layer, compiled: each configuration once per process."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch

from bench.micro.shapes import FALCON_H1_7B, Shape, ssm_arguments
from bench.micro.static_compile import MachineCode, compile_with
from triton_ops.ssm_update import kernel as ssm_kernel

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@cache
def compiled_update(
    capability: int,
    state: str,
    BM: int,
    gate: bool,
    paged: bool,
    *,
    shape: Shape = FALCON_H1_7B,
    columns: int = 0,
    early: bool = False,
    kernel: ModuleType = ssm_kernel,
) -> MachineCode:
    """Compile the update of a batch of 8, paged (two tables) or contiguous (slots of all heads, one table)."""
    dtype = DTYPES[state]
    heads = shape.heads_per_member(dtype) if paged else shape.H
    pool = torch.empty((64, heads, shape.P, shape.N), dtype=dtype, device="meta")
    table = torch.empty((8, columns + shape.H // heads), dtype=torch.int32, device="meta")[:, columns:]
    arguments = ssm_arguments(shape, pool, table, table if paged else None, gate=gate)
    return compile_with(lambda: kernel.prepare(*arguments, BM=BM, may_start_early=early).compile(), capability)
