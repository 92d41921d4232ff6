"""Elementwise functions in torch whose rows do not depend on how many rows there are.

Torch computes the items that fill no whole vector register by another function than the others, with other last digits
(exp is an exception; softplus, silu and sigmoid are not). Which items those are depends on the size of the tensor.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

VECTOR_ITEMS = 32
"""A multiple of the float32 items that torch computes at once, with AVX2 and with AVX-512."""


def by_rows(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return `function` of every item of x [R, C], each row in whole vectors: a row has the bits that it has alone."""
    R, C = x.shape
    if C % VECTOR_ITEMS == 0:
        return function(x)
    filled = x.new_zeros(R, -(-C // VECTOR_ITEMS) * VECTOR_ITEMS)
    filled[:, :C] = x
    return function(filled)[:, :C].contiguous()
