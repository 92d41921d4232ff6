"""The modelled bytes of a launch are the bytes the kernel touches, and paging adds less than one percent."""

from __future__ import annotations

import pytest
import torch

from bench.micro.shapes import FALCON_H1_7B, conv_arguments, conv_lines, copy_arguments, ssm_arguments
from bench.micro.traffic import Traffic, conv_update_traffic, gather_traffic, ssm_update_traffic
from tests.kernels.interpret.access import MemoryWatch
from triton_ops.conv_update import kernel as conv_kernel
from triton_ops.launch import Launch
from triton_ops.ssm_update import kernel as ssm_kernel
from triton_ops.state_copy import kernel as copy_kernel


def assert_touches(launch: Launch, traffic: Traffic) -> None:
    watch = MemoryWatch()
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in launch.args if tensor is not None}
    for tensor in storages.values():
        watch.grant(tensor.new_empty(0).set_(tensor.untyped_storage()), read=True, write=True)
    with watch.watching():
        launch.run()
    assert watch.bytes_touched() == traffic.total
    assert traffic.total <= 1.01 * traffic.payload


@pytest.mark.parametrize("gate", [False, True], ids=["", "z"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_ssm_update_of_falcon_h1_7b(dtype: torch.dtype, gate: bool) -> None:
    shape, batch = FALCON_H1_7B, 2
    heads, M = shape.heads_per_member(dtype), shape.num_members(dtype)
    pool = torch.zeros((2 * batch * M, heads, shape.P, shape.N), dtype=dtype)
    src, dst = torch.randperm(2 * batch * M).to(torch.int32).view(2, batch, M).clone()
    arguments = ssm_arguments(shape, pool, src.clone(), dst.clone(), gate=gate)
    traffic = ssm_update_traffic(arguments)
    state_bytes = 2 * batch * shape.H * shape.P * shape.N * dtype.itemsize
    assert state_bytes <= traffic.total <= 1.01 * state_bytes
    assert_touches(ssm_kernel.prepare(*arguments, BM=shape.P), traffic)


def test_conv_update_of_falcon_h1_7b() -> None:
    lines = conv_lines(FALCON_H1_7B, 8, torch.bfloat16, "cpu", channel_major=False)
    src, dst = (torch.tensor(ids, dtype=torch.int32) for ids in ([0, 3], [5, 2]))
    arguments = conv_arguments(FALCON_H1_7B, lines, src, dst)
    assert_touches(conv_kernel.prepare(*arguments), conv_update_traffic(arguments))


def test_gather_of_falcon_h1_7b() -> None:
    arguments = copy_arguments(FALCON_H1_7B, 2, torch.bfloat16, "cpu", num_planes=1)
    launch = copy_kernel.prepare_gather(arguments.planes, arguments.src, arguments.arena)
    assert_touches(launch, gather_traffic(arguments))
