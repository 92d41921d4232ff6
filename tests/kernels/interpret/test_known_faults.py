"""Faults that other engines had with stale, absent and padded rows, as scenarios; the ids are the project's list's."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.interpret.arguments import NAN, conv_arguments, copy_of, pool_of, same_bits, ssm_arguments
from triton_ops.conv_update.api import conv_update
from triton_ops.ssm_update.api import ssm_update

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])


@DTYPES
def test_b24_a_new_request_does_not_read_the_former_tenant(dtype: torch.dtype) -> None:
    """Destination pages and lines full of NaN: a request without a source is computed as on a pool of zeros."""
    torch.manual_seed(0)
    ssm = ssm_arguments(2, state_dtype=dtype, kinds=("new",))
    conv = conv_arguments(2, line_dtype=dtype, kinds=("new",))
    assert ssm.state.isnan().all()
    assert conv.lines.isnan().all()
    fresh_state, fresh_lines = copy_of(ssm.state).zero_(), copy_of(conv.lines).zero_()
    y, u = ssm_update(*ssm[:10]), conv_update(*conv[:6])
    assert torch.equal(y, ssm_update(fresh_state, *ssm[1:10]))
    assert torch.equal(u, conv_update(fresh_lines, *conv[1:6]))
    assert not y.isnan().any()
    assert not u.isnan().any()
    assert ssm.dst_table is not None
    assert torch.equal(ssm.state[ssm.dst_table.long()], fresh_state[ssm.dst_table.long()])


@DTYPES
def test_b26_padded_rows_write_no_page_of_a_full_pool(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    ssm = ssm_arguments(4, state_dtype=dtype, kinds=("padding",))
    conv = conv_arguments(4, line_dtype=dtype, kinds=("padding",))
    pool_of(ssm.state).random_(-1000, 1000)
    pool_of(conv.lines).random_(-1000, 1000)
    state, lines = copy_of(ssm.state), copy_of(conv.lines)
    ssm_update(*ssm[:10])
    conv_update(*conv[:6])
    assert same_bits(ssm.state, state)
    assert same_bits(conv.lines, lines)


@DTYPES
def test_b27_absent_is_no_location_with_the_first_and_the_last_unit_live(dtype: torch.dtype) -> None:
    """-1 decodes neither to the last unit nor to unit 0, on either side, alone or beside a live row."""
    torch.manual_seed(2)
    for kinds in (("padding",), ("new",), ("score",), ("moved", "padding", "new", "score")):
        ssm = ssm_arguments(len(kinds), M=2, state_dtype=dtype, kinds=kinds, num_pages=4 * len(kinds) + 2)
        conv = conv_arguments(len(kinds), line_dtype=dtype, kinds=kinds)
        # Move every id away from the first and the last unit, then make those two live.
        src_table, dst_table = _inside(ssm.src_table), _inside(ssm.dst_table)
        src_line, dst_line = _inside(conv.src_line), _inside(conv.dst_line)
        state, lines = torch.randn_like(ssm.state[[0] * (4 * len(kinds) + 4)]), torch.randn_like(conv.lines[[0] * 20])
        ends = (state[[0, -1]].clone(), lines[[0, -1]].clone())
        y = ssm_update(state, src_table, dst_table, *ssm[3:10])
        u = conv_update(lines, src_line, dst_line, *conv[3:6])
        assert torch.equal(state[[0, -1]], ends[0])
        assert torch.equal(lines[[0, -1]], ends[1])
        assert not y.isnan().any()
        assert not u.isnan().any()


def test_b28_padded_rows_are_finite_and_leave_real_rows_alone() -> None:
    """The conv's output feeds the update; both outputs are poisoned before, as a reused graph buffer is."""
    torch.manual_seed(3)
    kinds = ("moved", "padding", "in_place")
    ssm = ssm_arguments(3, kinds=kinds)
    H, P = ssm.x.shape[1:]
    conv = conv_arguments(3, C=H * P, kinds=kinds)
    alone_state, alone_lines = copy_of(ssm.state), copy_of(conv.lines)
    conv.out.fill_(NAN)
    ssm.out.fill_(NAN)
    x = conv_update(*conv[:6], out=conv.out).unflatten(1, (H, P))
    y = ssm_update(*ssm[:3], x, *ssm[4:10], out=ssm.out)
    assert torch.equal(x[1], torch.zeros_like(x[1]))
    assert torch.equal(y[1], torch.zeros_like(y[1]))

    for row in (0, 2):
        rows = slice(row, row + 1)
        assert conv.dst_line is not None
        assert ssm.dst_table is not None
        lone = conv_update(alone_lines, conv.src_line[rows], conv.dst_line[rows], conv.x[rows], *conv[4:6])
        assert torch.equal(lone.unflatten(1, (H, P)), x[rows])
        tables = ssm.src_table[rows], ssm.dst_table[rows]
        per_row = (x[rows], ssm.dt[rows], ssm.A, ssm.B[rows], ssm.C[rows], ssm.D, ssm.dt_bias)
        assert torch.equal(ssm_update(alone_state, *tables, *per_row), y[rows])
    assert same_bits(alone_state, ssm.state)
    assert same_bits(alone_lines, conv.lines)


def _inside(ids: torch.Tensor | None) -> torch.Tensor:
    """Shift every present id by one, so that unit 0 is named by none."""
    assert ids is not None
    return torch.where(ids >= 0, ids + 1, ids)
