"""The static table: what the compiled kernels are, without running them.

Counts are of machine code for a named architecture; bytes are modelled. No entry is a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import triton

from bench.micro.rivals import compile_stock, load_stock
from bench.micro.shapes import FALCON_H1_7B, SsmArguments, conv_arguments, conv_lines, copy_arguments, ssm_arguments
from bench.micro.static_compile import MachineCode, compile_launch, compile_with
from bench.micro.traffic import Traffic, conv_update_traffic, gather_traffic, ssm_update_traffic
from triton_ops.conv_update import kernel as conv_kernel
from triton_ops.ssm_update import kernel as ssm_kernel
from triton_ops.state_copy import kernel as copy_kernel

BATCH = 8
SHAPE = FALCON_H1_7B
STATES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class StaticRow(NamedTuple):
    """One kernel: its code, the elements of state per thread (None: no state) and the modelled bytes of a launch."""

    kernel: str
    state: str
    variant: str
    code: MachineCode | None
    elements_per_thread: float | None
    traffic: Traffic | None
    absent: str = ""


def static_rows(capability: int, stock_file: Path | None) -> Iterator[StaticRow]:
    """Compile every kernel for an architecture, for one layer of Falcon-H1-7B and a batch of 8."""
    stock, reason = load_stock(stock_file)
    for state, dtype in STATES.items():
        for BM in (4, 8):
            for layout in ("paged", "contiguous"):
                for gate in (False, True):
                    arguments = _ssm(dtype, layout, gate)
                    code = compile_launch(ssm_kernel.prepare(*arguments, BM=BM), capability)
                    variant = f"{layout}, {BM} rows, 1 warp{', gate' if gate else ''}"
                    elements = BM * SHAPE.N / 32
                    yield StaticRow("ssm_update", state, variant, code, elements, ssm_update_traffic(arguments))
        arguments = _ssm(dtype, "contiguous", False)
        for name, rows, num_warps in (("stock", 4, 8), ("stock re-tuned", 8, 1)):
            variant = f"{name}, {rows} rows, {num_warps} warp{'s' if num_warps > 1 else ''}"
            if stock is None:
                yield StaticRow("ssm_update", state, variant, None, None, None, reason)
                continue
            code = compile_with(partial(compile_stock, stock, arguments, rows, num_warps), capability)
            elements = rows * SHAPE.N / (32 * num_warps)
            yield StaticRow("ssm_update", state, variant, code, elements, ssm_update_traffic(arguments))
    for state, dtype in STATES.items():
        for channel_major in (False, True):
            lines = conv_lines(SHAPE, 64, dtype, "meta", channel_major=channel_major)
            ids = torch.empty(BATCH, dtype=torch.int32, device="meta")
            conv = conv_arguments(SHAPE, lines, ids, ids)
            code = compile_launch(conv_kernel.prepare(*conv), capability)
            variant = "channel-major lines" if channel_major else "tap-major lines"
            yield StaticRow("conv_update", state, variant, code, None, conv_update_traffic(conv))
    copy = copy_arguments(SHAPE, BATCH, torch.bfloat16, "meta", num_planes=SHAPE.num_layers)
    for name, launch in (
        ("state_gather", copy_kernel.prepare_gather(copy.planes, copy.src, copy.arena)),
        ("state_scatter", copy_kernel.prepare_scatter(copy.arena, copy.planes, copy.dst)),
        ("state_copy", copy_kernel.prepare_copy(copy.planes, copy.src, copy.dst, SHAPE.num_layers)),
    ):
        variant = f"{SHAPE.num_layers} layers, members and lines"
        yield StaticRow(name, "any", variant, compile_launch(launch, capability), None, gather_traffic(copy))


def static_table(capabilities: tuple[int, ...], stock_file: Path | None) -> str:
    """Return the table as Markdown, with a heading that says what it is not."""
    lines = [
        "# Kernels, static table",
        "",
        "No GPU was used: these are counts of compiled machine code and modelled bytes. No entry is a time.",
        "",
        f"One layer of {SHAPE.name}, batch {BATCH}; triton {triton.__version__}. Registers, instructions, accesses",
        "of 16 bytes (loads, stores), other loads, barriers and bytes of stack are per thread. `warp instr/element`:",
        "warp instructions per element of state. `MB`: modelled bytes of one launch; `ids`: the tables' share of them.",
    ]
    for capability in capabilities:
        rows = list(static_rows(capability, stock_file))
        contiguous = {(row.state, row.variant): row for row in rows if row.variant.startswith("contiguous")}
        lines += ["", f"## sm_{capability}", "", _HEADER, _RULE]
        lines += [_format(row, contiguous.get((row.state, row.variant.replace("paged", "contiguous")))) for row in rows]
    return "\n".join(lines) + "\n"


_HEADER = (
    "| kernel | state | variant | registers | instructions | over contiguous | loads | stores | other loads "
    "| barriers | stack | warp instr/element | MB | ids |"
)
_RULE = "|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"


def _format(row: StaticRow, contiguous: StaticRow | None) -> str:
    if row.code is None or row.traffic is None:
        return f"| {row.kernel} | {row.state} | {row.variant} | absent: {row.absent} |" + " |" * 10
    code, traffic = row.code, row.traffic
    other = sum(number for bits, number in code.loads.items() if bits != 128)
    per_element = "" if row.elements_per_thread is None else f"{code.instructions / row.elements_per_thread / 32:.2f}"
    over = ""
    if contiguous is not None and contiguous.code is not None:
        over = f"{code.instructions / contiguous.code.instructions:.3f}"
    cells = [
        row.kernel,
        row.state,
        row.variant,
        code.registers,
        code.instructions,
        over,
        code.loads[128],
        code.stores[128],
        other,
        code.barriers,
        code.stack_bytes,
        per_element,
        f"{traffic.total / 1e6:.2f}",
        f"{traffic.tables / traffic.total:.4%}",
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


def _ssm(dtype: torch.dtype, layout: str, gate: bool) -> SsmArguments:
    heads = SHAPE.heads_per_member(dtype) if layout == "paged" else SHAPE.H
    pool = torch.empty((64, heads, SHAPE.P, SHAPE.N), dtype=dtype, device="meta")
    table = torch.empty((BATCH, SHAPE.H // heads), dtype=torch.int32, device="meta")
    return ssm_arguments(SHAPE, pool, table, table if layout == "paged" else None, gate=gate)
