"""The conv update under the interpreter: every bit of lines, output and untouched memory equals the oracle's."""

from __future__ import annotations

import pytest
import torch

from bench.micro.shapes import ConvArguments
from tests.kernels.interpret.arguments import conv_arguments, copy_of, same_bits
from triton_ops.conv_update import reference
from triton_ops.conv_update.api import Activation, conv_update

DTYPES = pytest.mark.parametrize("line_dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])


def run(arguments: ConvArguments) -> torch.Tensor:
    """Run the kernel in place; return its output."""
    return conv_update(*arguments[:6], activation=arguments.activation, out=arguments.out)


def assert_equal_to_oracle(arguments: ConvArguments) -> None:
    expected = arguments._replace(lines=copy_of(arguments.lines), out=copy_of(arguments.out))
    reference.conv_update(*expected)
    run(arguments)
    assert same_bits(arguments.lines, expected.lines)
    assert same_bits(arguments.out, expected.out)
    assert not arguments.out.isnan().any()


@DTYPES
@pytest.mark.parametrize("W", [2, 3, 4])
@pytest.mark.parametrize("channel_major", [False, True], ids=["tap-major", "channel-major"])
@pytest.mark.parametrize("C", [1, 37, 40])
def test_bits_equal_the_oracle_for_every_kind_of_row(
    line_dtype: torch.dtype, W: int, channel_major: bool, C: int
) -> None:
    torch.manual_seed(W)
    assert_equal_to_oracle(conv_arguments(6, C=C, W=W, line_dtype=line_dtype, channel_major=channel_major))


@DTYPES
@pytest.mark.parametrize("batch", [1, 8, 32, 53])
def test_bits_equal_the_oracle_at_the_batch_sizes_of_the_decode_graphs(line_dtype: torch.dtype, batch: int) -> None:
    torch.manual_seed(batch)
    assert_equal_to_oracle(conv_arguments(batch, line_dtype=line_dtype))


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_bias_and_activation_are_optional(bias: bool, activation: Activation) -> None:
    torch.manual_seed(0)
    assert_equal_to_oracle(conv_arguments(6, bias=bias, activation=activation))


@pytest.mark.parametrize("line_stride", [120, 144, 3 * 144], ids=["page", "slot", "composite"])
def test_lines_of_a_page_a_slab_slot_and_a_composite_page(line_stride: int) -> None:
    """The payload is 120 elements: as long as the line, shorter than its slot, and the tail of a longer page."""
    torch.manual_seed(1)
    arguments = conv_arguments(6, line_stride=line_stride)
    assert arguments.lines.stride(0) == line_stride
    assert_equal_to_oracle(arguments)


def test_a_table_column_is_a_line_list() -> None:
    torch.manual_seed(2)
    arguments = conv_arguments(6)
    wide = torch.full((6, 9), -7, dtype=torch.int32)
    wide[:, 4] = arguments.src_line
    assert_equal_to_oracle(arguments._replace(src_line=wide[:, 4]))


def test_none_as_destination_is_in_place() -> None:
    torch.manual_seed(3)
    arguments = conv_arguments(4, kinds=("in_place", "padding"))
    both = arguments._replace(lines=copy_of(arguments.lines), out=copy_of(arguments.out))
    run(arguments._replace(dst_line=None))
    run(both)
    assert same_bits(arguments.lines, both.lines)
    assert same_bits(arguments.out, both.out)


def test_the_output_may_be_the_input() -> None:
    torch.manual_seed(4)
    arguments = conv_arguments(6)
    aliased = arguments._replace(lines=copy_of(arguments.lines), out=arguments.x)
    expected = run(arguments)
    assert torch.equal(run(aliased), expected)
    assert same_bits(aliased.lines, arguments.lines)


def test_layouts_agree() -> None:
    """A tap-major and a channel-major pool with the same values give the same output and hold the same values after."""
    torch.manual_seed(5)
    tap_major = conv_arguments(6)
    other = conv_arguments(6, channel_major=True)._replace(
        src_line=tap_major.src_line,
        dst_line=tap_major.dst_line,
        x=tap_major.x,
        weight=tap_major.weight.t().contiguous().t(),
        bias=tap_major.bias,
    )
    other.lines.copy_(tap_major.lines)
    assert torch.equal(run(tap_major), run(other))
    assert torch.equal(tap_major.lines.nan_to_num(7.0), other.lines.nan_to_num(7.0))


def test_silu_of_a_very_negative_sum_is_zero() -> None:
    arguments = conv_arguments(1, kinds=("moved",))
    assert arguments.bias is not None
    arguments.bias.fill_(-200.0)
    with pytest.warns(RuntimeWarning, match="overflow"):
        run(arguments)
    assert torch.equal(arguments.out, torch.zeros_like(arguments.out))


def test_a_whole_layer_of_falcon_h1_7b() -> None:
    torch.manual_seed(6)
    assert_equal_to_oracle(conv_arguments(8, C=3584, line_stride=16384))
