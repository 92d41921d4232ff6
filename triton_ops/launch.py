"""A prepared kernel launch: what to run, on which grid, with which arguments.

Preparing and running are apart so that the same arguments can be compiled without a device and inspected.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton


class Launch(NamedTuple):
    """One kernel launch.

    `constants` are the `tl.constexpr` arguments; `num_warps` the warps of a program; `grid` the programs per axis.
    `early`: launched so that programs may start before the previous kernel on the stream has ended; the kernel waits
    for that end itself, where it needs it.
    """

    kernel: Any
    grid: tuple[int, int, int]
    args: tuple[torch.Tensor | None, ...]
    constants: Mapping[str, int | bool]
    num_warps: int
    early: bool = False

    def run(self) -> None:
        """Launch on the current stream of the arguments' device; does not synchronize."""
        first = next(arg for arg in self.args if arg is not None)
        with torch.cuda.device_of(first):
            self.kernel[self.grid](*self.args, **self.constants, **self._options())

    def compile(self) -> Any:
        """Compile for the active driver's target through the launch path's own specialization; launches nothing."""
        return self.kernel.warmup(*self.args, grid=self.grid, **self.constants, **self._options())

    def _options(self) -> dict[str, int | bool]:
        options: dict[str, int | bool] = {"num_warps": self.num_warps}
        if self.early:
            options["launch_pdl"] = True
        return options


def can_start_early() -> bool:
    """Tell whether the current target has programmatic dependent launch: NVIDIA Hopper and later, compiled."""
    if triton.knobs.runtime.interpret:
        return False
    target = triton.runtime.driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch >= 90)
