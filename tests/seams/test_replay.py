"""A retracted request decodes its outputs again: SGLang's request, a sampled step and the stream, without a model."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.sampling.sampling_params import SamplingParams

from sgl_hybrid.seams import replay

PROMPT = [5, 6, 7, 8]
OUTPUT = [11, 12, 13]


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "is_exact", lambda: True)


def retracted(rid: str = "r") -> Req:
    """A request with three outputs that was taken back."""
    sampling = SamplingParams(max_new_tokens=8)
    req = Req(rid, "", array("q", PROMPT), sampling, return_logprob=True, vocab_size=100)
    req.output_ids = array("q", OUTPUT)
    req.logprob.output_token_logprobs_val = [-0.1, -0.2, -0.3]
    req.logprob.output_token_logprobs_idx = list(OUTPUT)
    req.is_retracted = True
    return req


def decode(req: Req, token: int, logprob: float) -> None:
    """One step's result."""
    req.output_ids.append(token)
    req.logprob.output_token_logprobs_val.append(logprob)
    req.logprob.output_token_logprobs_idx.append(token)


def sampled(rows: list[tuple[str, int]]) -> list[int]:
    """Tokens of a step over rows of (request, tokens with the one computed), of a sampler that always says 99."""
    batch = SimpleNamespace(rids=[rid for rid, _ in rows], seq_lens=torch.tensor([length for _, length in rows]))
    tokens: Any = replay.sample_known(lambda *_: torch.full((len(rows),), 99), None, None, batch)
    return tokens.tolist()


def sends(req: Req) -> bool:
    """Whether a step's output of `req` reaches the stream, beside that of another request."""
    other: Req = retracted("other")
    sent: list[Req] = []
    replay.withhold(lambda _, reqs, *rest: sent.extend(reqs), None, [other, req], True)
    assert sent[0] is other
    return sent[1:] == [req]


def test_its_prefill_ends_with_the_prompt() -> None:
    req = retracted()
    replay.begin(req)
    req.init_next_round_input()
    assert list(req.full_untruncated_fill_ids) == PROMPT
    assert list(req.output_ids) == req.logprob.output_token_logprobs_val == []


def test_known_tokens_replace_sampled_ones_at_their_positions_only() -> None:
    req = retracted()
    replay.begin(req)
    assert sampled([("other", 4), ("r", 4)]) == [99, 11]
    assert sampled([("r", 6), ("other", 6)]) == [13, 99]
    assert sampled([("r", 7)]) == [99]  # the first that is new
    assert sampled([("r", 2)]) == [99]  # a chunk that ends inside the prompt


def test_nothing_is_sent_until_the_outputs_are_back_with_their_own_numbers() -> None:
    req = retracted()
    replay.begin(req)
    for token in OUTPUT[:2]:
        decode(req, token, -9.0)
        assert not sends(req)
    decode(req, OUTPUT[2], -9.0)
    assert sends(req)
    decode(req, 50, -0.4)
    assert sends(req)
    assert list(req.output_ids) == [*OUTPUT, 50]
    assert req.logprob.output_token_logprobs_val == [-0.1, -0.2, -0.3, -0.4]
    assert sampled([("r", 4)]) == [99]  # nothing of it is known any more


def test_taken_back_while_it_replays_it_still_knows_all_of_them() -> None:
    req = retracted()
    replay.begin(req)
    decode(req, OUTPUT[0], -9.0)
    req.is_retracted = True
    replay.begin(req)
    assert list(req.output_ids) == []
    assert [sampled([("r", length)]) for length in (4, 5, 6)] == [[token] for token in OUTPUT]


def test_aborted_while_it_replays_it_answers_what_it_had() -> None:
    req = retracted()
    replay.begin(req)
    decode(req, OUTPUT[0], -9.0)
    req.finished_reason = FINISH_ABORT()
    assert sends(req)
    assert list(req.output_ids) == OUTPUT
    assert req.logprob.output_token_logprobs_val == [-0.1, -0.2, -0.3]


def test_a_request_that_is_dropped_is_forgotten() -> None:
    req = retracted("gone")
    replay.begin(req)
    assert sampled([("gone", 4)]) == [11]
    del req
    assert sampled([("gone", 4)]) == [99]


@pytest.mark.parametrize("case", ["inexact", "grammar", "running", "no output"])
def test_other_requests_keep_their_outputs(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    req = retracted("kept")
    if case == "inexact":
        monkeypatch.setattr(replay, "is_exact", lambda: False)
    elif case == "grammar":
        req.grammar = object()
    elif case == "running":
        req.is_retracted = False
    else:
        req.output_ids = array("q")
    before = list(req.output_ids)
    replay.begin(req)
    assert list(req.output_ids) == before
    assert sampled([("kept", 4)]) == [99]
    assert sends(req)
