"""Other projects' kernels for the same step on contiguous slots: SGLang's stock Triton kernel and FlashInfer's.

Nothing here imports sglang. The stock kernel's file is loaded by its path, from an installed sglang or from a copy; the
one function that it imports from sglang (whether the architecture has programmatic dependent launch) is supplied.
What cannot be loaded becomes a row with the reason.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from bench.micro.shapes import SsmArguments
from triton_ops.launch import can_start_early

STOCK_FILE = Path("kernels") / "ops" / "mamba" / "triton_ops" / "mamba_ssm.py"
"""Inside the sglang package, 0.5.23."""


class Rival(NamedTuple):
    """A kernel of another project, or the reason why it is absent.

    `bind` takes arguments on contiguous slots and returns the launch as a function without arguments.
    """

    name: str
    bind: Callable[[SsmArguments], Callable[[], object]] | None
    absent: str


def load_rivals(stock_file: Path | None) -> list[Rival]:
    """Return the stock kernel, the same re-tuned (8 rows, one warp), and FlashInfer's.

    Args:
        stock_file: the stock kernel's file; None looks for an installed sglang, without importing it.
    """
    stock, reason = load_stock(stock_file)
    rivals = []
    for name, rows, num_warps in (("stock", None, None), ("stock re-tuned", 8, 1)):
        bind = None if stock is None else _bind_stock(stock, rows, num_warps)
        rivals.append(Rival(name, bind, reason))
    return [*rivals, _flashinfer()]


def load_stock(stock_file: Path | None) -> tuple[Any | None, str]:
    """Load the stock kernel's module; return it, or None and the reason."""
    if stock_file is None:
        package = importlib.util.find_spec("sglang")
        if package is None or not package.submodule_search_locations:
            return None, "sglang is not installed and no --stock-file was given"
        stock_file = Path(next(iter(package.submodule_search_locations))) / STOCK_FILE
    if not stock_file.is_file():
        return None, f"no file {stock_file.name} where sglang 0.5.23 has it"
    spec = importlib.util.spec_from_file_location("stock_mamba_ssm", stock_file)
    if spec is None or spec.loader is None:
        return None, f"{stock_file.name} is not a Python file"
    module = importlib.util.module_from_spec(spec)
    try:
        with _supplied_imports():
            spec.loader.exec_module(module)
    except Exception as error:
        return None, f"{stock_file.name} does not load: {type(error).__name__}: {error}"
    return module, ""


class RetunedKernel:
    """The stock kernel behind its own wrapper, launched with another tile, or compiled instead of launched.

    The wrapper's last positional argument is the number of rows per program.
    """

    def __init__(self, kernel: Any, rows: int | None, num_warps: int | None, *, compile_only: bool = False) -> None:
        self._kernel = kernel
        self._rows = rows
        self._num_warps = num_warps
        self._compile_only = compile_only
        self.compiled: Any = None

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            if self._rows is not None:
                args = (*args[:-1], self._rows)
                options["num_warps"] = self._num_warps
            if self._compile_only:
                self.compiled = self._kernel.warmup(*args, grid=grid, **options)
            else:
                self._kernel[grid](*args, **options)

        return launch


def compile_stock(module: Any, arguments: SsmArguments, rows: int | None, num_warps: int | None) -> Any:
    """Compile the stock kernel for the active target; return the compiled kernel. Launches nothing."""
    kernel = module._selective_scan_update_kernel
    retuned = RetunedKernel(kernel, rows, num_warps, compile_only=True)
    module._selective_scan_update_kernel = retuned
    try:
        with without_device():
            _call(module.selective_state_update, arguments)
    finally:
        module._selective_scan_update_kernel = kernel
    return retuned.compiled


@contextlib.contextmanager
def without_device() -> Iterator[None]:
    """Let the stock wrapper, which enters the device of its arguments, run on tensors that are on none."""
    get_device_module = torch.get_device_module
    torch.get_device_module = lambda device: _NoDevice
    try:
        yield
    finally:
        torch.get_device_module = get_device_module


class _NoDevice:
    """Stands in for a device module: entering a device does nothing."""

    @staticmethod
    def device(index: int | None) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def _bind_stock(module: Any, rows: int | None, num_warps: int | None) -> Callable[[SsmArguments], Callable[[], object]]:
    kernel = module._selective_scan_update_kernel

    def bind(arguments: SsmArguments) -> Callable[[], object]:
        def step() -> None:
            module._selective_scan_update_kernel = RetunedKernel(kernel, rows, num_warps)
            _call(module.selective_state_update, arguments)

        return step

    return bind


def _flashinfer() -> Rival:
    name = "flashinfer"
    try:
        update = importlib.import_module("flashinfer.mamba").selective_state_update
    except Exception as error:
        return Rival(name, None, f"flashinfer.mamba does not load: {type(error).__name__}: {error}")
    return Rival(name, lambda arguments: lambda: _call(update, arguments), "")


def _call(update: Callable[..., object], arguments: SsmArguments) -> object:
    """Call a `selective_state_update` with the per-head parameters broadcast, as SGLang does."""
    H, P = arguments.x.shape[1:]
    N = arguments.state.shape[3]
    return update(
        arguments.state,
        arguments.x,
        arguments.dt[:, :, None].expand(-1, -1, P),
        arguments.A[:, None, None].expand(H, P, N),
        arguments.B,
        arguments.C,
        D=arguments.D[:, None].expand(H, P),
        dt_bias=arguments.dt_bias[:, None].expand(H, P),
        dt_softplus=True,
        state_batch_indices=arguments.src_table[:, 0],
        out=arguments.out,
    )


@contextlib.contextmanager
def _supplied_imports() -> Iterator[None]:
    """Answer the stock file's one import from sglang while it loads."""
    names = ("sglang", "sglang.kernels", "sglang.kernels.jit", "sglang.kernels.jit.utils")
    supplied = {name: ModuleType(name) for name in names}
    supplied[names[-1]].is_arch_support_pdl = can_start_early  # type: ignore[attr-defined]
    saved = {name: sys.modules.get(name) for name in names}
    sys.modules.update(supplied)
    try:
        yield
    finally:
        for name, module in saved.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
