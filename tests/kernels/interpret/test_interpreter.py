"""The repairs of the interpreter: rounding as the hardware does, and no arithmetic on bfloat16 bit patterns."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpreterError

from tests.kernels.interpret import interpreter


@triton.jit
def _add_kernel(x, y, out, CONVERT: tl.constexpr):
    left, right = tl.load(x), tl.load(y)
    if CONVERT:
        left, right = left.to(tl.float32), right.to(tl.float32)
    tl.store(out, (left + right).to(out.dtype.element_ty))


def test_float32_to_bfloat16_rounds_as_torch_for_random_bit_patterns() -> None:
    bits = torch.randint(-(2**31), 2**31, (200_000,), dtype=torch.int64).to(torch.int32)
    values = bits.view(torch.float32)
    numbers = values[~values.isnan()]
    expected = numbers.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    got = interpreter.convert_float(numbers.numpy(), tl.float32, tl.bfloat16, None)
    assert np.array_equal(got, expected)
    truncated = interpreter._convert_float(numbers.numpy(), tl.float32, tl.bfloat16, None)
    assert (truncated != expected).mean() > 0.4, "the interpreter rounds by itself now: the repair can go"


def test_bfloat16_arithmetic_is_an_error_and_float32_arithmetic_is_not() -> None:
    x = torch.tensor([1.5], dtype=torch.bfloat16)
    out = torch.zeros(1, dtype=torch.bfloat16)
    with pytest.raises(InterpreterError, match="BFloat16ArithmeticError"):
        _add_kernel[(1,)](x, x, out, CONVERT=False)
    _add_kernel[(1,)](x, x, out, CONVERT=True)
    assert out.item() == 3.0
