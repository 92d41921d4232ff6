"""Tokens of a workload taken from a conversation file in the ShareGPT format.

The file is a JSON list of `{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}, ...]}`.
A request's question is the first human turn of a conversation and its output target the length of the answer; shared
contexts and the unshared parts of contexts are other conversations laid end to end. Which conversation serves what is
drawn by seed, so the same file, tokenizer and seed give the same requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from tokenizers import Tokenizer

from bench.workloads import Workload
from sgl_hybrid.errors import SettingError

MIN_TURN_TOKENS = 4
_QUESTIONS, _CONTEXT, _OWN = 100, 101, 102  # random streams, apart from those of random tokens


class _Turn(msgspec.Struct):
    speaker: str = msgspec.field(name="from")
    value: str


class _Conversation(msgspec.Struct):
    conversations: list[_Turn] = []


class _Exchange(NamedTuple):
    question: str
    answer: str


class DatasetTokens:
    """A `bench.workloads.TokenSource` over a conversation file."""

    def __init__(self, workload: Workload, seed: int, dataset: Path, tokenizer: Path) -> None:
        """Read the file and choose the questions. Raises: SettingError if either cannot be used."""
        self._workload = workload
        self._seed = seed
        self._tokenizer = _read_tokenizer(tokenizer)
        self._exchanges = _read_exchanges(dataset)
        self._encode = cache(self._encode_text)
        self._chosen = self._choose_questions(dataset)

    def context(self, context_id: int, count: int) -> list[int]:
        return self._text(_CONTEXT, context_id, self._workload.context_tokens)[:count]

    def own(self, index: int, count: int) -> list[int]:
        if count == 0:
            return []
        return self._text(_OWN, index, self._workload.context_tokens)[-count:]

    def question(self, index: int) -> list[int]:
        return self._chosen[index][0]

    def output_tokens(self, index: int) -> int:
        return self._chosen[index][1]

    def _encode_text(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _order(self, stream: int, index: int) -> Iterator[_Exchange]:
        rng = np.random.default_rng(np.random.SeedSequence([self._seed, stream, index]))
        for position in rng.permutation(len(self._exchanges)).tolist():
            yield self._exchanges[position]

    def _choose_questions(self, dataset: Path) -> list[tuple[list[int], int]]:
        """Return (question ids, output target) per request. Very short turns are left out, as SGLang's sampler does."""
        bounds, chosen = self._workload, []
        for exchange in self._order(_QUESTIONS, 0):
            question, answer = self._encode(exchange.question), self._encode(exchange.answer)
            if min(len(question), len(answer)) < MIN_TURN_TOKENS:
                continue
            target = min(len(answer), bounds.output.high_tokens)
            chosen.append((question[: bounds.question.high_tokens], target))
            if len(chosen) == bounds.num_requests:
                return chosen
        raise SettingError(
            f"expected at least {bounds.num_requests} usable conversations in {dataset} "
            f"(both turns of {MIN_TURN_TOKENS} tokens or more), got {len(chosen)}"
        )

    def _text(self, stream: int, index: int, count: int) -> list[int]:
        """Return `count` tokens of conversations in an order of their own, starting over if the file runs out."""
        ids: list[int] = []
        while len(ids) < count:
            for exchange in self._order(stream, index):
                ids += self._encode(exchange.question) + self._encode(exchange.answer)
                if len(ids) >= count:
                    break
        return ids[:count]


def _read_tokenizer(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise SettingError(f"expected a model folder with a tokenizer.json, got {folder}")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the tokenizers library raises bare Exception for a malformed file
        raise SettingError(f"expected a readable tokenizer in {file}, got: {error}") from error


def _read_exchanges(dataset: Path) -> list[_Exchange]:
    try:
        conversations = msgspec.json.decode(dataset.read_bytes(), type=list[_Conversation])
    except OSError as error:
        raise SettingError(f"expected a dataset file, got {dataset}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise SettingError(
            f"expected a JSON list of conversations (ShareGPT format) in {dataset}, got: {error}"
        ) from error
    exchanges = [_first_exchange(conversation.conversations) for conversation in conversations]
    return [exchange for exchange in exchanges if exchange is not None]


def _first_exchange(turns: list[_Turn]) -> _Exchange | None:
    """Return the conversation's first question and answer, or None if it does not begin with a human and a reply."""
    if len(turns) < 2 or turns[0].speaker not in ("human", "user") or turns[1].speaker in ("human", "user"):
        return None
    return _Exchange(turns[0].value, turns[1].value)
