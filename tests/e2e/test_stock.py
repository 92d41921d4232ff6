"""Against stock SGLang on the same CPU platform: mixed requests that share prefixes, on budgets that force eviction and
retraction."""

from __future__ import annotations

import random
from functools import cache
from typing import Any, NamedTuple

import pytest

from tests.e2e import client

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(3600)]

NUM_REQUESTS = 200
BATCH = 25
BLOCK = 512
TOLERANCE = 2e-5
TIMEOUT_S = 1500.0
"""For all answers together, so that a machine with other work does not fail a test."""


class Mix(NamedTuple):
    """Prompts and the sampling parameters of each."""

    prompts: list[list[int]]
    sampling: list[dict[str, Any]]


@cache
def mixed_requests() -> Mix:
    """Prompts of 40 to 1,540 tokens: some of their own, most on one of six contexts cut anywhere. Every other one ends
    shortly before a block of 512 tokens does, and its answer in the next block, which SGLang does not expect."""
    rng = random.Random(7)
    contexts = [client.random_prompt(1300, seed=700 + index) for index in range(6)]
    mix = Mix([], [])
    for index in range(NUM_REQUESTS):
        shared = rng.choice(contexts)[: rng.randrange(200, 1300)] if rng.random() < 0.8 else []
        num_own, num_new = rng.randrange(40, 120), 6
        if index % 2:
            num_own, num_new = -(len(shared) + 80) % BLOCK + rng.randrange(20, 75), 80
        mix.prompts.append(shared + client.random_prompt(num_own, seed=1000 + index))
        mix.sampling.append(client.surprising(num_new))
    return mix


@pytest.fixture(scope="module")
def expected(servers) -> Any:
    """What stock SGLang answers with a model, without any cache between batches."""

    @cache
    def answers_of(stock: str) -> list[dict]:
        url, mix = servers(stock).url, mixed_requests()
        answers = []
        for start in range(0, NUM_REQUESTS, BATCH):
            client.flush(url)
            batch = slice(start, start + BATCH)
            answers += client.generate(url, mix.prompts[batch], sampling=mix.sampling[batch], timeout_s=TIMEOUT_S)
        return answers

    return answers_of


@pytest.mark.parametrize(
    "name", [f"{model}{org}-tiny" for model in ("", "granite-") for org in ("d0", "s0", "s1", "s2")]
)
def test_answers_equal_stock_sglangs_token_for_token(servers, expected, name: str) -> None:
    theirs_all = expected("granite-stock" if name.startswith("granite") else "stock")
    url, mix = servers(name).url, mixed_requests()
    client.flush(url)
    before = client.memory(url)["requests"]["retracted"]
    answers = client.generate(url, mix.prompts, sampling=mix.sampling, timeout_s=TIMEOUT_S)
    for index, (ours, theirs) in enumerate(zip(answers, theirs_all, strict=True)):
        assert ours["output_ids"] == theirs["output_ids"], f"request {index}"
        differences = zip(client.output_logprobs(ours), client.output_logprobs(theirs), strict=True)
        assert max(abs(a - b) for a, b in differences) <= TOLERANCE, f"request {index}"
    found = client.memory(url)
    assert found["checkpoints"]["freed"] > 0
    assert found["requests"]["retracted"] > before
    # The prompts are shorter than D0's interval, so only the others find a state, and evict some.
    if "d0" not in name:
        assert sum(answer["meta_info"]["cached_tokens"] for answer in answers) > 0
        assert sum(found["evictions"].values()) > 0
    client.assert_nothing_held(url)
