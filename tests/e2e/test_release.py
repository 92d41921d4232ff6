"""Whatever ends a request, nothing stays held: completion, abort, disconnection, retraction."""

from __future__ import annotations

import concurrent.futures
import threading
import time

import pytest
import requests

from tests.e2e import client

pytestmark = pytest.mark.e2e


def _stream(url: str, prompt: list[int], rid: str, max_new_tokens: int) -> requests.Response:
    body = {
        "input_ids": prompt,
        "rid": rid,
        "stream": True,
        "sampling_params": {"max_new_tokens": max_new_tokens, "temperature": 0, "ignore_eos": True},
    }
    return requests.post(f"{url}/generate", json=body, stream=True, timeout=client.TIMEOUT_S)


@pytest.mark.parametrize("name", ["d0", "s2"])
def test_disconnected_clients_leave_nothing(servers, name: str) -> None:
    """Fault B32: connections dropped at different moments, shared prefixes, chunked prefill."""
    url = servers(name).url
    client.flush(url)
    shared = client.random_prompt(1900, seed=1)

    def drop(index: int) -> None:
        with _stream(url, shared + client.random_prompt(200 + index, seed=index), f"drop-{index}", 200) as response:
            if index % 3:
                next(response.iter_lines())
            time.sleep(0.01 * (index % 5))

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        list(pool.map(drop, range(24)))
    client.assert_nothing_held(url)


@pytest.mark.parametrize("name", ["d0", "s2"])
def test_aborted_requests_leave_nothing_and_others_go_on(servers, name: str) -> None:
    """Fault B34: aborts between the chunks of a prefill and while decoding."""
    url = servers(name).url
    client.flush(url)
    prompt = client.random_prompt(6000, seed=3)
    survivor = client.random_prompt(700, seed=4)
    expected = client.generate(url, survivor, max_new_tokens=24)["output_ids"]
    client.flush(url)
    results: dict[str, list[int]] = {}
    thread = threading.Thread(
        target=lambda: results.update(ids=client.generate(url, survivor, max_new_tokens=24)["output_ids"])
    )
    thread.start()
    for delay in (0.0, 0.05, 0.1, 0.2, 0.4, 0.8):
        with _stream(url, prompt, f"abort-{delay}", 400) as response:
            time.sleep(delay)
            requests.post(f"{url}/abort_request", json={"rid": f"abort-{delay}"}, timeout=client.TIMEOUT_S)
            lines = [line for line in response.iter_lines() if line.startswith(b"data: {")]
        assert b'"abort"' in lines[-1]
    thread.join()
    assert results["ids"] == expected
    client.assert_nothing_held(url)


TAKEN_BACK = {"d0": (14, 1400, 360), "s0": (18, 450, 130), "s1": (18, 450, 130), "s2": (18, 450, 130)}
"""Organization -> requests, tokens of the shortest prompt, tokens of each answer. Those of the shared pools begin in
one block of 512 tokens and end in the next."""


@pytest.mark.parametrize(
    "organization", ["d0", "s2", *[pytest.param(org, marks=pytest.mark.slow) for org in ("s0", "s1")]]
)
def test_requests_taken_back_answer_as_on_a_roomy_server(servers, organization: str) -> None:
    """All are let in and outgrow the pool; some are taken back and computed again."""
    url = servers(f"{organization}-tiny").url
    client.flush(url)
    number, prompt_tokens, new_tokens = TAKEN_BACK[organization]
    prompts = [client.random_prompt(prompt_tokens + 3 * index, seed=100 + index) for index in range(number)]
    before = client.memory(url)["requests"]["retracted"]
    answers = client.generate(url, prompts, sampling=client.surprising(new_tokens))
    found = client.memory(url)
    retractions = [answer["meta_info"]["num_retractions"] for answer in answers]
    assert 0 < sum(retractions) == found["requests"]["retracted"] - before
    assert found["requests"]["deferred"] > 0
    assert found["counters"]["checks"]["attention"]["preempted"] > 0
    client.assert_nothing_held(url)
    roomy = servers(organization).url
    client.flush(roomy)
    undisturbed = client.generate(roomy, prompts, sampling=client.surprising(new_tokens))
    assert sum(answer["meta_info"]["num_retractions"] for answer in undisturbed) == 0
    assert [answer["output_ids"] for answer in undisturbed] == [answer["output_ids"] for answer in answers]
