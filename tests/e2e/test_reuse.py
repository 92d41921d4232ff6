"""A shared prefix is reused at the checkpoint grid, changes no output, and stays inside its salt."""

from __future__ import annotations

import pytest
import requests

from tests.e2e import client
from tests.e2e.conftest import GRIDS

pytestmark = pytest.mark.e2e

TOLERANCE = 2e-5


@pytest.fixture(params=["d0", "s2"])
def organization(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def grid(organization: str) -> int:
    """Tokens between two boundaries."""
    return GRIDS[organization]


@pytest.fixture
def url(servers, organization: str) -> str:
    """A server with an empty cache. It cuts prompts into chunks of 1,024 tokens."""
    server = servers(organization)
    client.flush(server.url)
    return server.url


def cached(answer: dict) -> int:
    return answer["meta_info"]["cached_tokens"]


def assert_same(cold: dict, warm: dict) -> None:
    """Equal bits: both ran alone."""
    assert warm["output_ids"] == cold["output_ids"]
    assert client.output_logprobs(warm) == client.output_logprobs(cold)


def test_a_second_visit_reuses_the_deepest_boundary_and_changes_nothing(url: str, grid: int) -> None:
    shared, first, second = (client.random_prompt(length, seed) for length, seed in ((2000, 1), (30, 2), (500, 3)))
    assert cached(client.generate(url, shared + first)) == 0
    warm = client.generate(url, shared + second)
    assert cached(warm) == 2000 // grid * grid
    client.flush(url)
    cold = client.generate(url, shared + second)
    assert cached(cold) == 0
    assert_same(cold, warm)


def test_a_shared_context_hits_from_the_third_visit_at_the_latest(url: str, grid: int) -> None:
    """The first visit's deepest boundary may lie in text of its own; the second then publishes the branch point."""
    shared = client.random_prompt(2000, seed=31)
    prompts = [shared + client.random_prompt(1700, seed=32 + visit) for visit in range(3)]
    third = [client.generate(url, prompt) for prompt in prompts][2]
    assert cached(third) == 2000 // grid * grid
    client.flush(url)
    assert_same(client.generate(url, prompts[2]), third)


@pytest.mark.parametrize("offset", [-1, 0, 1])
@pytest.mark.parametrize("multiple", [1, 2])
def test_a_repeat_hits_the_deepest_boundary_before_its_last_token(
    url: str, grid: int, multiple: int, offset: int
) -> None:
    """Faults B9, B22: the published depth is the number of consumed tokens; the last token is always computed, so a
    prompt that ends on a boundary publishes the one before."""
    length = multiple * grid + offset
    prompt = client.random_prompt(length, seed=length)
    cold, second, third = (client.generate(url, prompt) for _ in range(3))
    assert cached(second) == cached(third) == (length - 1) // grid * grid
    assert_same(cold, second)
    assert_same(cold, third)


def test_a_state_is_published_at_the_boundary_whatever_the_chunks(url: str, grid: int) -> None:
    """Fault B15: the deepest boundary of a prompt of five chunks must hit, wherever the chunks end."""
    prompt = client.random_prompt(4600, seed=7)
    cold = client.generate(url, prompt)
    warm = client.generate(url, prompt)
    assert cached(warm) == 4599 // grid * grid
    assert_same(cold, warm)


def test_what_decoding_wrote_is_not_found_but_computed_and_then_found(url: str, grid: int) -> None:
    """A decode step sums in another order than a prefill, so its boundary is left to the next request."""
    prompt = client.random_prompt(grid - 20, seed=11)
    before = client.memory(url)["checkpoints"]
    answer = client.generate(url, prompt, max_new_tokens=60)
    after = client.memory(url)["checkpoints"]
    assert after["decode_crossings"] == before["decode_crossings"] + 1
    assert after["published"] == before["published"]
    longer = prompt + answer["output_ids"] + client.random_prompt(40, seed=12)
    first, second = (client.generate(url, longer) for _ in range(2))
    assert [cached(first), cached(second)] == [0, grid]
    client.flush(url)
    cold = client.generate(url, longer)
    assert_same(cold, first)
    assert_same(cold, second)


@pytest.mark.server("s1")
def test_without_exact_continuation_a_boundary_crossed_in_decode_is_found(servers) -> None:
    url, grid = servers("s1").url, GRIDS["s1"]
    client.flush(url)
    prompt = client.random_prompt(grid - 20, seed=11)
    answer = client.generate(url, prompt, max_new_tokens=60)
    longer = prompt + answer["output_ids"] + client.random_prompt(40, seed=12)
    warm = client.generate(url, longer)
    assert cached(warm) == grid
    assert client.memory(url)["checkpoints"]["decode_crossings"] == 0
    client.flush(url)
    cold = client.generate(url, longer)
    assert warm["output_ids"] == cold["output_ids"]
    assert client.output_logprobs(warm) == pytest.approx(client.output_logprobs(cold), abs=TOLERANCE)


@pytest.mark.server("s0")
def test_with_every_boundary_kept_a_shared_context_hits_from_its_second_visit(servers) -> None:
    """The server keeps all six boundaries of a prompt that it computes in one pass."""
    url, grid = servers("s0").url, GRIDS["s0"]
    client.flush(url)
    shared = client.random_prompt(2000, seed=31)
    first, second = (client.generate(url, shared + client.random_prompt(1300, seed=seed)) for seed in (41, 42))
    assert [cached(first), cached(second)] == [0, 2000 // grid * grid]
    client.flush(url)
    assert_same(client.generate(url, shared + client.random_prompt(1300, seed=42)), second)


def test_several_prefills_in_one_batch_publish_their_own_states(url: str, grid: int) -> None:
    """Fault B8: rows after the first must not publish a state of another position."""
    prompts = [client.random_prompt(length, seed=length) for length in (1900, 2300, 2100)]
    cold = client.generate(url, prompts)
    warm = [client.generate(url, prompt) for prompt in prompts]
    assert [cached(answer) for answer in warm] == [(len(prompt) - 1) // grid * grid for prompt in prompts]
    for before, after in zip(cold, warm, strict=True):
        assert after["output_ids"] == before["output_ids"]
        # Three requests decode in one matrix product, one request in another.
        assert client.output_logprobs(after) == pytest.approx(client.output_logprobs(before), abs=TOLERANCE)


def test_another_salt_never_hits(url: str, grid: int) -> None:
    """Fault B52: both halves, a hit inside one salt and none across."""
    prompt = client.random_prompt(2000, seed=5)
    hits = []
    for salt in (None, None, "a", "a", "b", None):
        options = {} if salt is None else {"cache_salt": salt}
        hits.append(cached(client.generate(url, prompt, **options)))
    depth = 2000 // grid * grid
    assert hits == [0, depth, 0, depth, 0, depth]


def test_the_openai_endpoint_takes_a_salt_too(url: str, grid: int) -> None:
    prompt = client.random_prompt(2000, seed=6)
    hits = []
    for salt in ("a", "a", "b"):
        body = {"model": "nano", "prompt": prompt, "max_tokens": 4, "temperature": 0, "cache_salt": salt}
        answer = requests.post(f"{url}/v1/completions", json=body, timeout=client.TIMEOUT_S).json()
        details = answer["usage"]["prompt_tokens_details"] or {"cached_tokens": 0}
        hits.append(details["cached_tokens"])
    assert hits == [0, 2000 // grid * grid, 0]
