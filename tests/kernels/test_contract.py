"""Bad arguments are refused with the argument's name, what was expected and what came; nothing is imported early."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from triton_ops.contract import check_tables
from triton_ops.conv_update.api import conv_update
from triton_ops.ssm_update.api import ssm_update
from triton_ops.state_copy.api import state_copy, state_gather, state_scatter
from triton_ops.state_copy.layout import Arena, Checkpoints, Planes

BF16, FP32, INT32 = torch.bfloat16, torch.float32, torch.int32
Change = Callable[[dict[str, Any]], dict[str, Any]]


def ssm_call(change: Change) -> None:
    table = torch.zeros(2, 3, dtype=INT32)
    arguments: dict[str, Any] = {
        "state": torch.zeros(7, 2, 4, 16, dtype=BF16),
        "src_table": table,
        "dst_table": table.clone(),
        "x": torch.zeros(2, 6, 4, dtype=BF16),
        "dt": torch.zeros(2, 6, dtype=BF16),
        "A": torch.zeros(6),
        "B": torch.zeros(2, 2, 16, dtype=BF16),
        "C": torch.zeros(2, 2, 16, dtype=BF16),
        "D": torch.zeros(6),
        "dt_bias": torch.zeros(6),
    }
    ssm_update(**arguments | change(arguments))


def conv_call(change: Change) -> None:
    arguments: dict[str, Any] = {
        "lines": torch.zeros(7, 3, 8, dtype=BF16),
        "src_line": torch.zeros(2, dtype=INT32),
        "dst_line": torch.ones(2, dtype=INT32),
        "x": torch.zeros(2, 8, dtype=BF16),
        "weight": torch.zeros(4, 8),
        "bias": torch.zeros(8),
    }
    conv_update(**arguments | change(arguments))


def planes(T: int = 2) -> Planes:
    return Planes(torch.zeros(T, 7, 2, 4, 8, dtype=BF16), torch.zeros(T, 7, 3, 8, dtype=BF16))


def checkpoints(batch: int = 2, G: int = 1, M: int = 3) -> Checkpoints:
    return Checkpoints(torch.zeros(batch, G, M, dtype=INT32), torch.zeros(batch, G, dtype=INT32))


def arena(L: int = 2, batch: int = 2) -> Arena:
    return Arena(torch.zeros(L, batch, 6, 4, 8, dtype=BF16), torch.zeros(L, batch, 3, 8, dtype=BF16))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"state": torch.zeros(7, 2, 4, 16, dtype=torch.float16)}, r"state.dtype: expected .*, got torch.float16"),
        (
            {"state": torch.zeros(7, 2, 64, dtype=BF16)},
            r"state.shape: expected \[any, any, any, any\], got \[7, 2, 64\]",
        ),
        ({"state": torch.zeros(7, 0, 4, 16, dtype=BF16)}, r"expected at least one head and one row, got \[0, 4\]"),
        ({"state": torch.zeros(7, 2, 4, 12, dtype=BF16)}, r"\(N\): expected a power of two, got 12"),
        ({"state": torch.zeros(7, 2, 16, 4, dtype=BF16).transpose(2, 3)}, r"state.stride\(-1\): expected 1, got 4"),
        ({"state": torch.zeros(7, 4, 2, 16, dtype=BF16).transpose(1, 2)}, r"state.stride\(2\): expected 16 .*, got 32"),
        ({"state": torch.zeros(7, 4, 4, 16, dtype=BF16)}, r"\(H\): expected a multiple of 4 heads per member, got 6"),
        (
            {"src_table": torch.zeros(2, 3, dtype=torch.int64)},
            r"src_table.dtype: expected torch.int32, got torch.int64",
        ),
        ({"src_table": torch.zeros(2, 2, dtype=INT32)}, r"src_table.shape: expected \[2, 3\], got \[2, 2\]"),
        ({"dst_table": torch.zeros(2, 9, dtype=INT32)}, r"dst_table.shape: expected \[2, 3\], got \[2, 9\]"),
        ({"dst_table": torch.zeros(3, 2, dtype=INT32).t()}, r"dst_table.stride\(-1\): expected 1, got 2"),
        ({"dst_table": torch.zeros(2, 3, dtype=INT32, device="meta")}, r"dst_table.device: expected cpu, got meta"),
        ({"x": torch.zeros(2, 6, 5, dtype=BF16)}, r"x.shape: expected \[any, any, 4\], got \[2, 6, 5\]"),
        ({"x": torch.zeros(2, 6, 8, dtype=BF16)[:, :, :4]}, r"x.stride\(1\): expected 4 \(heads contiguous\), got 8"),
        ({"dt": torch.zeros(2, 6, 4, dtype=BF16)}, r"dt.shape: expected \[2, 6\], got \[2, 6, 4\]"),
        ({"A": torch.zeros(6, dtype=BF16)}, r"A.dtype: expected torch.float32, got torch.bfloat16"),
        ({"B": torch.zeros(2, 4, 16, dtype=BF16)}, r"\(G\): expected a divisor of 6 heads, got 4"),
        ({"C": torch.zeros(2, 1, 16, dtype=BF16)}, r"C.shape: expected \[2, 2, 16\], got \[2, 1, 16\]"),
        ({"D": torch.zeros(6, 4)}, r"D.shape: expected \[6\], got \[6, 4\]"),
        ({"dt_bias": torch.zeros(5)}, r"dt_bias.shape: expected \[6\], got \[5\]"),
        ({"z": torch.zeros(2, 6, 4, dtype=torch.int8)}, r"z.dtype: expected .*, got torch.int8"),
        ({"out": torch.zeros(2, 6, 4, dtype=torch.float64)}, r"out.dtype: expected .*, got torch.float64"),
    ],
    ids=str,
)
def test_ssm_update_refuses(change: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ssm_call(lambda _: change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lines": torch.zeros(7, 3, 8, dtype=torch.int8)}, r"lines.dtype: expected .*, got torch.int8"),
        ({"lines": torch.zeros(7, 4, 8, dtype=BF16)}, r"\(W-1\): expected 1, 2 or 3, got 4"),
        ({"lines": torch.zeros(7, 3, 16, dtype=BF16)[:, :, ::2]}, r"lines.stride: expected .*, got \(16, 2\)"),
        ({"lines": torch.zeros(7, 24, dtype=BF16)}, r"lines.shape: expected \[any, any, any\], got \[7, 24\]"),
        ({"lines": torch.zeros(7, 3, 0, dtype=BF16)}, r"\(C\): expected at least one channel, got 0"),
        ({"src_line": torch.zeros(3, dtype=INT32)}, r"src_line.shape: expected \[2\], got \[3\]"),
        ({"dst_line": torch.zeros(2, dtype=torch.int64)}, r"dst_line.dtype: expected torch.int32, got torch.int64"),
        ({"x": torch.zeros(8, 2, dtype=BF16).t()}, r"x.stride\(-1\): expected 1, got 2"),
        ({"weight": torch.zeros(8, 4)}, r"weight.shape: expected \[4, 8\], got \[8, 4\]"),
        ({"weight": torch.zeros(4, 16)[:, :8]}, r"weight.stride: expected .*, got \(16, 1\)"),
        ({"bias": torch.zeros(4)}, r"bias.shape: expected \[8\], got \[4\]"),
        ({"activation": "relu"}, r"activation: expected 'silu' or None, got 'relu'"),
        ({"out": torch.zeros(2, 9, dtype=BF16)}, r"out.shape: expected \[2, 8\], got \[2, 9\]"),
    ],
    ids=str,
)
def test_conv_update_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        conv_call(lambda _: change)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: state_gather(Planes(None, None), Checkpoints(None, None), Arena(None, None)), "at least one part"),
        (lambda: state_gather(planes(), checkpoints()._replace(lines=None), arena()), r"src.lines: expected a table"),
        (lambda: state_gather(planes(), checkpoints(G=2), arena(L=5)), r"arena layers: expected 1..4, got \[5\]"),
        (
            lambda: state_gather(planes(), checkpoints(), arena(batch=3)),
            r"arena.state.shape: expected \[2, 2, 6, 4, 8\]",
        ),
        (lambda: state_gather(planes(), checkpoints(M=2), arena()), r"arena.state.shape: expected \[2, 2, 4, 4, 8\]"),
        (lambda: state_gather(planes(), checkpoints(), arena()._replace(conv=None)), r"arena.conv: expected given"),
        (
            lambda: state_scatter(arena()._replace(state=arena().state.float()), planes(), checkpoints()),
            r"arena.state.dtype: expected torch.bfloat16, got torch.float32",
        ),
        (
            lambda: state_scatter(arena(), planes()._replace(conv=torch.zeros(2, 7, 3, 9, dtype=BF16)), checkpoints()),
            r"arena.conv.shape: expected \[2, 2, 3, 9\]",
        ),
        (
            lambda: state_scatter(arena(), planes(), Checkpoints(checkpoints().members.long(), checkpoints().lines)),
            r"dst.members.dtype: expected torch.int32, got torch.int64",
        ),
        (
            lambda: state_copy(planes(), checkpoints(), checkpoints(batch=3)),
            r"dst: expected .*batch=2.*, got .*batch=3",
        ),
        (lambda: state_copy(planes(), checkpoints(), checkpoints(M=2)), r"\(M\): expected 3, got 2"),
        (lambda: state_copy(planes(), checkpoints(), checkpoints(), num_layers=3), r"num_layers: expected 1..2, got 3"),
        (
            lambda: state_copy(planes()._replace(conv=planes(3).conv), checkpoints(), checkpoints()),
            r"src.lines: expected .*num_planes=2.*, got .*num_planes=3",
        ),
        (
            lambda: state_copy(planes()._replace(state=planes().state[..., ::2]), checkpoints(), checkpoints()),
            r"planes.state.stride",
        ),
    ],
)
def test_state_copies_refuse(call: Callable[[], None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("src", "dst", "message"),
    [
        ([[0, 1]], [[2, 9]], r"dst_table\[0, 1\]: expected -1 or 0..7, got 9"),
        ([[0, -2]], [[2, 3]], r"src_table\[0, 1\]: expected -1 or 0..7, got -2"),
        ([[0, -1]], [[2, 3]], r"src_table\[0\]: expected all members present or all absent, got \[0, -1\]"),
        ([[0, 1], [2, 3]], [[4, 5], [4, 6]], r"dst_table\[1, 0\]: expected a unit not yet written at \[0, 0\], got 4"),
        ([[0, 1], [2, 3]], [[4, 2], [5, 6]], r"dst_table\[0, 1\]: expected a unit that no other place reads, got 2"),
        ([[0, 1]], [[1, 0]], r"dst_table\[0, 0\]: expected a unit that no other place reads, got 1"),
    ],
)
def test_check_tables_refuses(src: list[list[int]], dst: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_tables(torch.tensor(src, dtype=INT32), torch.tensor(dst, dtype=INT32), 8)


def test_check_tables_takes_rows_in_place_moved_adopted_new_and_padded() -> None:
    src = torch.tensor([[0, 1], [2, 3], [2, 3], [-1, -1], [4, 5], [-1, -1]], dtype=INT32)
    dst = torch.tensor([[0, 1], [6, 7], [8, 9], [10, 11], [-1, -1], [-1, -1]], dtype=INT32)
    check_tables(src, dst, 12)


def test_importing_an_api_loads_no_kernel_and_no_triton() -> None:
    modules = "triton_ops.ssm_update.api, triton_ops.conv_update.api, triton_ops.state_copy.api"
    code = f"import sys, {modules}; print('triton' in sys.modules or any(m.endswith('.kernel') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
