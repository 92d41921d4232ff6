"""The paged update equals SGLang's stock kernel bit for bit: both run in the interpreter, on pages and on slots."""

from __future__ import annotations

import pytest
import torch

from bench.micro.rivals import load_rivals, load_stock, without_device
from bench.micro.shapes import Shape, ssm_arguments
from triton_ops.ssm_update.kernel import prepare

TINY = Shape("tiny", num_layers=1, H=6, P=8, N=16, G=2, C=40, W=4, member_bytes=512)
STOCK, REASON = load_stock(None)

pytestmark = pytest.mark.skipif(STOCK is None, reason=f"no stock kernel: {REASON}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", ["stock", "stock re-tuned"])
def test_state_and_output_bits_equal_the_stock_kernels(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    batch, M, heads = 4, TINY.num_members(dtype), TINY.heads_per_member(dtype)
    slots = torch.randn(batch + 1, TINY.H, TINY.P, TINY.N).to(dtype)
    pages = torch.full((2 * batch * M, heads, TINY.P, TINY.N), float("nan"), dtype=dtype)
    src, dst = (ids.clone() for ids in torch.randperm(2 * batch * M).to(torch.int32).view(2, batch, M))
    indices = torch.tensor([[2], [0], [4], [1]], dtype=torch.int32)
    pages[src.long()] = slots[indices[:, 0].long()].view(batch, M, heads, TINY.P, TINY.N)

    stock = ssm_arguments(TINY, slots, indices, None, gate=False)
    paged = stock._replace(state=pages, src_table=src, dst_table=dst, out=torch.empty_like(stock.out))
    bind = {rival.name: rival.bind for rival in load_rivals(None)}[name]
    assert bind is not None
    with without_device():
        bind(stock)()
    prepare(*paged).run()
    moved = pages[dst.long()].view(batch, TINY.H, TINY.P, TINY.N)
    assert torch.equal(moved, slots[indices[:, 0].long()])
    assert torch.equal(paged.out, stock.out)
