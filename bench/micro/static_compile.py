"""Compile a prepared launch without a GPU and count what the machine code does.

The launch goes through Triton's own specialization (alignment, constants), with a driver that names an architecture
instead of a device. Registers and spills come from `cuobjdump`, instructions from `nvdisasm`, both inside the triton
wheel. The kernels are straight-line code, so the static count per thread is the executed one.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from triton_ops.launch import Launch

ARCHITECTURES = (80, 90, 100)
"""Compute capabilities times ten: A100, H100 and H200, B200."""

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[T0-9]+\s+)?([A-Z][A-Z0-9_.]*)[^;]*;", re.MULTILINE)
_RESOURCE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_FLOAT_OPS = ("FADD", "FFMA", "FMUL", "FSETP", "FSEL", "FMNMX", "MUFU", "SHFL", "F2F", "F2FP", "HADD2", "HMUL2")


class MachineCode(NamedTuple):
    """Counts of one compiled kernel, per thread.

    `loads` and `stores` map the bits of one global memory access to the number of instructions; `float_ops` are the
    floating-point, conversion and shuffle instructions; `sequence` has all opcodes in order. Bytes for stack, local and
    shared memory.
    """

    registers: int
    stack_bytes: int
    local_bytes: int
    shared_bytes: int
    instructions: int
    barriers: int
    loads: Counter[int]
    stores: Counter[int]
    float_ops: Counter[str]
    sequence: tuple[str, ...]


class _NamedTarget(DriverBase):  # type: ignore[misc]
    """A driver without a device: enough for the compiler to choose an architecture."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        """One device number per architecture, because kernels are cached per device."""
        return int(self._target.arch)

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("this driver launches nothing")

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty


def compile_launch(launch: Launch, capability: int) -> MachineCode:
    """Compile `launch` for an architecture (see `ARCHITECTURES`) and count its instructions."""
    return compile_with(launch.compile, capability)


def compile_with(compile_kernel: Any, capability: int) -> MachineCode:
    """Call `compile_kernel` under the driver of `capability`; it returns a compiled kernel, which is counted."""
    previous = triton.runtime.driver._active
    triton.runtime.driver.set_active(_NamedTarget(capability))
    try:
        kernel = compile_kernel()
    finally:
        triton.runtime.driver._active = previous
    return count_instructions(kernel.asm["cubin"])


def count_instructions(cubin: bytes) -> MachineCode:
    """Disassemble a cubin of one kernel and count."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _RESOURCE.search(_run("cuobjdump", "--dump-resource-usage", file.name))
        sass = _run("nvdisasm", "--print-code", "--no-dataflow", file.name)
    if usage is None:
        raise RuntimeError("expected a resource line from cuobjdump, got none")
    sequence = tuple(opcode for opcode in _INSTRUCTION.findall(sass) if opcode != "NOP")
    loads, stores, float_ops = (Counter[Any]() for _ in range(3))
    for opcode in sequence:
        base = opcode.split(".")[0]
        if base in ("LDG", "STG"):
            (loads if base == "LDG" else stores)[_access_bits(opcode)] += 1
        if base in _FLOAT_OPS:
            float_ops[opcode] += 1
    registers, stack, shared, local = map(int, usage.groups())
    return MachineCode(
        registers=registers,
        stack_bytes=stack,
        local_bytes=local,
        shared_bytes=shared,
        instructions=len(sequence),
        barriers=sum(opcode.startswith("BAR") for opcode in sequence),
        loads=loads,
        stores=stores,
        float_ops=float_ops,
        sequence=sequence,
    )


def _access_bits(opcode: str) -> int:
    """Return the bits one LDG or STG moves per thread."""
    parts = opcode.split(".")
    for bits in (256, 128, 64):
        if str(bits) in parts:
            return bits
    for part in parts:
        if part in ("U8", "S8"):
            return 8
        if part in ("U16", "S16"):
            return 16
    return 32


def _run(tool: str, *arguments: str) -> str:
    return subprocess.run([_TOOLS / tool, *arguments], check=True, capture_output=True, text=True).stdout
