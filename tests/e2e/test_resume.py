"""A request that was taken back and resumed has the bits of one that was not, and its client sees no difference."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from tests.e2e import client

pytestmark = pytest.mark.e2e

NEW_TOKENS = 40


def stream(url: str, prompt: list[int], **sampling: Any) -> Iterator[dict[str, Any]]:
    """The chunks of one streamed answer, each with the output so far; one for each token."""
    body = {
        "input_ids": prompt,
        "sampling_params": {"max_new_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True, **sampling},
        "return_logprob": True,
        "stream": True,
    }
    with requests.post(f"{url}/generate", json=body, stream=True, timeout=client.TIMEOUT_S) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith(b"data: ") and line != b"data: [DONE]":
                yield json.loads(line.removeprefix(b"data: "))


def interrupted(url: str, prompt: list[int], after: int, *, times: int = 1, **sampling: Any) -> list[dict[str, Any]]:
    """The chunks of an answer whose request is taken back when it has sent so many tokens, and again when it decodes
    once more."""
    chunks, left = [], times
    for chunk in stream(url, prompt, **sampling):
        chunks.append(chunk)
        if left and chunk["meta_info"]["completion_tokens"] >= after:
            client.take_back(url)
            for _ in range(left - 1):
                await_decode_step(url)
                client.take_back(url)
            left = 0
    return chunks


def await_decode_step(url: str) -> None:
    """Wait for the next decode step: a request that waits or prefills is not running, so it cannot be taken back."""
    before, deadline = client.memory(url)["work"]["normal_decode"], time.monotonic() + client.TIMEOUT_S
    while client.memory(url)["work"]["normal_decode"] == before:
        assert time.monotonic() < deadline


ALWAYS = {("d0", 2000), ("s2", 700)}
"""What `make test` runs: a prompt behind a boundary, in pools of both kinds."""


@pytest.mark.parametrize(
    ("name", "length"),
    [
        pytest.param(name, length, marks=[pytest.mark.slow] * ((name, length) not in ALWAYS))
        for name in ("d0", "s0", "s2", "granite-s2", "s2-bf16")
        for length in (700, 2000)
    ],
)
def test_a_resumed_request_has_the_bits_of_one_that_ran_through(servers, name: str, length: int) -> None:
    """Taken back twice, the second time early enough to meet it while it decodes its own outputs again."""
    url, prompt = servers(name).url, client.random_prompt(length, seed=length)
    client.flush(url)
    undisturbed = list(stream(url, prompt))
    client.flush(url)
    chunks = interrupted(url, prompt, after=16, times=2)
    assert [chunk["meta_info"]["num_retractions"] for chunk in (undisturbed[-1], chunks[-1])] == [0, 2]
    assert chunks[-1]["output_ids"] == undisturbed[-1]["output_ids"]
    assert client.output_logprobs(chunks[-1]) == client.output_logprobs(undisturbed[-1])
    sent = [chunk["meta_info"]["completion_tokens"] for chunk in chunks]
    assert sent == sorted(sent)
    assert sent[-1] == NEW_TOKENS
    assert all(chunks[-1]["text"].startswith(chunk["text"]) for chunk in chunks)


@pytest.mark.server("s2")
def test_sampled_tokens_stay_when_they_are_decoded_again(servers) -> None:
    """Tokens drawn at random would be others the second time."""
    url = servers("s2").url
    chunks = interrupted(url, client.random_prompt(300, seed=5), after=20, temperature=1.0)
    last = chunks[-1]
    assert last["meta_info"]["num_retractions"] == 1
    assert len(last["output_ids"]) == NEW_TOKENS
    for chunk in chunks:
        sent = len(chunk["output_ids"])
        assert chunk["output_ids"] == last["output_ids"][:sent]
        assert client.output_logprobs(chunk) == client.output_logprobs(last)[:sent]
