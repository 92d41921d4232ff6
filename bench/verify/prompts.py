"""The prompts of a verification: seeded random tokens around the boundaries of a grid, or the user's own file. Pure but
for reading that file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from sgl_hybrid.errors import SettingError

FIRST_TOKEN_ID = 8
"""Random ids begin here: the lower ones are special tokens in many vocabularies."""


class _Line(msgspec.Struct):
    prompt_ids: list[int]


def random_tokens(count: int, seed: Sequence[int], vocab_tokens: int) -> list[int]:
    """Return `count` random token ids of 8 up to `vocab_tokens` - 1; equal seeds give equal tokens."""
    drawn: list[int] = np.random.default_rng(list(seed)).integers(FIRST_TOKEN_ID, vocab_tokens, count).tolist()
    return drawn


def generate_prompts(
    count: int, *, grid_tokens: int, num_boundaries: int, seed: int, vocab_tokens: int
) -> list[list[int]]:
    """Return `count` prompts whose usable boundaries number `num_boundaries` or one more.

    Their ends lie a few tokens, one token and no token behind a boundary, and one before the next: the places where a
    published depth could be off by one. The last token of a prompt is always computed, so one that ends on a boundary
    cannot use it.
    """
    ends = (37, 1, grid_tokens, grid_tokens - 1, grid_tokens // 2)
    return [
        random_tokens(num_boundaries * grid_tokens + ends[index % len(ends)], (seed, 0, index), vocab_tokens)
        for index in range(count)
    ]


def shared_prompts(count: int, *, context_tokens: int, seed: int, vocab_tokens: int) -> list[list[int]]:
    """Return `count` prompts, four on each shared context, each with 8 to 71 tokens of its own behind it."""
    prompts = []
    for index in range(count):
        context = random_tokens(context_tokens, (seed, 1, index // 4), vocab_tokens)
        own = 8 + (23 * index) % 64
        prompts.append(context + random_tokens(own, (seed, 2, index), vocab_tokens))
    return prompts


def boundaries(prompt_tokens: int, grid_tokens: int) -> list[int]:
    """Return the boundaries that a prompt can continue from: at least one token behind each is left to compute."""
    return list(range(grid_tokens, prompt_tokens, grid_tokens))


def read_prompts(path: Path) -> list[list[int]]:
    """Read prompts from JSON lines with a field `prompt_ids`, such as the `workload.jsonl` of a load run.

    Raises: SettingError if the file cannot be read, holds another shape or an empty prompt.
    """
    try:
        lines = [line for line in path.read_bytes().split(b"\n") if line.strip()]
        prompts = [msgspec.json.decode(line, type=_Line).prompt_ids for line in lines]
    except OSError as error:
        raise SettingError(f"expected a file of prompts, got {path}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise SettingError(
            f'expected JSON lines such as {{"prompt_ids": [17, 4, 250]}} in {path}, got: {error}'
        ) from error
    if not prompts or not all(prompts):
        raise SettingError(f"expected at least one prompt and none empty in {path}, got {len(prompts)} prompts")
    return prompts
