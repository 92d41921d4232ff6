"""A shared prefix is reused at the checkpoint grid, changes no output, and stays inside its salt."""

from __future__ import annotations

import pytest
import requests

from tests.e2e import client

pytestmark = pytest.mark.e2e

GRID = 1792
TOLERANCE = 2e-5


@pytest.fixture
def url(servers) -> str:
    server = servers("falcon-h1-nano")
    client.flush(server.url)
    return server.url


def test_a_second_visit_reuses_the_deepest_boundary_and_changes_nothing(url: str) -> None:
    shared, first, second = (client.random_prompt(length, seed) for length, seed in ((2000, 1), (300, 2), (500, 3)))
    cold_first = client.generate(url, shared + first)
    warm = client.generate(url, shared + second)
    assert cold_first["meta_info"]["cached_tokens"] == 0
    assert warm["meta_info"]["cached_tokens"] == GRID
    client.flush(url)
    cold = client.generate(url, shared + second)
    assert cold["meta_info"]["cached_tokens"] == 0
    assert cold["output_ids"] == warm["output_ids"]
    differences = zip(client.output_logprobs(cold), client.output_logprobs(warm), strict=True)
    assert max(abs(a - b) for a, b in differences) <= TOLERANCE


@pytest.mark.parametrize("length", [GRID - 1, GRID, GRID + 1, 2 * GRID, 2 * GRID + 1])
def test_a_repeat_hits_the_deepest_boundary_before_its_last_token(url: str, length: int) -> None:
    """Faults B9, B22: the published depth is the number of consumed tokens; the last token is always computed."""
    prompt = client.random_prompt(length, seed=length)
    cold = client.generate(url, prompt)
    warm = client.generate(url, prompt)
    assert warm["meta_info"]["cached_tokens"] == (length - 1) // GRID * GRID
    assert warm["output_ids"] == cold["output_ids"]
    assert client.output_logprobs(warm) == pytest.approx(client.output_logprobs(cold), abs=TOLERANCE)


def test_a_state_is_published_at_the_boundary_whatever_the_chunks(url: str) -> None:
    """Fault B15: chunks of 1,024 tokens end at 1,024, 2,048, 3,072, ... and the grid is 1,792: the deepest boundary of
    five chunks must still hit."""
    prompt = client.random_prompt(4600, seed=7)
    client.generate(url, prompt)
    assert client.generate(url, prompt)["meta_info"]["cached_tokens"] == 2 * GRID


def test_a_state_is_published_when_decoding_crosses_the_boundary(url: str) -> None:
    prompt = client.random_prompt(GRID - 20, seed=11)
    answer = client.generate(url, prompt, max_new_tokens=60)
    longer = prompt + answer["output_ids"] + client.random_prompt(40, seed=12)
    warm = client.generate(url, longer)
    assert warm["meta_info"]["cached_tokens"] == GRID
    client.flush(url)
    cold = client.generate(url, longer)
    assert cold["output_ids"] == warm["output_ids"]
    assert client.output_logprobs(warm) == pytest.approx(client.output_logprobs(cold), abs=TOLERANCE)


def test_several_prefills_in_one_batch_publish_their_own_states(url: str) -> None:
    """Fault B8: rows after the first must not publish a state of another position."""
    prompts = [client.random_prompt(length, seed=length) for length in (1900, 2300, 2100)]
    cold = client.generate(url, prompts)
    warm = [client.generate(url, prompt) for prompt in prompts]
    assert [answer["meta_info"]["cached_tokens"] for answer in warm] == [GRID] * 3
    for before, after in zip(cold, warm, strict=True):
        assert after["output_ids"] == before["output_ids"]
        assert client.output_logprobs(after) == pytest.approx(client.output_logprobs(before), abs=TOLERANCE)


def test_another_salt_never_hits(url: str) -> None:
    """Fault B52: both halves, a hit inside one salt and none across."""
    prompt = client.random_prompt(2000, seed=5)
    hits = []
    for salt in (None, None, "a", "a", "b", None):
        options = {} if salt is None else {"cache_salt": salt}
        hits.append(client.generate(url, prompt, **options)["meta_info"]["cached_tokens"])
    assert hits == [0, GRID, 0, GRID, 0, GRID]


def test_the_openai_endpoint_takes_a_salt_too(url: str) -> None:
    prompt = client.random_prompt(2000, seed=6)
    hits = []
    for salt in ("a", "a", "b"):
        body = {"model": "nano", "prompt": prompt, "max_tokens": 4, "temperature": 0, "cache_salt": salt}
        answer = requests.post(f"{url}/v1/completions", json=body, timeout=client.TIMEOUT_S).json()
        details = answer["usage"]["prompt_tokens_details"] or {"cached_tokens": 0}
        hits.append(details["cached_tokens"])
    assert hits == [0, GRID, 0]
