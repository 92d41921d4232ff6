"""The vectorized torch path that serves on the CPU agrees with the oracle: absent units exactly, numbers closely.

torch's exp and log differ from numpy's by one unit in the last place; everything that is only moved is bit-equal.
"""

from __future__ import annotations

import pytest
import torch

from tests.kernels.interpret.arguments import (
    conv_arguments,
    copy_arguments,
    copy_of,
    pool_of,
    same_bits,
    ssm_arguments,
)
from triton_ops.contract import runs_triton
from triton_ops.conv_update import reference as conv_reference
from triton_ops.conv_update.api import conv_update
from triton_ops.ssm_update import reference as ssm_reference
from triton_ops.ssm_update.api import ssm_update
from triton_ops.state_copy import reference as copy_reference
from triton_ops.state_copy.api import state_copy, state_gather, state_scatter
from triton_ops.state_copy.layout import Arena, Checkpoints, Planes

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
ROUNDING = {torch.bfloat16: 2.0**-7, torch.float32: 1e-5}


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare values up to one rounding of the dtype, NaN only where NaN was expected."""
    tolerance = ROUNDING[got.dtype]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def test_these_tests_run_the_torch_path() -> None:
    assert not runs_triton(torch.empty(1))


@DTYPES
@pytest.mark.parametrize("gate", [False, True], ids=["", "z"])
@pytest.mark.parametrize(("batch", "M"), [(1, 3), (6, 1), (12, 3), (53, 6)])
def test_ssm_update(dtype: torch.dtype, gate: bool, batch: int, M: int) -> None:
    torch.manual_seed(batch)
    arguments = ssm_arguments(batch, M=M, heads_per_member=2, bc_groups=2, layer_groups=2, state_dtype=dtype, gate=gate)
    expected = arguments._replace(state=copy_of(arguments.state), out=copy_of(arguments.out))
    ssm_reference.ssm_update(*expected)
    ssm_update(*arguments[:-2], z=arguments.z, out=arguments.out)
    assert_close(arguments.out, expected.out)
    assert_close(pool_of(arguments.state).view(dtype), pool_of(expected.state).view(dtype))
    padded = torch.tensor([row % 6 == 4 for row in range(batch)])
    assert torch.equal(arguments.out[padded], torch.zeros_like(arguments.out[padded]))


@DTYPES
@pytest.mark.parametrize("W", [2, 3, 4])
@pytest.mark.parametrize("channel_major", [False, True], ids=["tap-major", "channel-major"])
@pytest.mark.parametrize("in_place", [False, True], ids=["", "in-place"])
def test_conv_update(dtype: torch.dtype, W: int, channel_major: bool, in_place: bool) -> None:
    torch.manual_seed(W)
    arguments = conv_arguments(12, W=W, line_dtype=dtype, channel_major=channel_major)
    if in_place:
        arguments = conv_arguments(4, W=W, line_dtype=dtype, kinds=("in_place", "padding"))._replace(dst_line=None)
    expected = arguments._replace(lines=copy_of(arguments.lines), out=copy_of(arguments.out))
    conv_reference.conv_update(*expected)
    conv_update(*arguments[:6], activation="silu", out=arguments.out)
    assert_close(arguments.out, expected.out)
    assert same_bits(arguments.lines, expected.lines)


@DTYPES
@pytest.mark.parametrize("num_layers", [1, 3, 4])
def test_state_copies(dtype: torch.dtype, num_layers: int) -> None:
    torch.manual_seed(num_layers)
    planes, src, dst = copy_arguments(dtype)
    assert planes.state is not None
    assert planes.conv is not None
    shapes = (num_layers, 3, 6, 4, 8), (num_layers, 3, *planes.conv.shape[2:])
    arenas = [Arena(*(torch.full(shape, float("nan"), dtype=dtype) for shape in shapes)) for _ in range(2)]
    state_gather(planes, src, arenas[0])
    copy_reference.state_gather(planes, src, arenas[1])
    assert all(same_bits(mine, theirs) for mine, theirs in zip(*arenas, strict=True))

    mine, theirs = (Planes(copy_of(planes.state), copy_of(planes.conv)) for _ in range(2))
    state_scatter(arenas[0], mine, dst)
    copy_reference.state_scatter(arenas[0], theirs, dst)
    assert all(same_bits(left, right) for left, right in zip(mine, theirs, strict=True))
    state_copy(mine, dst, src, num_layers=num_layers)
    copy_reference.state_copy(theirs, dst, src, num_layers)
    assert all(same_bits(left, right) for left, right in zip(mine, theirs, strict=True))


def test_conv_lines_are_copied_alone() -> None:
    planes, src, dst = copy_arguments(torch.bfloat16)
    assert planes.conv is not None
    mine, theirs = (Planes(None, copy_of(planes.conv)) for _ in range(2))
    src, dst = Checkpoints(None, src.lines), Checkpoints(None, dst.lines)
    state_copy(mine, src, dst)
    copy_reference.state_copy(theirs, src, dst, 4)
    assert same_bits(mine.conv, theirs.conv)
