"""A prepared kernel launch: what to run, on which grid, with which arguments.

Preparing and running are apart so that the same arguments can be compiled without a device and inspected.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch


class Launch(NamedTuple):
    """One kernel launch.

    `constants` are the `tl.constexpr` arguments; `num_warps` the warps of a program; `grid` the programs per axis.
    """

    kernel: Any
    grid: tuple[int, int, int]
    args: tuple[torch.Tensor | None, ...]
    constants: Mapping[str, int | bool]
    num_warps: int

    def run(self) -> None:
        """Launch on the current stream; does not synchronize."""
        self.kernel[self.grid](*self.args, **self.constants, num_warps=self.num_warps)

    def compile(self) -> Any:
        """Compile for the active driver's target through the launch path's own specialization; launches nothing."""
        return self.kernel.warmup(*self.args, grid=self.grid, **self.constants, num_warps=self.num_warps)
