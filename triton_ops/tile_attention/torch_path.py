"""Prefill attention in tiles, on torch's scaled dot product.

Letters: T queries, H query heads, K key heads, D and E head dimensions.
"""

from __future__ import annotations

import torch
from torch import Tensor


def attend_tiles(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, tile_tokens: int, out: Tensor
) -> None:
    """Write `out` [T, H, E], as `api.tile_attention`.

    Queries, keys and values that a tile has no token for are zeros; the mask keeps the keys among them out of sums.
    Allocates keys and values up to the end of the last tile, and one tile.
    """
    T, H, D = query.shape
    end = key.shape[0]
    start = end - T
    padded = -(-end // tile_tokens) * tile_tokens
    keys, values = _pad(key, padded), _pad(value, padded)
    mask = query.new_zeros(tile_tokens, padded)
    mask[:, padded - tile_tokens :] = query.new_full((tile_tokens, tile_tokens), float("-inf")).triu_(1)
    tile = query.new_zeros(1, H, tile_tokens, D)
    for position in range(start // tile_tokens * tile_tokens, padded, tile_tokens):
        first, last = max(start, position), min(end, position + tile_tokens)
        rows, inside = slice(first - start, last - start), slice(first - position, last - position)
        tile.zero_()
        tile[0, :, inside] = query[rows].transpose(0, 1)
        seen = position + tile_tokens
        attended = torch.nn.functional.scaled_dot_product_attention(
            tile,
            keys[:, :, :seen],
            values[:, :, :seen],
            attn_mask=mask[:, padded - seen :],
            scale=scale,
            enable_gqa=True,
        )
        out[rows] = attended[0, :, inside].transpose(0, 1)


def _pad(tokens: Tensor, length: int) -> Tensor:
    """[tokens, K, D] as [1, K, length, D], zeros at the end."""
    padded = tokens.new_zeros(1, tokens.shape[1], length, tokens.shape[2])
    padded[0, :, : tokens.shape[0]] = tokens.transpose(0, 1)
    return padded
