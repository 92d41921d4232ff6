"""SGLang's Triton attention on the KV views of the organizations: what `platforms.ATTENTION_BACKENDS` says of `triton`.

The kernels of the installed SGLang run in the interpreter. Rows that hold no token of the requests are NaN.
"""

from __future__ import annotations

import os
import warnings

import pytest
import torch

from sgl_hybrid.memory import ORGANIZATIONS
from sgl_hybrid.memory.page_pool import PagePool
from tests.tiny_layouts import PAGE_TOKENS, tiny_layout

os.environ["SGLANG_PLATFORM"] = "sgl_hybrid_cpu"
with warnings.catch_warnings():
    # SGLang and its dependencies warn about missing accelerators while they are imported.
    warnings.simplefilter("ignore")
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd, extend_attention_fwd_unified

LENGTHS = [3, 21, 40]
QUERY_HEADS, KEY_HEADS, HEAD_DIM = 4, 2, 4
SCALE = HEAD_DIM**-0.5


class Requests:
    """K and V of some requests in random pages of an organization, and their token ids."""

    def __init__(self, org: str) -> None:
        layout = tiny_layout(org)
        sizes = {} if layout.shared else {"num_composites": 2}
        dtypes = {"kv_dtype": torch.float16, "ssm_dtype": torch.bfloat16, "conv_dtype": torch.bfloat16}
        pool = PagePool(layout, 12, num_virtual=1, device="cpu", **dtypes, **sizes)
        pool.attention_planes.fill_(0xFF)
        self.keys, self.values = pool.key_rows(0), pool.value_rows(0)
        generator = torch.Generator().manual_seed(11)
        pages = iter(torch.randperm(12, generator=generator).add(1).tolist())
        self.ids = []
        for length in LENGTHS:
            blocks = [next(pages) * layout.tokens_per_page_pitch for _ in range(-(-length // PAGE_TOKENS))]
            rows = (torch.tensor(blocks)[:, None] + torch.arange(PAGE_TOKENS)).flatten()[:length]
            for cache in (self.keys, self.values):
                cache[rows] = torch.randn(length, KEY_HEADS, HEAD_DIM, generator=generator).half()
            self.ids.append(rows)
        self.query = torch.randn(sum(LENGTHS), QUERY_HEADS, HEAD_DIM, generator=generator).half()

    def attention(self, request: int, query: torch.Tensor, *, first: int) -> torch.Tensor:
        """What the queries of positions `first` on attend to, in float32: [queries, heads, head_dim]."""
        rows = self.ids[request]
        key, value = (cache[rows].float().repeat_interleave(2, 1).transpose(0, 1) for cache in (self.keys, self.values))
        seen = torch.arange(len(rows)) <= torch.arange(first, first + len(query))[:, None]
        attended = torch.nn.functional.scaled_dot_product_attention(
            query.float().transpose(0, 1), key, value, attn_mask=seen, scale=SCALE
        )
        return attended.transpose(0, 1)


@pytest.fixture(params=sorted(ORGANIZATIONS))
def requests(request: pytest.FixtureRequest) -> Requests:
    return Requests(request.param)


def test_s0_has_more_rows_than_tokens_in_a_page() -> None:
    assert tiny_layout("s0").tokens_per_page_pitch > PAGE_TOKENS


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # Head lanes that stand for no head.
def test_decode_reads_the_rows_of_the_ids(requests: Requests) -> None:
    batch, splits = len(LENGTHS), 2
    query, out = requests.query[:batch], torch.empty(batch, QUERY_HEADS, HEAD_DIM, dtype=torch.float16)
    decode_attention_fwd(
        query,
        requests.keys,
        requests.values,
        out,
        starts(LENGTHS),
        torch.cat(requests.ids),
        torch.empty(batch, QUERY_HEADS, splits, HEAD_DIM),
        torch.empty(batch, QUERY_HEADS, splits),
        torch.full((batch,), splits, dtype=torch.int32),
        splits,
        SCALE,
        1.0,
        1.0,
        page_size=PAGE_TOKENS,
    )
    for request, length in enumerate(LENGTHS):
        expected = requests.attention(request, query[request : request + 1], first=length - 1)
        torch.testing.assert_close(out[request : request + 1].float(), expected, rtol=4e-3, atol=4e-3)


def test_a_prefill_reads_the_cached_rows_of_the_ids(requests: Requests) -> None:
    cached = [0, 16, 32]
    new = [length - prefix for length, prefix in zip(LENGTHS, cached, strict=True)]
    query, out = requests.query[: sum(new)], torch.empty(sum(new), QUERY_HEADS, HEAD_DIM, dtype=torch.float16)
    fresh = torch.cat([ids[prefix:] for ids, prefix in zip(requests.ids, cached, strict=True)])
    extend_attention_fwd(
        query,
        requests.keys[fresh],
        requests.values[fresh],
        out,
        requests.keys,
        requests.values,
        starts(new),
        starts(cached),
        torch.cat([ids[:prefix] for ids, prefix in zip(requests.ids, cached, strict=True)]),
        None,
        True,
        None,
        max(new),
        1.0,
        1.0,
        sm_scale=SCALE,
        page_size=PAGE_TOKENS,
    )
    assert_prefills(requests, query, out, cached)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # Rows of a tile behind the last query.
def test_a_deterministic_prefill_reads_all_rows_by_their_ids(requests: Requests) -> None:
    """What `--enable-deterministic-inference` takes: cached and new tokens in one pass over the pool."""
    cached = [0, 16, 32]
    new = [length - prefix for length, prefix in zip(LENGTHS, cached, strict=True)]
    query, out = requests.query[: sum(new)], torch.empty(sum(new), QUERY_HEADS, HEAD_DIM, dtype=torch.float16)
    extend_attention_fwd_unified(
        query,
        out,
        requests.keys,
        requests.values,
        1.0,
        1.0,
        starts(new),
        starts(LENGTHS),
        torch.cat(requests.ids),
        torch.tensor(cached, dtype=torch.int32),
        max(new),
        sm_scale=SCALE,
        page_size=PAGE_TOKENS,
    )
    assert_prefills(requests, query, out, cached)


def assert_prefills(requests: Requests, query: torch.Tensor, out: torch.Tensor, cached: list[int]) -> None:
    """Compare what the packed queries behind each request's cached tokens got with what they attend to."""
    row = 0
    for request, (length, prefix) in enumerate(zip(LENGTHS, cached, strict=True)):
        count = length - prefix
        expected = requests.attention(request, query[row : row + count], first=prefix)
        torch.testing.assert_close(out[row : row + count].float(), expected, rtol=4e-3, atol=4e-3)
        row += count


def starts(lengths: list[int]) -> torch.Tensor:
    """Where each of packed sequences starts, and the end: [num + 1] int32."""
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
