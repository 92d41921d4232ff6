"""How one answer compares with the answers of the reference. Pure.

An answer is the output tokens and the float32 log-probabilities of some tokens. Equal means the same tokens and the
same numbers, bit for bit: SGLang prints every float32 with as many digits as read back as the same value, so equal
numbers in JSON are equal bits. A number that is missing equals nothing.

The reference is a set of repeats of one request without any cache. Where the repeats differ among themselves, an answer
that differs from all of them by no more than they do from each other says nothing about the cache: it is *within* the
reference's own variation, not equal and not different.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from enum import StrEnum

import msgspec


class Verdict(StrEnum):
    """What a comparison, a path or a whole run came to, from good to bad; the order is that of `worst`."""

    EQUAL = "equal"
    WITHIN = "within"
    NOT_EXERCISED = "not exercised"
    DIFFERENT = "different"


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the worst verdict; `NOT_EXERCISED` if there is none at all."""
    order = list(Verdict)
    return max(verdicts, key=order.index, default=Verdict.NOT_EXERCISED)


class Scores(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens and log-probabilities of one answer.

    input_logprobs: of the prompt tokens at absolute positions `first_scored` up to the prompt's end, without gaps.
    output_logprobs: of the output tokens; position `prompt_tokens` is the first of them. None where the server sent no
    number, as it does for NaN.
    """

    prompt_tokens: int
    first_scored: int
    input_logprobs: list[float | None]
    output_ids: list[int]
    output_logprobs: list[float | None]

    def logprobs(self) -> list[float | None]:
        """Return all log-probabilities in the order of their positions, which begin at `first_scored`."""
        return self.input_logprobs + self.output_logprobs


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Where two answers to one request part. Positions are absolute token positions, prompt and output counted alike.

    first_token: the first position with another token, or where only one of the two has one. first_logprob: the first
    with another log-probability. max_logprob_difference: the largest one before `first_token`, where both speak of the
    same token; infinite if a number is missing there. None and 0.0 mean equal.
    """

    first_token: int | None
    first_logprob: int | None
    max_logprob_difference: float

    @property
    def equal(self) -> bool:
        return self.first_token is None and self.first_logprob is None

    @property
    def first_position(self) -> int | None:
        """The first position where anything differs."""
        return min((p for p in (self.first_token, self.first_logprob) if p is not None), default=None)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """A verdict and the comparison with the closest repeat of the reference."""

    verdict: Verdict
    comparison: Comparison


def compare(reference: Scores, candidate: Scores) -> Comparison:
    """Compare two answers to the same request.

    Raises: ValueError if they are no answers to the same request: another prompt length or other scored positions.
    """
    shapes = [(s.prompt_tokens, s.first_scored, len(s.input_logprobs)) for s in (reference, candidate)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            "expected two answers to one request, got (prompt tokens, first scored position, scored prompt tokens) "
            f"{shapes[0]} and {shapes[1]}"
        )
    start = reference.prompt_tokens
    pairs = itertools.zip_longest(reference.output_ids, candidate.output_ids)
    first_token = next((start + index for index, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
    differences = [
        (position, _difference(expected, got))
        for position, (expected, got) in enumerate(
            zip(reference.logprobs(), candidate.logprobs(), strict=False), start=reference.first_scored
        )
        if first_token is None or position < first_token
    ]
    return Comparison(
        first_token=first_token,
        first_logprob=next((position for position, difference in differences if difference != 0), None),
        max_logprob_difference=max((difference for _, difference in differences), default=0.0),
    )


def spread(references: Sequence[Scores]) -> float:
    """Return the largest difference of a log-probability between two repeats, before their tokens part."""
    pairs = itertools.combinations(references, 2)
    return max((compare(one, other).max_logprob_difference for one, other in pairs), default=0.0)


def classify(references: Sequence[Scores], candidate: Scores, *, bound: float = 0.0) -> Outcome:
    """Compare an answer with the repeats of the reference.

    references: at least one. bound: a difference of log-probabilities that counts as within although the repeats did
    not show one, for answers computed in another batch than the reference's. Other tokens than those of every repeat
    are different whatever the bound.
    """
    comparisons = [compare(reference, candidate) for reference in references]
    closest = min(comparisons, key=_distance)
    if closest.equal:
        verdict = Verdict.EQUAL
    elif closest.first_token is None and closest.max_logprob_difference <= max(bound, spread(references)):
        verdict = Verdict.WITHIN
    else:
        verdict = Verdict.DIFFERENT
    return Outcome(verdict=verdict, comparison=closest)


def _difference(expected: float | None, got: float | None) -> float:
    if expected is None or got is None:
        return math.inf
    return 0.0 if expected == got else abs(expected - got)


def _distance(comparison: Comparison) -> tuple[float, float]:
    """Order comparisons from close to far: a later first other token, then a smaller difference."""
    late = math.inf if comparison.first_token is None else comparison.first_token
    return (-late, comparison.max_logprob_difference)
