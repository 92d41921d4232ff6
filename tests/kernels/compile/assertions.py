"""Compare compiled kernels with their budgets."""

from __future__ import annotations

from bench.micro.static_compile import MachineCode
from tests.kernels.compile.budgets import EXTRA_LOADS, Budget


def assert_within(code: MachineCode, budget: Budget) -> None:
    """Assert that `code` stays within `budget` and uses no stack, local memory or barrier."""
    assert (code.stack_bytes, code.local_bytes, code.barriers) == (0, 0, 0)
    assert code.registers <= budget.registers
    assert code.instructions <= budget.instructions
    assert code.loads[128] == budget.vector_loads
    assert code.stores[128] == budget.vector_stores
    assert scalar_loads(code) <= budget.scalar_loads


def assert_equal_cost(paged: MachineCode, contiguous: MachineCode) -> None:
    """Assert equal arithmetic and equal vector accesses, and at most the extra scalar loads of the tables."""
    assert paged.float_ops == contiguous.float_ops
    assert paged.loads[128] == contiguous.loads[128]
    assert paged.stores == contiguous.stores
    assert scalar_loads(paged) <= scalar_loads(contiguous) + EXTRA_LOADS


def vector_loads_around_waits(code: MachineCode) -> list[tuple[int, int]]:
    """Return, for every wait for the previous kernel, the 16-byte loads before and after it in the code.

    There are two waits, one on the path of a padded row; the compiler may lay out either path first.
    """
    loads = [place for place, opcode in enumerate(code.sequence) if opcode.startswith("LDG") and "128" in opcode]
    waits = [place for place, opcode in enumerate(code.sequence) if opcode == "ACQBULK"]
    return [(sum(load < wait for load in loads), sum(load > wait for load in loads)) for wait in waits]


def scalar_loads(code: MachineCode) -> int:
    """Return the loads narrower than 16 bytes."""
    return sum(number for bits, number in code.loads.items() if bits < 128)
