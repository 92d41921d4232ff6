"""Served answers equal transformers' own forward: one at a time, together, in chunks, in float32 and bfloat16."""

from __future__ import annotations

import pytest

from tests.e2e import client, reference
from tests.e2e.conftest import SETUPS

pytestmark = pytest.mark.e2e

LENGTHS = (5, 6, 7, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200, 300, 500, 511, 512, 513, 1000, 1500)
PROMPTS = [client.random_prompt(length, seed=length) for length in LENGTHS]
TOLERANCE = 2e-5
"""Largest difference of a float32 log-probability from the reference's."""


@pytest.mark.parametrize(
    ("name", "together"),
    [(name, True) for name in ("d0", "s0", "s1", "s2", "granite-s2")]
    + [("d0", False)]
    + [
        pytest.param(*slow, marks=pytest.mark.slow)
        for slow in (("s2", False), ("granite-d0", True), ("granite-d0", False))
    ],
)
def test_float32_answers_equal_the_reference(servers, nano_models, name: str, together: bool) -> None:
    server, model = servers(name), SETUPS[name].model
    client.flush(server.url)
    if together:
        answers = client.generate(server.url, PROMPTS, logprob_start_len=0)
    else:
        answers = [client.generate(server.url, prompt, logprob_start_len=0) for prompt in PROMPTS]
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        expected = reference.log_probabilities(nano_models[model], "float32", prompt + answer["output_ids"])
        agreement = reference.compare(expected, prompt, answer)
        assert agreement.tokens_equal, f"{len(prompt)} tokens"
        assert agreement.error <= TOLERANCE, f"{len(prompt)} tokens"


@pytest.mark.parametrize("name", ["d0", "s2"])
def test_chunked_prefill_answers_equal_the_reference(servers, nano_models, name: str) -> None:
    """The server cuts prompts into chunks of 1,024 tokens; a prompt of 3,332 tokens takes four."""
    server = servers(name)
    client.flush(server.url)
    prompt = client.random_prompt(3332, seed=1)
    answer = client.generate(server.url, prompt, logprob_start_len=0)
    expected = reference.log_probabilities(nano_models["falcon-h1-nano"], "float32", prompt + answer["output_ids"])
    agreement = reference.compare(expected, prompt, answer)
    assert agreement.tokens_equal
    assert agreement.error <= TOLERANCE


@pytest.mark.server("s2-bf16")
def test_bfloat16_errors_are_no_larger_than_the_references_own(servers, nano_models) -> None:
    """Both are compared with a float32 forward of the same bfloat16 weights, by squared error over all tokens."""
    server = servers("s2-bf16")
    client.flush(server.url)
    folder = nano_models["falcon-h1-nano"]
    served_error, own_error, count = 0.0, 0.0, 0
    for prompt in PROMPTS:
        answer = client.generate(server.url, prompt, logprob_start_len=0)
        tokens = prompt + answer["output_ids"]
        exact = reference.log_probabilities(folder, "float32", tokens, weights="bfloat16")
        own = reference.log_probabilities(folder, "bfloat16", tokens)
        served, expected = reference.scores(exact, prompt, answer)
        _, rounded = reference.scores(own, prompt, answer)
        served_error += float((served - expected).square().sum())
        own_error += float((rounded - expected).square().sum())
        count += len(served)
    assert count > 5000
    assert served_error <= own_error
