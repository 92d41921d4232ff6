"""A cache hit changes nothing: answers with equal bits, from every depth, in every organization that promises it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e import client
from tests.e2e.conftest import GRIDS, SETUPS

pytestmark = pytest.mark.e2e

EXACT = ["d0", "s0", "s2", "granite-d0", "granite-s2", "s2-bf16"]


def grid_of(name: str) -> int:
    return next(grid for org, grid in GRIDS.items() if f"--memory-org {org}" in SETUPS[name].arguments)


def cached(answer: dict[str, Any]) -> int:
    return answer["meta_info"]["cached_tokens"]


def bits(answer: dict[str, Any]) -> tuple[list[int], list[float]]:
    return answer["output_ids"], client.output_logprobs(answer)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "granite-d0")) for name in EXACT]
)
def test_b10_b20_every_depth_gives_the_bits_of_a_recomputed_prefix(servers, name: str) -> None:
    """Prompts that leave 3 tokens and nearly an interval behind the last boundary; each depth is published anew, by a
    shorter prompt, so it is another request's state."""
    url, grid = servers(name).url, grid_of(name)
    for length in (2 * grid + 3, 3 * grid - 1):
        prompt = client.random_prompt(length, seed=length)
        client.flush(url)
        cold = client.generate(url, prompt)
        assert cached(cold) == 0
        for depth in range(grid, length, grid):
            client.flush(url)
            client.generate(url, prompt[: depth + 1], max_new_tokens=1)
            warm = client.generate(url, prompt)
            assert cached(warm) == depth
            assert bits(warm) == bits(cold), (length, depth)


@pytest.mark.parametrize("name", ["d0", "s2"])
def test_a_chunk_that_ends_anywhere_changes_no_bit(servers, name: str) -> None:
    """These servers cut prompts at 1,024 tokens, behind a hit elsewhere than without one."""
    url, grid = servers(name).url, grid_of(name)
    prompt = client.random_prompt(5000, seed=50)
    client.flush(url)
    cold = client.generate(url, prompt)
    client.flush(url)
    client.generate(url, prompt[: grid + 1], max_new_tokens=1)
    hit = client.generate(url, prompt)
    assert cached(hit) == grid
    assert bits(hit) == bits(cold)


@pytest.mark.parametrize("name", ["d0", "s2"])
def test_requests_in_company_have_the_bits_of_lone_ones(servers, name: str) -> None:
    """The passes of 1,024 tokens cut each prompt elsewhere than when it comes alone. Decode steps have from one request
    to all of them: the last to be let in ends last."""
    url = servers(name).url
    prompts = [client.random_prompt(717 + 53 * number, seed=80 + number) for number in range(10)]
    lengths = [{"max_new_tokens": 8 + 3 * number, "temperature": 0, "ignore_eos": True} for number in range(10)]
    client.flush(url)
    together = client.generate(url, prompts, sampling=lengths)
    client.flush(url)
    alone = [client.generate(url, prompt, sampling=length) for prompt, length in zip(prompts, lengths, strict=True)]
    assert [bits(answer) for answer in together] == [bits(answer) for answer in alone]


@pytest.mark.slow
@pytest.mark.server("s2")
def test_b19_one_checkpoint_restored_a_hundred_times_is_still_the_same(servers) -> None:
    """Other requests decode meanwhile, overlapped with the host's work; the server hashes every checkpoint."""
    url, grid = servers("s2").url, GRIDS["s2"]
    client.flush(url)
    shared = client.random_prompt(grid + 30, seed=60)
    prompts = [shared + client.random_prompt(5 + number % 40, seed=number) for number in range(100)]
    cold = client.generate(url, prompts[0])
    first = client.generate(url, prompts[0])
    others = [client.random_prompt(40, seed=600 + number) for number in range(4)]
    with ThreadPoolExecutor(1) as pool:
        decoding = pool.submit(client.generate, url, others, max_new_tokens=400)
        for prompt in prompts[1:]:
            assert cached(client.generate(url, prompt, max_new_tokens=2)) == grid
        decoding.result()
    again = client.generate(url, prompts[0])
    assert (cached(cold), cached(first), cached(again)) == (0, grid, grid)
    assert bits(cold) == bits(first) == bits(again)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("s2-tiny", marks=pytest.mark.server("s2")),  # which uses this one too
        *[pytest.param(f"{org}-tiny", marks=pytest.mark.slow) for org in ("s0", "s1", "d0")],
    ],
)
def test_evicted_and_published_again_it_is_still_the_same(servers, name: str) -> None:
    """Other prompts push the checkpoint out of a small pool; the prompt then publishes it anew."""
    url, grid = servers(name).url, grid_of(name)
    client.flush(url)
    prompt = client.random_prompt(2 * grid + 100, seed=70)
    cold, warm = (client.generate(url, prompt) for _ in range(2))
    for seed in range(16):
        client.generate(url, client.random_prompt(2 * grid + 100, seed=1000 + seed), max_new_tokens=1)
    evicted = client.generate(url, prompt)
    again = client.generate(url, prompt)
    assert [cached(answer) for answer in (cold, warm, evicted, again)] == [0, 2 * grid, 0, 2 * grid]
    assert bits(cold) == bits(warm) == bits(evicted) == bits(again)
