"""Exact continuation: what else must not depend on how a prompt was cut, beside the scans of `triton_ops`.

A request that continues from a cached checkpoint computes fewer tokens at once than one that computes the prefix
itself, and so do the chunks of a long prompt; a request that decodes has now more, now less company. This platform's
attention does not depend on that (`attention_cpu`). Three other things do, with SGLang's operators:

- Matrix products of few rows: torch has other kernels for them. Here they are padded with zero rows; from `rows_enough`
  on a row's result does not depend on the others (`tests/unit/test_matrix_rows.py`).
- The scans: a pass that ends inside a chunk of theirs, or between two boundaries with a state that is stored in fewer
  bits than it is computed in, hands on another state. Here prompts are cut where it does not (`cut_alignment`).
- States that decode steps wrote: one token at a time is another order of sums than a chunk. Here decoding reaches no
  boundary, so that every cached state and all cached attention is what a prefill of the same tokens computes.

With `--no-exact-continuation` all of it is SGLang's own. So it is on a GPU, unless SGLang's deterministic mode has
products whose rows do not depend on each other and attention in tiles of its own (`platforms.continuation_is_exact`).

Source: SGLang 0.5.23, `sglang/srt/layers/quantization/unquant.py`, `layers/logits_processor.py`,
`runtime_context.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sgl_hybrid.errors import SettingError
from sgl_hybrid.seams import process
from sgl_hybrid.seams.hooks import Seam
from triton_ops.chunk_grid import cut_tokens
from triton_ops.ssm_scan.api import CHUNK_TOKENS

MIN_ROWS, MIN_ROWS_OF_ONE_THREAD = 32, 8
"""Rows of the smallest matrix product, with several threads and with one. Measured: with one thread 4 suffice, with two
10; 32 is safe for seven."""

NO_BOUNDARY = 1 << 40
"""Tokens between two boundaries of decoding under exact continuation: more than any sequence has."""


def is_exact() -> bool:
    """Whether this process serves with exact continuation."""
    return process.served().plan.settings.exact_continuation


def cut_alignment() -> int:
    """Tokens behind a boundary at whose multiples a prompt may be cut: 1 without exact continuation."""
    if not is_exact():
        return 1
    memory = process.served().memory
    state_is_exact = memory.pool.ssm_dtype == torch.float32
    return cut_tokens(CHUNK_TOKENS, memory.layout.checkpoint_interval, state_is_exact=state_is_exact)


def check_chunked_prefill_size(num_tokens: int | None) -> None:
    """Refuse a size of prefill chunks (None or -1: prompts are not cut) in which there is no place to cut.

    Raises:
        SettingError: with the smallest size.
    """
    least = cut_alignment()
    if num_tokens is not None and 0 < num_tokens < least:
        raise SettingError(
            f"--chunked-prefill-size: expected at least {least} tokens under exact continuation with this state dtype, "
            f"got {num_tokens}; nearest: {least}, or --no-exact-continuation"
        )


def rows_enough() -> int:
    """Rows from which on the rows of a product do not depend on each other, with the threads that compute now."""
    return MIN_ROWS if torch.get_num_threads() > 1 else MIN_ROWS_OF_ONE_THREAD


def with_rows_enough(x: torch.Tensor) -> torch.Tensor:
    """x [rows, inputs] with zero rows behind it up to `rows_enough`, under exact continuation on a CPU."""
    rows = x.shape[0]
    if x.dim() != 2 or not 0 < rows < MIN_ROWS or not x.is_cpu or not is_exact():
        return x
    missing = rows_enough() - rows
    return x if missing <= 0 else torch.cat((x, x.new_zeros(missing, x.shape[1])))


def pad_rows(original: Callable[..., torch.Tensor], self: Any, layer: Any, x: torch.Tensor, bias: Any = None) -> Any:
    """Around `UnquantizedLinearMethod.apply`: rows enough. x: [rows, inputs]."""
    padded = with_rows_enough(x)
    found = original(self, layer, padded, bias)
    return found if padded is x else found[: x.shape[0]]


def pad_logits(
    original: Callable[..., torch.Tensor],
    self: Any,
    hidden_states: torch.Tensor,
    lm_head: Any,
    embedding_bias: Any = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Around `LogitsProcessor._compute_lm_head`: rows enough for the last tokens of the requests.

    hidden_states: [requests, hidden_size]. Returns [requests, vocabulary].
    """
    padded = with_rows_enough(hidden_states)
    if padded is hidden_states:
        return original(self, hidden_states, lm_head, embedding_bias, out=out)
    found = original(self, padded, lm_head, embedding_bias)[: hidden_states.shape[0]]
    return found if out is None else out.copy_(found)


def decode_grid(original: Callable[[int], int], tree_page: int) -> int:
    """Around `runtime_context.mamba_track_grid`: tokens between the boundaries at which decoding keeps a state."""
    return NO_BOUNDARY if is_exact() else original(tree_page)


SEAMS: tuple[Seam, ...] = (
    Seam(
        "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply",
        "around",
        pad_rows,
        ("layer", "x", "bias"),
        "matrix products have rows enough",
    ),
    Seam(
        "sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head",
        "around",
        pad_logits,
        ("hidden_states", "lm_head", "embedding_bias", "out"),
        "logits of requests do not depend on how many there are",
    ),
    Seam(
        "sglang.srt.runtime_context.mamba_track_grid",
        "around",
        decode_grid,
        ("tree_page",),
        "states that decoding wrote are not cached",
    ),
)
