"""What transformers' own forward says about a prompt and a continuation: the yardstick of the served models."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch


class Agreement(NamedTuple):
    """How a served answer compares with the reference.

    tokens_equal: the served tokens are the reference's greedy choices. error: largest absolute difference of
    log-probabilities over input and output tokens, or of its root mean square where `rms` is asked for.
    """

    tokens_equal: bool
    error: float


@lru_cache(maxsize=4)
def load(folder: Path, dtype: str) -> torch.nn.Module:
    """Load a checkpoint with transformers, in the given dtype."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()


def log_probabilities(folder: Path, dtype: str, token_ids: list[int], weights: str | None = None) -> torch.Tensor:
    """Log-probabilities [len(token_ids), vocabulary] float32 of a full forward, without any cache.

    weights: the dtype the weights are rounded to before they are used in `dtype`.
    """
    return _forward(folder, dtype, tuple(token_ids), weights)


@lru_cache(maxsize=256)
def _forward(folder: Path, dtype: str, token_ids: tuple[int, ...], weights: str | None) -> torch.Tensor:
    # Kept: every organization is compared on the same prompts, and gives the same tokens.
    model = load(folder, dtype) if weights is None else _rounded(folder, dtype, weights)
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([token_ids])).logits[0].float(), dim=-1)


@lru_cache(maxsize=1)
def _rounded(folder: Path, dtype: str, weights: str) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, weights)).eval().to(getattr(torch, dtype))


def compare(reference: torch.Tensor, prompt: list[int], answer: dict) -> Agreement:
    """Compare a `/generate` answer that asked for log-probabilities of the whole input."""
    output = answer["output_ids"]
    greedy = reference[len(prompt) - 1 : len(prompt) - 1 + len(output)].argmax(dim=-1).tolist()
    served, expected = scores(reference, prompt, answer)
    return Agreement(greedy == output, float((served - expected).abs().max()))


def scores(reference: torch.Tensor, prompt: list[int], answer: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Served and reference log-probabilities of every token but the first, input then output."""
    tokens = prompt + answer["output_ids"]
    meta = answer["meta_info"]
    served = [entry[0] for entry in meta["input_token_logprobs"][1:]]
    served += [entry[0] for entry in meta["output_token_logprobs"]]
    positions = torch.arange(len(served))
    return torch.tensor(served), reference[positions, torch.tensor(tokens[1 : len(served) + 1])]
