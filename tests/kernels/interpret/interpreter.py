"""Repairs of Triton's interpreter.

It truncates float32 to bfloat16 where the hardware rounds to nearest even, and it does arithmetic on bfloat16 values on
their bit patterns without a word (bfloat16 lives in uint16 arrays there). `install` repairs the first and turns the
second into an error, so that a kernel must convert to float32 right after each load.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as triton_interpreter

_convert_float = triton_interpreter._convert_float


class BFloat16ArithmeticError(TypeError):
    """A kernel computed with bfloat16 values; the interpreter would use their bit patterns."""


def install() -> None:
    """Apply both repairs to this process."""
    triton_interpreter._convert_float = convert_float
    builder = triton_interpreter.InterpreterBuilder
    for owner, name in ((builder, "unary_op"), (builder, "binary_op"), (triton_interpreter.ReduceOps, "apply_impl")):
        setattr(owner, name, _refuse_bfloat16(getattr(owner, name)))


def convert_float(values: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
    """Convert between float32 and bfloat16 bits, to nearest even; other types as the interpreter does."""
    if source == tl.float32 and target == tl.bfloat16:
        bits = np.ascontiguousarray(values).view(np.uint32).reshape(values.shape)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(values), np.uint16(0x7FFF), rounded.astype(np.uint16))
    if source == tl.bfloat16 and target == tl.float32:
        return np.ascontiguousarray(values).astype(np.uint32) << 16
    return _convert_float(values, source, target, rounding)


def _refuse_bfloat16(operation: Callable[..., Any]) -> Callable[..., Any]:
    def checked(self: Any, *operands: Any) -> Any:
        for operand in operands:
            if getattr(getattr(operand, "dtype", None), "scalar", None) == tl.bfloat16:
                raise BFloat16ArithmeticError("arithmetic on bfloat16 values: convert to float32 after the load")
        return operation(self, *operands)

    return checked
