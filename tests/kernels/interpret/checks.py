"""The checks of the memory-safety tests as functions of a kernel module, so that they can be tried on mutants.

A trial is a launch that exercises an op: rows absent on either side, several programs per unit, NaN behind every unit.
Mutants compute with whatever they read, so numpy's warnings are off.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from triton.runtime.interpreter import InterpreterError

from tests.kernels.interpret.access import MemoryWatch, shuffled
from tests.kernels.interpret.arguments import (
    conv_arguments,
    copy_arguments,
    copy_of,
    pool_of,
    same_bits,
    sparse,
    ssm_arguments,
)
from tests.kernels.interpret.grants import watch_conv, watch_copy, watch_ssm
from triton_ops.conv_update import reference as conv_reference
from triton_ops.ssm_update import reference as ssm_reference
from triton_ops.state_copy import reference as copy_reference
from triton_ops.state_copy.layout import Checkpoints, Planes

KINDS = ("moved", "new", "score", "padding")
Memory = tuple[torch.Tensor, ...]


class Trial(NamedTuple):
    """One launch.

    memory: the tensors the op writes, first those with units. watch: what it may touch. run: launch a kernel module on
    memory. oracle: compute the same on memory. units: the destination units of every tensor that has units.
    """

    memory: Memory
    watch: MemoryWatch
    run: Callable[[ModuleType, Memory], None]
    oracle: Callable[[Memory], None]
    units: tuple[list[int], ...]


def trial(op: str) -> Trial:
    """Build the trial of an op."""
    torch.manual_seed(11)
    if op == "ssm":
        ssm = ssm_arguments(4, M=2, P=8, bc_groups=2, gate=True, kinds=KINDS)
        return Trial(
            (ssm.state, ssm.out),
            watch_ssm(ssm),
            lambda kernel, memory: kernel.prepare(*ssm._replace(state=memory[0], out=memory[1]), BM=4).run(),
            lambda memory: ssm_reference.ssm_update(*ssm._replace(state=memory[0], out=memory[1])),
            (_ids(ssm.dst_table),),
        )
    if op == "conv":
        conv = conv_arguments(4, kinds=KINDS)
        return Trial(
            (conv.lines, conv.out),
            watch_conv(conv),
            lambda kernel, memory: kernel.prepare(*conv._replace(lines=memory[0], out=memory[1]), BLOCK=16).run(),
            lambda memory: conv_reference.conv_update(*conv._replace(lines=memory[0], out=memory[1])),
            (_ids(conv.dst_line),),
        )
    planes, src, dst = copy_arguments(torch.bfloat16)

    def run(kernel: ModuleType, memory: Memory) -> None:
        kernel.CHUNK_BYTES = 64
        kernel.prepare_copy(Planes(*memory), src, dst, 4).run()

    return Trial(
        tuple(part for part in planes if part is not None),
        watch_copy(planes, src, dst),
        run,
        lambda memory: copy_reference.state_copy(Planes(*memory), src, dst, 4),
        (_ids(dst.members), _ids(dst.lines)),
    )


def far_trial(op: str) -> Trial:
    """Build a launch on units whose offset in elements passes 2**31; the pool takes no memory of its own."""
    torch.manual_seed(12)
    if op == "ssm":
        ssm = ssm_arguments(1, M=1, heads_per_member=1, P=4, N=16, num_pages=2, kinds=("moved",))
        state = sparse(9300 * 262144, torch.bfloat16).view(9300, 262144)[:, :64].unflatten(1, (1, 4, 16))
        far_table = torch.tensor([[8200]], dtype=torch.int32), torch.tensor([[9299]], dtype=torch.int32)
        ssm = ssm._replace(state=state, src_table=far_table[0], dst_table=far_table[1])
        return _only_access((state, ssm.out), watch_ssm(ssm), lambda kernel, _: kernel.prepare(*ssm).run())
    if op == "conv":
        conv = conv_arguments(1, kinds=("moved",))
        lines = sparse(148800 * 16384, torch.bfloat16).view(148800, 16384)[:, :120].unflatten(1, (3, 40))
        far_line = torch.tensor([140001], dtype=torch.int32), torch.tensor([148799], dtype=torch.int32)
        conv = conv._replace(lines=lines, src_line=far_line[0], dst_line=far_line[1])
        return _only_access((lines, conv.out), watch_conv(conv), lambda kernel, _: kernel.prepare(*conv).run())
    state = sparse(18000 * 262144, torch.bfloat16).view(1, 18000, 262144)[:, :, :64].unflatten(2, (1, 4, 16))
    far_members = torch.tensor([[[17000]]], dtype=torch.int32), torch.tensor([[[17999]]], dtype=torch.int32)
    src, dst = (Checkpoints(members, None) for members in far_members)
    planes = Planes(state, None)
    watch = watch_copy(planes, src, dst)
    return _only_access((state,), watch, lambda kernel, _: kernel.prepare_copy(planes, src, dst, 1).run())


def access(op: str, kernel: ModuleType) -> bool:
    """Tell whether the kernel stays inside its grants."""
    return _stays_inside(trial(op), kernel)


def far(op: str, kernel: ModuleType) -> bool:
    """Tell whether the kernel stays inside its grants on units far into the pool."""
    return _stays_inside(far_trial(op), kernel)


def race(op: str, kernel: ModuleType) -> bool:
    """Tell whether no program touches what another one writes."""
    case = trial(op)
    with case.watch.watching():
        _run(case, kernel, case.memory)
    return case.watch.races() == 0


def order(op: str, kernel: ModuleType) -> bool:
    """Tell whether every order of the programs gives the same memory."""
    case = trial(op)
    results = set()
    for seed in range(3):
        memory = tuple(map(copy_of, case.memory))
        with shuffled(seed):
            _run(case, kernel, memory)
        results.add(b"".join(pool_of(tensor).numpy().tobytes() for tensor in memory))
    return len(results) == 1


def canary(op: str, kernel: ModuleType) -> bool:
    """Tell whether everything but the payload of the destination units keeps its bits."""
    case = trial(op)
    before, after = case.memory[: len(case.units)], tuple(map(copy_of, case.memory))
    _run(case, kernel, after)
    for old, new, units in zip(before, after[: len(case.units)], case.units, strict=True):
        restored = copy_of(new)
        dim = 1 if op == "copy" else 0
        for unit in units:
            restored.select(dim, unit).copy_(old.select(dim, unit))
        if not same_bits(restored, old):
            return False
    return True


def oracle(op: str, kernel: ModuleType) -> bool:
    """Tell whether all memory has the oracle's bits."""
    case = trial(op)
    expected, got = tuple(map(copy_of, case.memory)), tuple(map(copy_of, case.memory))
    case.oracle(expected)
    _run(case, kernel, got)
    return all(map(same_bits, expected, got))


def bfloat16(op: str, kernel: ModuleType) -> bool:
    """Tell whether the kernel converts bfloat16 values before it computes with them."""
    case = trial(op)
    try:
        _run(case, kernel, case.memory)
    except InterpreterError as error:
        return "BFloat16ArithmeticError" not in str(error)
    return True


def _stays_inside(case: Trial, kernel: ModuleType) -> bool:
    try:
        with case.watch.watching():
            _run(case, kernel, case.memory)
    except InterpreterError as error:
        if "AccessError" not in str(error):
            raise
        return False
    return True


def _run(case: Trial, kernel: ModuleType, memory: Memory) -> None:
    with np.errstate(all="ignore"):
        case.run(kernel, memory)


def _only_access(memory: Memory, watch: MemoryWatch, run: Callable[[ModuleType, Memory], None]) -> Trial:
    return Trial(memory, watch, run, lambda _: None, ())


def _ids(table: torch.Tensor | None) -> list[int]:
    return [] if table is None else [unit for unit in table.flatten().tolist() if unit >= 0]
