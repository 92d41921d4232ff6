"""The counter of machine instructions notices what the budgets forbid: narrow accesses, spills, barriers, work."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from bench.micro.static_compile import MachineCode, compile_with


@triton.jit
def _scale_kernel(source, target, STRIDE: tl.constexpr, BLOCK: tl.constexpr, SCALE: tl.constexpr):
    i = tl.arange(0, BLOCK) * STRIDE
    tl.store(target + i, tl.load(source + i).to(tl.float32) * SCALE)


@triton.jit
def _normalize_kernel(source, target, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(source + i)
    tl.store(target + i, x / tl.sum(x))


@triton.jit
def _sum_kernel(source, target, BLOCK: tl.constexpr):
    tl.store(target, tl.sum(tl.load(source + tl.arange(0, BLOCK))))


def compiled(kernel: object, num_warps: int = 1, **constants: object) -> MachineCode:
    data = torch.empty(1 << 16, dtype=torch.float32, device="meta")
    warmup = kernel.warmup  # type: ignore[attr-defined]
    return compile_with(lambda: warmup(data, data, grid=(1,), num_warps=num_warps, **constants), 90)


def test_contiguous_access_is_counted_as_vectors_and_strided_access_is_not() -> None:
    wide = compiled(_scale_kernel, STRIDE=1, BLOCK=512, SCALE=3.0)
    assert (wide.loads, wide.stores) == ({128: 4}, {128: 4})
    narrow = compiled(_scale_kernel, STRIDE=3, BLOCK=512, SCALE=3.0)
    assert (narrow.loads, narrow.stores) == ({32: 16}, {32: 16})


def test_float_instructions_are_counted() -> None:
    assert compiled(_scale_kernel, STRIDE=1, BLOCK=512, SCALE=3.0).float_ops == {"FMUL": 16}


def test_a_reduction_across_warps_has_a_barrier_and_one_inside_a_warp_has_none() -> None:
    assert compiled(_sum_kernel, num_warps=4, BLOCK=4096).barriers > 0
    assert compiled(_sum_kernel, num_warps=1, BLOCK=4096).barriers == 0


def test_too_many_live_values_spill_and_are_seen() -> None:
    assert compiled(_normalize_kernel, BLOCK=4096).stack_bytes == 0
    assert compiled(_normalize_kernel, BLOCK=4096, maxnreg=64).stack_bytes > 0


def test_a_kernel_without_a_resource_line_is_an_error() -> None:
    from bench.micro.static_compile import count_instructions

    with pytest.raises(Exception, match=r"cuobjdump|resource|exit status"):
        count_instructions(b"no cubin")
