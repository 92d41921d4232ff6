"""All policies on one small server: outputs stay the same, the counters move, and nothing is left behind."""

from __future__ import annotations

import concurrent.futures
from typing import Any

import pytest
import requests

from tests.e2e import client

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LENGTH = 1100
"""Tokens of a prompt or a context; its deepest boundary is at 1,024, its first at 512."""
NEW_TOKENS = 60


@pytest.fixture
def url(servers, name: str) -> str:
    """The server called `name`, with an empty cache."""
    server = servers(name)
    client.flush(server.url)
    return server.url


def change(before: dict[str, Any], after: dict[str, Any], section: str) -> dict[str, float]:
    """What the counters of one section have grown by."""
    return {
        name: value - before[section][name]
        for name, value in after[section].items()
        if isinstance(value, int | float) and value != before[section][name]
    }


def metric(url: str, name: str) -> list[float]:
    """The samples of one metric."""
    text = requests.get(f"{url}/metrics", timeout=client.TIMEOUT_S).text
    return [float(line.split()[-1]) for line in text.splitlines() if line.startswith(name)]


@pytest.mark.parametrize("name", ["d0-policies"])
def test_a_retracted_request_resumes_at_its_pin_with_the_same_output(url: str) -> None:
    """Ten requests outgrow the pool of attention, because SGLang counts on some to end early."""
    prompts = [client.random_prompt(LENGTH, 200 + index) for index in range(10)]
    before = client.memory(url)
    answers = client.generate(url, prompts, max_new_tokens=NEW_TOKENS, ignore_eos=False)
    after = client.memory(url)
    retractions = [answer["meta_info"]["num_retractions"] for answer in answers]
    retracted = sum(retractions)
    assert retracted > 0
    pins = change(before, after, "pins")
    assert pins["tested"] == pins["pinned"] == pins["resumed"] == pins["resumed_at_pin"] == retracted
    assert after["pins"]["bytes_most"] > 0
    assert change(before, after, "adopted") == {"own": retracted}
    work = change(before, after, "work")
    assert 0 < work["resume"] <= retracted * (LENGTH % 512 + NEW_TOKENS)
    assert work["output"] == sum(len(answer["output_ids"]) for answer in answers)
    assert work["input_once"] == len(prompts) * LENGTH
    assert work["recorded"] == work["input_once"] + work["output"]
    assert after["protection"]["used_bytes"] == after["protection"]["yielded"] == after["pins"]["pinned_now"] == 0
    client.assert_nothing_held(url)
    disturbed = [index for index, count in enumerate(retractions) if count]
    for index in {disturbed[0], disturbed[-1], 0}:
        client.flush(url)
        alone = client.generate(url, prompts[index], max_new_tokens=NEW_TOKENS, ignore_eos=False)
        assert answers[index]["output_ids"] == alone["output_ids"]


@pytest.mark.parametrize("name", ["d0-policies"])
def test_boundaries_that_two_requests_want_are_retained(url: str) -> None:
    contexts = [client.random_prompt(LENGTH, seed) for seed in range(5)]
    prompts = [contexts[index % 5] + client.random_prompt(20 + 5 * index, 100 + index) for index in range(12)]
    before = client.memory(url)
    client.generate(url, prompts, max_new_tokens=NEW_TOKENS)
    after = client.memory(url)
    retention = change(before, after, "retention")
    assert retention["eligible_boundaries"] == 5 * 2
    assert retention["protected"] > 0
    assert 0 < after["retention"]["bytes_most"] <= after["protection"]["budget_bytes"]
    assert after["retention"]["protected_now"] == after["protection"]["used_bytes"] == 0
    assert metric(url, "sgl_hybrid:policy_events_total{")
    client.assert_nothing_held(url)


@pytest.mark.parametrize("name", ["d0-policies"])
def test_headroom_lets_requests_wait_that_would_fit(url: str) -> None:
    before = client.memory(url)
    assert before["headroom"]["attention_pages"] == before["pools"]["attention"]["total"] // 50
    answers = client.generate(url, [client.random_prompt(700, seed) for seed in range(16)], max_new_tokens=24)
    assert all(len(answer["output_ids"]) == 24 for answer in answers)
    assert change(before, client.memory(url), "headroom")["waits"] > 0
    assert metric(url, "sgl_hybrid:headroom_fraction") == [0.02]
    client.assert_nothing_held(url)


@pytest.mark.parametrize("name", ["d0-policies"])
def test_isolated_requests_adopt_nothing_of_each_other(url: str) -> None:
    """A salt for each request, in both APIs: the counters of adoption stand still; with the same salt they move."""
    prompt = client.random_prompt(LENGTH, seed=7)
    client.generate(url, prompt, cache_salt="first")
    before = client.memory(url)
    client.generate(url, prompt, cache_salt="second")
    chat = {
        "model": "nano",
        "messages": [{"role": "user", "content": " ".join(str(number) for number in range(700))}],
        "max_tokens": 4,
        "temperature": 0,
    }
    for salt in ("third", "fourth"):
        answer = requests.post(
            f"{url}/v1/chat/completions", json={**chat, "cache_salt": salt}, timeout=client.TIMEOUT_S
        )
        assert answer.status_code == 200, answer.text[:300]
        assert answer.json()["usage"]["prompt_tokens"] > 1024
    between = client.memory(url)
    assert change(before, between, "adopted") == change(before, between, "reuse") == {}
    client.generate(url, prompt, cache_salt="second")
    assert change(between, client.memory(url), "adopted") == {"ended": 1}
    again = requests.post(f"{url}/v1/chat/completions", json={**chat, "cache_salt": "third"}, timeout=client.TIMEOUT_S)
    assert again.status_code == 200
    assert change(between, client.memory(url), "adopted") == {"ended": 2}


@pytest.mark.parametrize("name", ["s2-policies", "d0-policies"])
def test_a_storm_with_all_policies_starves_no_request(url: str) -> None:
    """Requests of four contexts, short and long, with and without salts, some given up while they wait or run."""
    contexts = [client.random_prompt(LENGTH, seed) for seed in range(4)]

    def ask(index: int) -> bool:
        prompt = contexts[index % 4] + client.random_prompt(50 + 97 * (index % 9), 500 + index)
        options = {"cache_salt": f"salt-{index}"} if index % 5 == 0 else {}
        if index % 7 == 3:
            body = {"input_ids": prompt, "rid": f"storm-{index}", "sampling_params": {"max_new_tokens": 300}}
            try:
                requests.post(f"{url}/generate", json=body, timeout=3)
            except requests.Timeout:
                requests.post(f"{url}/abort_request", json={"rid": f"storm-{index}"}, timeout=client.TIMEOUT_S)
            return True
        answer = client.generate(url, prompt, max_new_tokens=40 + 20 * (index % 6), **options)
        return len(answer["output_ids"]) == 40 + 20 * (index % 6)

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        assert all(pool.map(ask, range(64)))
    found = client.memory(url)
    assert found["protection"]["used_bytes"] == found["pins"]["pinned_now"] == found["retention"]["protected_now"] == 0
    client.assert_nothing_held(url)
