"""The paged SSM update under the interpreter: every bit of state, output and untouched memory equals the oracle's."""

from __future__ import annotations

import pytest
import torch

from bench.micro.shapes import SsmArguments
from tests.kernels.interpret.arguments import NAN, copy_of, same_bits, ssm_arguments
from triton_ops.ssm_update import reference
from triton_ops.ssm_update.api import ssm_update

DTYPES = pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])


def run(arguments: SsmArguments) -> torch.Tensor:
    """Run the kernel in place; return its output."""
    return ssm_update(*arguments[:-2], z=arguments.z, out=arguments.out)


def assert_equal_to_oracle(arguments: SsmArguments) -> None:
    expected = arguments._replace(state=copy_of(arguments.state), out=copy_of(arguments.out))
    reference.ssm_update(*expected)
    run(arguments)
    assert same_bits(arguments.state, expected.state)
    assert same_bits(arguments.out, expected.out)
    assert not arguments.out.isnan().any()


@DTYPES
@pytest.mark.parametrize("gate", [False, True], ids=["", "z"])
@pytest.mark.parametrize(("M", "heads_per_member"), [(1, 2), (3, 2), (6, 1)])
def test_bits_equal_the_oracle_for_every_kind_of_row(
    state_dtype: torch.dtype, gate: bool, M: int, heads_per_member: int
) -> None:
    torch.manual_seed(M)
    assert_equal_to_oracle(
        ssm_arguments(6, M=M, heads_per_member=heads_per_member, state_dtype=state_dtype, gate=gate, P=8)
    )


@DTYPES
@pytest.mark.parametrize("M", [1, 3, 6])
def test_a_group_of_nine_uses_its_own_columns(state_dtype: torch.dtype, M: int) -> None:
    torch.manual_seed(9)
    arguments = ssm_arguments(6, M=M, heads_per_member=1, layer_groups=9, state_dtype=state_dtype)
    assert arguments.src_table.stride(0) == 9 * M
    assert_equal_to_oracle(arguments)


@pytest.mark.parametrize(
    "shape",
    [
        {"P": 1, "N": 16},
        {"P": 5, "N": 8},
        {"P": 12, "N": 1},
        {"P": 4, "N": 256, "bc_groups": 2},
        {"P": 4, "N": 16, "bc_groups": 6},
        {"P": 64, "N": 64},
    ],
    ids=str,
)
def test_odd_shapes(shape: dict[str, int]) -> None:
    torch.manual_seed(0)
    assert_equal_to_oracle(ssm_arguments(2, kinds=("moved", "in_place"), gate=True, **shape))


def test_none_as_destination_is_in_place() -> None:
    torch.manual_seed(1)
    arguments = ssm_arguments(4, kinds=("in_place", "padding"))
    both = arguments._replace(state=copy_of(arguments.state), out=copy_of(arguments.out))
    run(arguments._replace(dst_table=None))
    run(both)
    assert same_bits(arguments.state, both.state)
    assert same_bits(arguments.out, both.out)


@DTYPES
def test_64_steps_in_strided_pages_equal_a_contiguous_state(state_dtype: torch.dtype) -> None:
    """B30: a state that hops between pages of a strided pool and one that stays in a dense tensor never differ."""
    torch.manual_seed(2)
    paged = ssm_arguments(1, M=2, heads_per_member=1, P=4, num_pages=9, state_dtype=state_dtype, kinds=("moved",))
    dense = paged.state[paged.src_table[0].long()].reshape(1, 2, 4, 16).contiguous()
    slot = torch.zeros(1, 1, dtype=torch.int32)
    for step in range(64):
        dt, x = torch.randn_like(paged.dt), torch.randn_like(paged.x)
        y = run(paged._replace(dt=dt, x=x))
        y_dense = ssm_update(dense, slot, None, x, dt, *paged[5:10])
        assert torch.equal(y, y_dense), f"step {step}"
        assert paged.dst_table is not None
        assert torch.equal(paged.state[paged.dst_table[0].long()].reshape(dense.shape), dense), f"step {step}"
        paged = paged._replace(src_table=paged.dst_table, dst_table=paged.src_table)


def test_large_dt_skips_softplus_without_overflow() -> None:
    torch.manual_seed(3)
    arguments = ssm_arguments(1, kinds=("moved",))
    arguments.dt.fill_(60.0)
    assert_equal_to_oracle(arguments)


def test_empty_batch_returns_an_empty_output() -> None:
    arguments = ssm_arguments(1)
    empty = arguments._replace(
        src_table=arguments.src_table[:0],
        dst_table=None,
        x=arguments.x[:0],
        dt=arguments.dt[:0],
        B=arguments.B[:0],
        C=arguments.C[:0],
    )
    assert ssm_update(*empty[:-2]).shape == (0, *arguments.x.shape[1:])


def test_a_nan_in_the_source_stays_in_its_own_heads() -> None:
    torch.manual_seed(4)
    arguments = ssm_arguments(2, kinds=("moved",))
    arguments.state[int(arguments.src_table[0, 1])] = NAN
    run(arguments)
    assert arguments.out[0, 2:4].isnan().all()
    assert not arguments.out[0, [0, 1, 4, 5]].isnan().any()
    assert not arguments.out[1].isnan().any()


@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_a_whole_layer_of_falcon_h1_7b(state_dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    M, heads_per_member = (3, 8) if state_dtype == torch.bfloat16 else (6, 4)
    arguments = ssm_arguments(
        1, M=M, heads_per_member=heads_per_member, P=128, N=256, state_dtype=state_dtype, gate=True, kinds=("moved",)
    )
    # One program per head, so that the full size stays affordable under the interpreter.
    from triton_ops.ssm_update.kernel import prepare

    expected = arguments._replace(state=copy_of(arguments.state), out=copy_of(arguments.out))
    reference.ssm_update(*expected)
    prepare(*arguments, BM=128).run()
    assert same_bits(arguments.state, expected.state)
    assert same_bits(arguments.out, expected.out)
