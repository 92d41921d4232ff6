"""Prefill attention in tiles equals the definition, and its bits do not depend on how a prompt is cut."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch

from triton_ops.tile_attention.api import TILE_TOKENS, tile_attention
from triton_ops.tile_attention.reference import attend
from triton_ops.tile_attention.torch_path import attend_tiles

DTYPES = (torch.float32, torch.bfloat16)
NAN = float("nan")
pytestmark = pytest.mark.usefixtures("threads")


def sequence(
    tokens: int, *, heads: int = 4, key_heads: int = 2, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(tokens, heads, 16), (tokens, key_heads, 16), (tokens, key_heads, 16)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cuts: Sequence[int] = ()) -> torch.Tensor:
    """The attention of all tokens, computed in pieces that end at `cuts`."""
    out = torch.full((query.shape[0], query.shape[1], value.shape[2]), NAN, dtype=query.dtype)
    for start, end in pairwise([0, *cuts, query.shape[0]]):
        tile_attention(query[start:end], key[:end], value[:end], scale=None, out=out[start:end])
    return out


@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize(("tokens", "start"), [(1, 0), (2, 1), (7, 0), (9, 3), (40, 0), (40, 39), (33, 16)])
def test_attention_equals_the_definition(heads: int, key_heads: int, tokens: int, start: int) -> None:
    query, key, value = sequence(tokens, heads=heads, key_heads=key_heads)
    out = torch.full((tokens - start, heads, 16), NAN)
    attend_tiles(query[start:], key, value, scale=0.3, tile_tokens=16, out=out)
    expected = attend(query[start:].numpy(), key.numpy(), value.numpy(), scale=0.3)
    np.testing.assert_allclose(out.numpy(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 2], indirect=True)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "cuts",
    [
        (1,),
        (TILE_TOKENS,),
        (TILE_TOKENS - 1, TILE_TOKENS),
        (100, 101, 400),
        (512,),
        (512, 513),
        tuple(range(64, 700, 64)),
    ],
    ids=str,
)
def test_a_cut_changes_no_bit(cuts: tuple[int, ...], dtype: torch.dtype) -> None:
    query, key, value = sequence(700, dtype=dtype)
    assert torch.equal(run(query, key, value, cuts), run(query, key, value))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_follows_changes_no_bit(dtype: torch.dtype) -> None:
    """A prompt and a longer one that begins with it."""
    query, key, value = sequence(600, dtype=dtype)
    whole = run(query, key, value)
    for length in (1, 5, 127, 128, 129, 511, 512):
        assert torch.equal(run(query[:length], key[:length], value[:length]), whole[:length])


def test_torchs_attention_does_depend_on_the_cut() -> None:
    """What the tiles are for: torch chooses its blocks by the length of the call."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, 3332, 32) for heads in (8, 1, 1))

    def plain(length: int) -> torch.Tensor:
        parts = [tensor[:, :, :length] for tensor in (query, key, value)]
        return torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)

    whole = plain(3332)
    assert not all(torch.equal(plain(length), whole[:, :, :length]) for length in (100, 700, 768, 1792))


def test_strides_and_head_dimensions_are_free() -> None:
    query, key, value = sequence(50)
    wide = value.repeat(1, 1, 2)
    strided = [tensor.transpose(0, 1).contiguous().transpose(0, 1) for tensor in (query, key, wide)]
    assert torch.equal(run(*strided), run(query, key, wide))


def test_nothing_but_the_rows_is_written_and_inputs_may_be_views_of_a_pool() -> None:
    query, key, value = sequence(30)
    pool = torch.full((100, 2, 16), NAN)
    pool[40:70] = key
    out = torch.full((32, 4, 16), NAN)
    tile_attention(query, pool[40:70], value, scale=None, out=out[1:31])
    assert out[[0, 31]].isnan().all()
    assert torch.equal(out[1:31], run(query, key, value))


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        (((5, 4, 16), (4, 2, 16), (4, 2, 16), (5, 4, 16)), "at least as many keys"),
        (((5, 4, 16), (5, 3, 16), (5, 3, 16), (5, 4, 16)), "divide 4"),
        (((5, 4, 16), (5, 2, 8), (5, 2, 16), (5, 4, 16)), "expected key"),
        (((5, 4, 16), (5, 2, 16), (5, 2, 16), (4, 4, 16)), "expected out"),
        (((5, 4), (5, 2, 16), (5, 2, 16), (5, 4, 16)), "expected query"),
    ],
)
def test_wrong_shapes_are_refused(shapes: tuple[tuple[int, ...], ...], words: str) -> None:
    query, key, value, out = (torch.zeros(shape) for shape in shapes)
    with pytest.raises(ValueError, match=words):
        tile_attention(query, key, value, scale=None, out=out)


def test_mixed_dtypes_are_refused() -> None:
    query, key, value = sequence(5)
    with pytest.raises(ValueError, match="expected value on cpu"):
        tile_attention(query, key, value.bfloat16(), scale=None, out=torch.empty(5, 4, 16))
