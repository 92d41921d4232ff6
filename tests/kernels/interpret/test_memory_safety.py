"""Which memory the kernels touch: granted units only, no conflicts between programs, 64-bit addresses, any order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.kernels.interpret.access import shuffled
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
from triton_ops.contract import check_tables
from triton_ops.conv_update import kernel as conv_kernel
from triton_ops.ssm_update import kernel as ssm_kernel
from triton_ops.state_copy import kernel as copy_kernel
from triton_ops.state_copy.layout import Checkpoints, Planes

SEEDS = range(3)
STATE_DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])


@STATE_DTYPES
@pytest.mark.parametrize(("M", "gate"), [(1, False), (3, True), (6, False)])
def test_ssm_update_touches_its_pages_only(dtype: torch.dtype, M: int, gate: bool) -> None:
    torch.manual_seed(0)
    arguments = ssm_arguments(6, M=M, heads_per_member=6 // M, state_dtype=dtype, gate=gate, P=8)
    watch = watch_ssm(arguments)
    with watch.watching():
        ssm_kernel.prepare(*arguments, BM=4).run()
    assert watch.races() == 0


@STATE_DTYPES
@pytest.mark.parametrize("W", [2, 3, 4])
@pytest.mark.parametrize("channel_major", [False, True], ids=["tap-major", "channel-major"])
def test_conv_update_touches_its_lines_only(dtype: torch.dtype, W: int, channel_major: bool) -> None:
    torch.manual_seed(0)
    arguments = conv_arguments(6, W=W, line_dtype=dtype, channel_major=channel_major)
    watch = watch_conv(arguments)
    with watch.watching():
        conv_kernel.prepare(*arguments, BLOCK=16).run()
    assert watch.races() == 0


@STATE_DTYPES
def test_state_copy_touches_its_units_only(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    planes, src, dst = copy_arguments(dtype)
    watch = watch_copy(planes, src, dst)
    with watch.watching():
        copy_kernel.prepare_copy(planes, src, dst, 4).run()
    assert watch.races() == 0


def test_results_do_not_depend_on_the_order_of_programs() -> None:
    torch.manual_seed(1)
    kinds = ("moved", "in_place", "new")
    planes, src, dst = copy_arguments(torch.bfloat16)
    ssm, conv = ssm_arguments(3, M=2, kinds=kinds), conv_arguments(3, kinds=kinds)
    runs: list[tuple[Callable[..., object], torch.Tensor]] = [
        (lambda state: ssm_kernel.prepare(*ssm._replace(state=state), BM=2).run(), ssm.state),
        (lambda lines: conv_kernel.prepare(*conv._replace(lines=lines), BLOCK=16).run(), conv.lines),
        (lambda state: copy_kernel.prepare_copy(planes._replace(state=state), src, dst, 4).run(), planes.state),
    ]
    for run, memory in runs:
        expected = copy_of(memory)
        run(expected)
        for seed in SEEDS:
            result = copy_of(memory)
            with shuffled(seed):
                run(result)
            assert same_bits(result, expected)


def test_a_destination_that_another_row_reads_is_a_race_and_is_refused() -> None:
    """The contract of the tables is needed: breaking it is seen as a race, as an order, and by `check_tables`."""
    torch.manual_seed(2)
    arguments = ssm_arguments(2, kinds=("moved",))
    assert arguments.dst_table is not None
    arguments.dst_table[0] = arguments.src_table[1]
    results = set()
    for seed in SEEDS:
        state = copy_of(arguments.state)
        with shuffled(seed):
            ssm_kernel.prepare(*arguments._replace(state=state)).run()
        results.add(pool_of(state).numpy().tobytes())
    assert len(results) > 1

    watch = watch_ssm(arguments)
    with watch.watching():
        ssm_kernel.prepare(*arguments).run()
    assert watch.races() > 0

    with pytest.raises(ValueError, match=r"dst_table\[0, 0\]: expected a unit that no other place reads"):
        check_tables(arguments.src_table, arguments.dst_table, arguments.state.shape[0])


def test_pages_beyond_32_bit_offsets() -> None:
    """B31: pages of 512 KiB: from id 8,192 on the offset passes 2**31 elements. The pool takes no memory."""
    torch.manual_seed(3)
    pool = sparse(9300 * 262144, torch.bfloat16).view(9300, 8, 128, 256)
    state = torch.randn(8, 128, 256).to(torch.bfloat16)
    arguments = ssm_arguments(1, M=1, heads_per_member=8, P=128, N=256, num_pages=2, kinds=("moved",))
    arguments.state[int(arguments.src_table)] = state
    pool[8200] = state
    table = torch.tensor([[8200]], dtype=torch.int32), torch.tensor([[9299]], dtype=torch.int32)
    far = arguments._replace(state=pool, src_table=table[0], dst_table=table[1], out=copy_of(arguments.out))
    watch = watch_ssm(far)
    with watch.watching():
        ssm_kernel.prepare(*far, BM=128).run()
    ssm_kernel.prepare(*arguments, BM=128).run()
    assert arguments.dst_table is not None
    assert torch.equal(pool[9299], arguments.state[int(arguments.dst_table)])
    assert torch.equal(far.out, arguments.out)


def test_lines_beyond_32_bit_offsets() -> None:
    """B31: conv slots of 32 KiB: from line 131,072 on the offset passes 2**31 elements."""
    torch.manual_seed(4)
    num_lines = 16 * 9300
    near = conv_arguments(1, C=3584, line_stride=16384, kinds=("moved",))
    pool = sparse(num_lines * 16384, torch.bfloat16).view(num_lines, 16384)[:, : 3 * 3584].unflatten(1, (3, 3584))
    pool[140001] = near.lines[int(near.src_line)]
    lines = torch.tensor([140001], dtype=torch.int32), torch.tensor([num_lines - 1], dtype=torch.int32)
    far = near._replace(lines=pool, src_line=lines[0], dst_line=lines[1], out=copy_of(near.out))
    watch = watch_conv(far)
    with watch.watching():
        conv_kernel.prepare(*far).run()
    conv_kernel.prepare(*near).run()
    assert near.dst_line is not None
    assert torch.equal(pool[num_lines - 1], near.lines[int(near.dst_line)])
    assert torch.equal(far.out, near.out)


def test_planes_beyond_32_bit_offsets() -> None:
    """B31: three planes of 9,300 pages: the last plane starts behind 2**31 words of 4 bytes."""
    torch.manual_seed(5)
    state = sparse(3 * 9300 * 262144, torch.bfloat16).view(3, 9300, 8, 128, 256)
    planes = Planes(state, None)
    members = torch.tensor([[[8200]]], dtype=torch.int32), torch.tensor([[[9299]]], dtype=torch.int32)
    src, dst = (Checkpoints(table, None) for table in members)
    for plane in state:
        plane[8200] = torch.randn(8, 128, 256).to(torch.bfloat16)
    watch = watch_copy(planes, src, dst)
    with watch.watching():
        copy_kernel.prepare_copy(planes, src, dst, 3).run()
    for plane in state:
        assert torch.equal(plane[9299], plane[8200])
