"""The CPU platform's attention reads what the rows name and equals the definition, request by request."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sgl_hybrid.seams import attention_cpu
from triton_ops.tile_attention.reference import attend

LENGTHS = (1, 5, 130, 301)
"""Tokens of the requests of a batch."""


class Batch:
    """Requests whose keys and values lie in rows of no order; the caches' other rows are NaN."""

    def __init__(
        self, heads: int, key_heads: int, dtype: torch.dtype = torch.float32, *, strided: bool = False
    ) -> None:
        generator = torch.Generator().manual_seed(heads)
        width = 24 if strided else 16
        self.key, self.value = (torch.full((1000, key_heads, width), float("nan"), dtype=dtype)[..., :16] for _ in "kv")
        self.req_to_token = torch.zeros(8, 400, dtype=torch.int32)
        self.slots = torch.tensor([6, 0, 3, 5])
        self.lengths = torch.tensor(LENGTHS)
        order = torch.randperm(1000, generator=generator)
        first = 0
        for slot, length in zip(self.slots, LENGTHS, strict=True):
            rows = order[first : first + length]
            self.req_to_token[slot, :length] = rows
            for cache in (self.key, self.value):
                cache[rows] = torch.randn(length, key_heads, 16, generator=generator).to(dtype)
            first += length
        self.queries = [torch.randn(length, heads, 16, generator=generator).to(dtype) for length in LENGTHS]

    def expected(self, index: int, tokens: int) -> np.ndarray:
        """The attention of the last tokens of a request."""
        rows = self.req_to_token[self.slots[index], : LENGTHS[index]]
        query, key, value = self.queries[index][-tokens:], self.key[rows], self.value[rows]
        return attend(*(tensor.float().numpy() for tensor in (query, key, value)), scale=0.2)


@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (6, 2), (8, 1)])
@pytest.mark.parametrize("strided", [False, True])
def test_a_decode_step_equals_the_definition(heads: int, key_heads: int, strided: bool) -> None:
    batch = Batch(heads, key_heads, strided=strided)
    query = torch.stack([queries[-1] for queries in batch.queries])
    output = torch.empty_like(query)
    caches = batch.key, batch.value
    attention_cpu.run_decode(
        None, query, output, *caches, batch.req_to_token, batch.slots, batch.lengths, scaling=0.2, enable_gqa=True
    )
    for index in range(len(LENGTHS)):
        np.testing.assert_allclose(output[index : index + 1].numpy(), batch.expected(index, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decode_step_of_a_request_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    batch = Batch(8, 1, dtype)
    query = torch.stack([queries[-1] for queries in batch.queries])
    together, alone = torch.empty_like(query), torch.empty_like(query)
    arguments = batch.key, batch.value, batch.req_to_token
    attention_cpu.run_decode(None, query, together, *arguments, batch.slots, batch.lengths, scaling=0.2)
    for index in range(len(LENGTHS)):
        one = slice(index, index + 1)
        attention_cpu.run_decode(
            None, query[one], alone[one], *arguments, batch.slots[one], batch.lengths[one], scaling=0.2
        )
    assert torch.equal(together, alone)


@pytest.mark.parametrize("prefix", [0, 4])
def test_a_prefill_equals_the_definition(prefix: int) -> None:
    batch = Batch(6, 2)
    new = [max(1, length - prefix) for length in LENGTHS]
    query = torch.cat([queries[-tokens:] for queries, tokens in zip(batch.queries, new, strict=True)])
    output = torch.empty_like(query)
    attention_cpu.run_extend(
        None,
        query,
        output,
        batch.key,
        batch.value,
        batch.req_to_token,
        batch.slots,
        batch.lengths,
        batch.lengths - torch.tensor(new),
        torch.tensor(new),
        scaling=0.2,
        causal=True,
    )
    for index, part in enumerate(output.split(new)):
        np.testing.assert_allclose(part.numpy(), batch.expected(index, new[index]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("other", [{"encoder_lens": torch.tensor([1])}, {"sliding_window_size": 4}])
def test_other_kinds_of_attention_are_refused(other: dict[str, object]) -> None:
    nothing = torch.empty(0, 1, 16)
    none = torch.empty(0, dtype=torch.int64)
    arguments = nothing, nothing, nothing, nothing, none, none, none
    with pytest.raises(NotImplementedError, match="causal self-attention without a window"):
        attention_cpu.run_decode(None, *arguments, **other)
    with pytest.raises(NotImplementedError, match="causal self-attention without a window"):
        attention_cpu.run_extend(None, *arguments, none, none, causal=True, **other)
    with pytest.raises(NotImplementedError, match="causal self-attention without a window"):
        attention_cpu.run_extend(None, *arguments, none, none, causal=False)
