"""Ways to ask and to schedule: several answers to a prompt, sessions, no overlap, prefill and decode in one step."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
import requests

from tests.e2e import client
from tests.e2e.conftest import GRIDS
from tests.e2e.test_release import _stream

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("name", ["d0", "s2"])
def test_several_answers_to_one_prompt_share_it_and_are_each_its_own(servers, name: str) -> None:
    """n = 3: greedy answers are equal; every one but the first finds the prompt's boundary."""
    url, grid = servers(name).url, GRIDS[name]
    client.flush(url)
    prompt = client.random_prompt(grid + 200, seed=61)
    single = client.generate(url, prompt, max_new_tokens=12)
    client.flush(url)
    sampling = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True, "n": 3}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
    answers = requests.post(f"{url}/generate", json=body, timeout=client.TIMEOUT_S).json()
    assert [answer["output_ids"] for answer in answers] == [single["output_ids"]] * 3
    assert [answer["meta_info"]["cached_tokens"] for answer in answers] == [grid] * 3
    client.assert_nothing_held(url)


def post(url: str, path: str, **body: Any) -> Any:
    response = requests.post(f"{url}/{path}", json=body, timeout=client.TIMEOUT_S)
    assert response.status_code == 200, response.text[:300]
    return response.json() if response.content else None


@pytest.mark.server("s2")
def test_b35_a_session_goes_on_from_its_turns_and_leaves_nothing(servers) -> None:
    """Two turns in a session answer as one prompt of both would. Then 20 sessions, every other one cut off mid-turn."""
    url = servers("s2").url
    client.flush(url)
    first, second = client.random_prompt(1100, seed=62), client.random_prompt(80, seed=63)
    session = post(url, "open_session", capacity_of_str_len=10_000)
    turn = client.generate(url, first, max_new_tokens=10, rid="turn-1", session_params={"id": session})
    reply = client.generate(
        url, second, max_new_tokens=10, rid="turn-2", session_params={"id": session, "rid": "turn-1"}
    )
    assert reply["meta_info"]["cached_tokens"] == 1024
    post(url, "close_session", session_id=session)
    client.flush(url)
    whole = client.generate(url, first + turn["output_ids"] + second, max_new_tokens=10)
    assert reply["output_ids"] == whole["output_ids"]
    for index in range(20):
        session = post(url, "open_session", capacity_of_str_len=10_000)
        options = {"rid": f"s-{index}", "session_params": {"id": session}}
        if index % 2:
            body = {"input_ids": first, "stream": True, "sampling_params": {"max_new_tokens": 200}, **options}
            with requests.post(f"{url}/generate", json=body, stream=True, timeout=client.TIMEOUT_S) as response:
                next(response.iter_lines())
        else:
            client.generate(url, first, max_new_tokens=2, **options)
        post(url, "close_session", session_id=session)
    client.assert_nothing_held(url)


@pytest.mark.server("s1")
def test_turns_of_a_session_that_the_cache_knows_answer_as_requests_without_one(servers) -> None:
    """With `--enable-session-radix-cache`: two turns, and a third request that names the session and has its prefix."""
    url = servers("s1").url
    client.flush(url)
    first, second = client.random_prompt(1100, seed=162), client.random_prompt(80, seed=163)
    session = post(url, "open_session", capacity_of_str_len=10_000)
    turn = client.generate(url, first, max_new_tokens=10, rid="talk-1", session_params={"id": session})
    reply = client.generate(
        url, second, max_new_tokens=10, rid="talk-2", session_params={"id": session, "rid": "talk-1"}
    )
    third = client.generate(url, first + second, max_new_tokens=10, session_id=session)
    assert [answer["meta_info"]["cached_tokens"] for answer in (turn, reply, third)] == [0, 1024, 1024]
    post(url, "close_session", session_id=session)
    client.assert_nothing_held(url)
    for prompt, found in ((first, turn), (first + turn["output_ids"] + second, reply), (first + second, third)):
        client.flush(url)
        alone = client.generate(url, prompt, max_new_tokens=10)
        assert alone["output_ids"] == found["output_ids"]
        assert client.output_logprobs(alone) == pytest.approx(client.output_logprobs(found), abs=2e-5)


@pytest.mark.slow
@pytest.mark.server("s2-mixed")
def test_a_step_may_decode_and_prefill_without_overlap(servers) -> None:
    """While a prompt of 12 chunks is computed, a running request goes on, which only a mixed step lets it do; both
    answer as the server with the overlap schedule and its own chunks does."""
    url = servers("s2-mixed").url
    client.flush(url)
    short, long = client.random_prompt(700, seed=64), client.random_prompt(6100, seed=65)
    before_long = threading.Event()
    arrivals: list[bool] = []
    tokens: list[int] = []

    def run() -> None:
        with _stream(url, short, "running", 60) as response:
            for line in response.iter_lines():
                if line.startswith(b"data: {"):
                    tokens[:] = json.loads(line[6:])["output_ids"]
                    arrivals.append(before_long.is_set())
                    if len(arrivals) == 3:
                        started.set()

    started = threading.Event()
    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(60)
    answer = client.generate(url, long, max_new_tokens=8)
    before_long.set()
    thread.join()
    assert arrivals.count(False) >= 3 + 8, "expected the running request to go on between the chunks"
    client.assert_nothing_held(url)
    alone = [client.generate(url, short, max_new_tokens=60), client.generate(url, long, max_new_tokens=8)]
    assert [tokens, answer["output_ids"]] == [found["output_ids"] for found in alone]
    client.assert_nothing_held(url)
    other = servers("s2").url
    client.flush(other)
    assert client.generate(other, long, max_new_tokens=8)["output_ids"] == answer["output_ids"]


@pytest.mark.slow
@pytest.mark.server("s2-mixed")
def test_b34_without_overlap_reuse_and_aborts_are_the_same(servers) -> None:
    url = servers("s2-mixed").url
    client.flush(url)
    prompt = client.random_prompt(3100, seed=66)
    cold = client.generate(url, prompt, max_new_tokens=40)
    warm = client.generate(url, prompt, max_new_tokens=40)
    assert warm["meta_info"]["cached_tokens"] == 3072
    assert warm["output_ids"] == cold["output_ids"]
    assert client.output_logprobs(warm) == pytest.approx(client.output_logprobs(cold), abs=2e-5)
    for index in range(6):
        with _stream(url, client.random_prompt(4000, seed=70 + index), f"cut-{index}", 300) as response:
            threading.Event().wait(0.1 * index)
            post(url, "abort_request", rid=f"cut-{index}")
            lines = [line for line in response.iter_lines() if line.startswith(b"data: {")]
        assert b'"abort"' in lines[-1]
    client.assert_nothing_held(url)
