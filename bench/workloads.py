"""Workloads: what is asked of the server, as seeded data that is the same for every arm.

A request's prompt is one of N contexts followed by a question of its own. The first fraction q of a context is common
to every request on it; the rest of the context is drawn anew for each request, so q changes what can be shared and
nothing else: prompt lengths, contexts and output targets of a seed are the same at every q. Every kind of draw has its
own random stream, and the streams of request i do not depend on how many requests follow it.
Source: paper section 4.2 (eight contexts, about 3,332 input tokens, limit 8,192, outputs capped at 1,024).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Protocol

import msgspec
import numpy as np

from bench.arrivals import ArrivalProcess
from bench.records import PlannedRequest
from bench.registry import registered
from sgl_hybrid.errors import SettingError

_CONTEXT, _ROUTE, _QUESTION_LENGTH, _OUTPUT, _OWN = range(5)  # random streams of one seed


class Lengths(msgspec.Struct, frozen=True):
    """A clipped log-normal spread of token counts."""

    median_tokens: float
    sigma: float
    low_tokens: int
    high_tokens: int

    def draw(self, rng: np.random.Generator) -> int:
        """Return one length in [low_tokens, high_tokens]."""
        length = round(self.median_tokens * float(np.exp(self.sigma * rng.standard_normal())))
        return min(max(length, self.low_tokens), self.high_tokens)

    def scaled(self, factor: float) -> Lengths:
        """Return the same spread at `factor` times the size, never below one token."""
        low, high = (max(1, round(bound * factor)) for bound in (self.low_tokens, self.high_tokens))
        return Lengths(self.median_tokens * factor, self.sigma, low, high)


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """A registered workload. `shared_fraction` is q; `limit_tokens` bounds prompt plus output of a request."""

    num_requests: int = 300
    num_contexts: int = 8
    context_tokens: int = 3120
    question: Lengths = Lengths(median_tokens=75, sigma=1.5, low_tokens=4, high_tokens=2048)
    output: Lengths = Lengths(median_tokens=148, sigma=1.1, low_tokens=4, high_tokens=1024)
    shared_fraction: float = 1.0
    limit_tokens: int = 8192
    vocab_tokens: int = 512
    first_token_id: int = 4  # below it sit the special tokens of the nano models

    def __post_init__(self) -> None:
        if self.num_requests < 1:
            raise SettingError(f"expected at least 1 request, got {self.num_requests}")
        if self.num_contexts < 1:
            raise SettingError(f"expected at least 1 shared context, got {self.num_contexts}")
        if not 0 <= self.shared_fraction <= 1:
            raise SettingError(f"expected a common-prefix fraction q of 0 to 1, got {self.shared_fraction}")
        if self.vocab_tokens <= self.first_token_id:
            raise SettingError(f"expected a vocabulary above {self.first_token_id} tokens, got {self.vocab_tokens}")
        longest = self.context_tokens + self.question.low_tokens + self.output.low_tokens
        if longest > self.limit_tokens:
            raise SettingError(f"expected a limit of at least {longest} tokens, got {self.limit_tokens} tokens")

    @property
    def common_tokens(self) -> int:
        """Return how many leading tokens the requests of one context share."""
        return round(self.shared_fraction * self.context_tokens)

    def scaled(self, factor: float) -> Workload:
        """Return the workload with every length at `factor` times its size. Raises: SettingError."""
        if not 0 < factor <= 1:
            raise SettingError(f"expected a scale above 0 and up to 1, got {factor}")
        return msgspec.structs.replace(
            self,
            context_tokens=max(1, round(self.context_tokens * factor)),
            question=self.question.scaled(factor),
            output=self.output.scaled(factor),
            limit_tokens=max(3, round(self.limit_tokens * factor)),
        )


WORKLOADS: dict[str, Workload] = {
    "paper": Workload(),
    "probe": Workload(num_requests=40),
    "smoke": Workload(num_requests=12, num_contexts=3).scaled(0.25),
}
"""`paper` is the main experiment's, `probe` its short probe of 40 requests, `smoke` a seconds-long check."""


