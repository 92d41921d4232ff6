"""The paged SSM update under the interpreter at the batch sizes of the decode graphs, all kinds of rows mixed."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.interpret.arguments import copy_of, same_bits, ssm_arguments
from triton_ops.ssm_update import reference
from triton_ops.ssm_update.api import ssm_update


@pytest.mark.parametrize("batch", [1, 8, 32, 53])
@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("gate", [False, True], ids=["", "z"])
def test_bits_equal_the_oracle(batch: int, state_dtype: torch.dtype, gate: bool) -> None:
    torch.manual_seed(batch)
    M = 3 if batch <= 8 else 1
    arguments = ssm_arguments(batch, M=M, state_dtype=state_dtype, gate=gate)
    expected = arguments._replace(state=copy_of(arguments.state), out=copy_of(arguments.out))
    reference.ssm_update(*expected)
    ssm_update(*arguments[:-2], z=arguments.z, out=arguments.out)
    assert same_bits(arguments.state, expected.state)
    assert same_bits(arguments.out, expected.out)
