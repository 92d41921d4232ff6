"""A stand-in for a CUDA graph: tensor operations as they ran once, and run again on the same tensors.

What Python decides while it is recorded stays decided, as in a graph: a branch, a number read from a tensor, a tensor
that is replaced later. An operation that brings numbers to the host cannot be recorded, as it cannot be captured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITING = ("_local_scalar_dense", "item", "nonzero", "masked_select", "unique", "equal", "is_nonzero")


class Recording(TorchDispatchMode):
    """Records the operations under it; `run` repeats them."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], list[torch.Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if any(name.startswith(waiting) for waiting in WAITING):
            raise RuntimeError(f"{name} waits for the device and cannot be captured")
        result = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, _tensors(result)))
        return result

    def run(self) -> None:
        """Do it again: results go where they went the first time."""
        for func, args, kwargs, results in self.operations:
            for before, now in zip(results, _tensors(func(*args, **kwargs)), strict=True):
                if now.data_ptr() != before.data_ptr():
                    before.copy_(now)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
