"""Kernels with planted faults, each with the check that must notice it.

A mutant is the text of a kernel module with one passage replaced, imported under another name.
"""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from types import ModuleType
from typing import NamedTuple


class Mutant(NamedTuple):
    """One planted fault: in `op`'s kernel, `old` becomes `new`; the check called `check` must fail."""

    name: str
    op: str
    check: str
    old: str
    new: str


MUTANTS = (
    Mutant("absent source is loaded", "ssm", "access", "mask=src >= 0, other", "mask=src >= -1, other"),
    Mutant("absent destination is stored", "ssm", "access", "mask=dst >= 0", "mask=dst >= -1"),
    Mutant("head is not taken modulo the member", "ssm", "access", "(head % HEADS_PER_MEMBER)", "head"),
    Mutant(
        "result goes to the source", "ssm", "access", "(dst * PAGE_STRIDE + in_page)", "(src * PAGE_STRIDE + in_page)"
    ),
    Mutant(
        "a row too far in the page",
        "ssm",
        "access",
        "* HEAD_STRIDE + first_row * N",
        "* HEAD_STRIDE + (first_row + 1) * N",
    ),
    Mutant("heads share the first member", "ssm", "race", "member = head // HEADS_PER_MEMBER", "member = 0"),
    Mutant(
        "tiles overlap", "ssm", "race", "first_row = tl.program_id(0) * BM", "first_row = tl.program_id(0) * (BM - 1)"
    ),
    Mutant("heads share the first member, by order", "ssm", "order", "member = head // HEADS_PER_MEMBER", "member = 0"),
    Mutant("page offset in 32 bits", "ssm", "far", "+ member).to(tl.int64)", "+ member)"),
    Mutant(
        "stored past the payload",
        "ssm",
        "canary",
        "(dst * PAGE_STRIDE + in_page) + tile",
        "(dst * PAGE_STRIDE + in_page) + tile + 8",
    ),
    Mutant("bfloat16 arithmetic", "ssm", "bfloat16", "+ m).to(tl.float32)\n        gate", "+ m)\n        gate"),
    Mutant(
        "padded rows stay unwritten",
        "ssm",
        "oracle",
        "tl.store(out_rows, tl.zeros([BM], dtype=out.dtype.element_ty))",
        "pass",
    ),
    Mutant("softplus without its logarithm", "ssm", "oracle", "tl.log(tl.exp(step) + 1.0)", "tl.exp(step)"),
    Mutant(
        "group of the wrong heads",
        "ssm",
        "oracle",
        "group = head // HEADS_PER_GROUP",
        "group = head % (HEADS_PER_GROUP - 1)",
    ),
    Mutant("decay is off by 1e-4", "ssm", "oracle", "S = S * decay", "S = S * (decay + 1e-4)"),
    Mutant("gate is not rounded", "ssm", "oracle", "y.to(out.dtype.element_ty).to(tl.float32) * gate", "y * gate"),
    Mutant(
        "tail of the channels is not masked",
        "conv",
        "canary",
        "inside = first_channel + c < C",
        "inside = first_channel + c < C + 8",
    ),
    Mutant("absent line is loaded", "conv", "access", "read = inside & (src >= 0)", "read = inside"),
    Mutant("absent line is stored", "conv", "access", "write = inside & (dst >= 0)", "write = inside"),
    Mutant("blocks overlap", "conv", "race", "tl.program_id(0) * BLOCK", "tl.program_id(0) * (BLOCK - 4)"),
    Mutant("line offset in 32 bits", "conv", "far", "_STRIDE).to(tl.int64)", "_STRIDE)"),
    Mutant("line is not shifted", "conv", "oracle", "tl.store(target, tap1", "tl.store(target, tap0"),
    Mutant(
        "taps in reverse",
        "conv",
        "oracle",
        "y += tap0 * tl.load(weights,",
        "y += tap0 * tl.load(weights + 2 * WEIGHT_TAP_STRIDE,",
    ),
    Mutant("absent unit is loaded", "copy", "access", "mask=write & (src >= 0)", "mask=write"),
    Mutant(
        "absent unit is stored", "copy", "access", "(first_word + i < WORDS) & (dst >= 0)", "first_word + i < WORDS"
    ),
    Mutant("layer is taken for its plane", "copy", "access", "plane = layer % NUM_PLANES", "plane = layer"),
    Mutant("groups share the first columns", "copy", "oracle", "group = layer // NUM_PLANES", "group = layer * 0"),
    Mutant("chunk is not masked", "copy", "canary", "(first_word + i < WORDS) & (dst >= 0)", "(i >= 0) & (dst >= 0)"),
    Mutant("unit offset in 32 bits", "copy", "far", "+ member).to(tl.int64)", "+ member)"),
    Mutant(
        "chunks overlap",
        "copy",
        "race",
        "(program % MEMBER_PROGRAMS) * MEMBER_CHUNK,",
        "(program % MEMBER_PROGRAMS) * (MEMBER_CHUNK // 2),",
    ),
)


def load(mutant: Mutant, original: ModuleType, folder: Path) -> ModuleType:
    """Write the mutated module to `folder` and import it.

    Raises:
        ValueError: the passage to replace is not in the kernel.
    """
    source = inspect.getsource(original)
    if mutant.old not in source:
        raise ValueError(f"{mutant.name}: expected the kernel to contain {mutant.old!r}, got no such passage")
    path = folder / f"mutant_{mutant.op}.py"
    path.write_text(source.replace(mutant.old, mutant.new))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path}: expected an importable module, got none")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
