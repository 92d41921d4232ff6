"""The compiled conv update and checkpoint copies: budgets on every architecture."""

from __future__ import annotations

import pytest
import torch

from bench.micro.shapes import FALCON_H1_7B, conv_arguments, conv_lines, copy_arguments
from bench.micro.static_compile import ARCHITECTURES, compile_launch, compile_with
from tests.kernels.compile.assertions import assert_within, vector_loads_around_waits
from tests.kernels.compile.budgets import CONV, COPY
from triton_ops.conv_update.kernel import prepare
from triton_ops.launch import Launch
from triton_ops.state_copy.kernel import prepare_copy, prepare_gather, prepare_scatter

CAPABILITIES = pytest.mark.parametrize("capability", ARCHITECTURES)


@CAPABILITIES
@pytest.mark.parametrize("lines_dtype", CONV)
def test_conv_update_on_tap_major_lines_is_within_its_budget(capability: int, lines_dtype: str) -> None:
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[lines_dtype]
    lines = conv_lines(FALCON_H1_7B, 64, dtype, "meta", channel_major=False)
    ids = torch.empty(8, dtype=torch.int32, device="meta")
    launch = prepare(*conv_arguments(FALCON_H1_7B, lines, ids, ids))
    assert_within(compile_launch(launch, capability), CONV[lines_dtype])


def test_channel_major_lines_are_the_slow_layout() -> None:
    """SGLang's layout is taken as it is, at one element per access; the note in the docs holds as long as this does."""
    lines = conv_lines(FALCON_H1_7B, 64, torch.bfloat16, "meta", channel_major=True)
    ids = torch.empty(8, dtype=torch.int32, device="meta")
    code = compile_launch(prepare(*conv_arguments(FALCON_H1_7B, lines, ids, ids)), 90)
    assert (code.stack_bytes, code.local_bytes) == (0, 0)
    assert code.loads[16] > 8 * CONV["bf16"].vector_loads / 2


def test_an_early_start_loads_the_line_before_it_waits_and_x_after() -> None:
    lines = conv_lines(FALCON_H1_7B, 64, torch.bfloat16, "meta", channel_major=False)
    ids = torch.empty(8, dtype=torch.int32, device="meta")
    arguments = conv_arguments(FALCON_H1_7B, lines, ids, ids)
    code = compile_with(lambda: prepare(*arguments, may_start_early=True).compile(), 90)
    assert_within(code, CONV["bf16"])
    assert any(before >= 3 and after >= 1 for before, after in vector_loads_around_waits(code))


@CAPABILITIES
@pytest.mark.parametrize("operation", COPY)
def test_copies_are_within_their_budget(capability: int, operation: str) -> None:
    planes, src, dst, arena = copy_arguments(FALCON_H1_7B, 8, torch.bfloat16, "meta", num_planes=44)
    launches: dict[str, Launch] = {
        "gather": prepare_gather(planes, src, arena),
        "scatter": prepare_scatter(arena, planes, dst),
        "copy": prepare_copy(planes, src, dst, 44),
    }
    assert_within(compile_launch(launches[operation], capability), COPY[operation])


@pytest.mark.parametrize("operation", COPY)
def test_one_launch_covers_every_layer_row_member_and_line(operation: str) -> None:
    planes, src, dst, arena = copy_arguments(FALCON_H1_7B, 8, torch.bfloat16, "meta", num_planes=44)
    launch = {
        "gather": prepare_gather(planes, src, arena),
        "scatter": prepare_scatter(arena, planes, dst),
        "copy": prepare_copy(planes, src, dst, 44),
    }[operation]
    chunks_of_member, chunks_of_line = 512 * 1024 // 16384, 2
    assert launch.grid == (3 * chunks_of_member + chunks_of_line, 8, 44)