def make_workload(name: str, *, scale: float = 1.0, **changes: float | None) -> Workload:
    """Return the registered workload `name`, scaled, with the fields in `changes` replaced where not None.

    Raises: SettingError for an unknown name or a value out of range.
    """
    workload = registered(WORKLOADS, name, "a workload")
    given = {field: value for field, value in changes.items() if value is not None}
    return msgspec.structs.replace(workload.scaled(scale), **given)


class TokenSource(Protocol):
    """Where the tokens of a workload come from."""

    def context(self, context_id: int, count: int) -> list[int]:
        """Return the first `count` tokens of a shared context."""
        ...

    def own(self, index: int, count: int) -> list[int]:
        """Return `count` tokens that belong to request `index` alone: its part of the context."""
        ...

    def question(self, index: int) -> list[int]:
        """Return the question of request `index`."""
        ...

    def output_tokens(self, index: int) -> int:
        """Return how many tokens request `index` is to generate."""
        ...


class SyntheticTokens:
    """Uniform random token ids with the workload's length spreads."""

    def __init__(self, workload: Workload, seed: int) -> None:
        self._workload = workload
        self._seed = seed

    def _rng(self, stream: int, index: int) -> np.random.Generator:
        return stream_rng(self._seed, stream, index)

    def _ids(self, rng: np.random.Generator, count: int) -> list[int]:
        drawn: list[int] = rng.integers(self._workload.first_token_id, self._workload.vocab_tokens, count).tolist()
        return drawn

    def context(self, context_id: int, count: int) -> list[int]:
        return self._ids(self._rng(_CONTEXT, context_id), self._workload.context_tokens)[:count]

    def own(self, index: int, count: int) -> list[int]:
        return self._ids(self._rng(_OWN, index), self._workload.context_tokens)[self._workload.context_tokens - count :]

    def question(self, index: int) -> list[int]:
        rng = self._rng(_QUESTION_LENGTH, index)
        return self._ids(rng, self._workload.question.draw(rng))

    def output_tokens(self, index: int) -> int:
        return self._workload.output.draw(self._rng(_OUTPUT, index))


def stream_rng(seed: int, stream: int, index: int) -> np.random.Generator:
    """Return the generator of one stream of one request or context; independent of every other."""
    return np.random.default_rng(np.random.SeedSequence([seed, stream, index]))


def plan(
    workload: Workload,
    arrivals: ArrivalProcess,
    *,
    seed: int,
    isolate: bool = False,
    tokens: TokenSource | None = None,
) -> list[PlannedRequest]:
    """Return the requests of a run in order of arrival.

    `isolate` gives each request a cache salt of its own, stable across arms, so nothing is shared between requests.
    A question too long for the limit loses its end; an output target is cut to what the limit leaves, at least one.
    Raises: SettingError for a negative seed.
    """
    if seed < 0:
        raise SettingError(f"expected a seed of at least 0, got {seed}")
    source = tokens or SyntheticTokens(workload, seed)
    offsets = arrivals.offsets_ns(workload.num_requests, seed)
    return list(_requests(workload, source, offsets, seed, isolate))


def _requests(
    workload: Workload, source: TokenSource, offsets: Iterable[int], seed: int, isolate: bool
) -> Iterator[PlannedRequest]:
    common = workload.common_tokens
    contexts = [source.context(context_id, common) for context_id in range(workload.num_contexts)]
    for index, planned_ns in enumerate(offsets):
        context_id = int(stream_rng(seed, _ROUTE, index).integers(workload.num_contexts))
        context = contexts[context_id] + source.own(index, workload.context_tokens - common)
        prompt = (context + source.question(index))[: workload.limit_tokens - 1]
        yield PlannedRequest(
            index=index,
            context_id=context_id,
            common_tokens=common,
            planned_ns=planned_ns,
            output_tokens=min(source.output_tokens(index), workload.limit_tokens - len(prompt)),
            salt=f"seed{seed}-request{index}" if isolate else None,
            prompt_ids=prompt,
        )


def digest(requests: Iterable[PlannedRequest]) -> str:
    """Return the SHA-256 of the requests as they are recorded: equal digests mean equal work and equal plans."""
    hasher, encoder = hashlib.sha256(), msgspec.json.Encoder()
    for request in requests:
        hasher.update(encoder.encode(request) + b"\n")
    return hasher.hexdigest()
