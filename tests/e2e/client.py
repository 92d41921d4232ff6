"""A small client of a served nano model: greedy answers with log-probabilities, and the server's own accounts."""

from __future__ import annotations

import random
import time
from typing import Any

import requests

TIMEOUT_S = 240


def random_prompt(length: int, seed: int) -> list[int]:
    """`length` random token ids, none of them special."""
    rng = random.Random(seed)
    return [rng.randrange(8, 500) for _ in range(length)]


def surprising(num_tokens: int) -> dict[str, Any]:
    """Sampling parameters of a greedy answer of `num_tokens` of which SGLang expects that it may end at any time."""
    return {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens, "temperature": 0}


def generate(
    url: str,
    input_ids: Any,
    *,
    max_new_tokens: int = 8,
    ignore_eos: bool = True,
    sampling: Any = None,
    timeout_s: float = TIMEOUT_S,
    **options: Any,
) -> Any:
    """One POST to `/generate`, greedy, with log-probabilities of the output. `logprob_start_len=0` asks for the input's
    too; SGLang then computes the whole input and reuses no prefix.

    sampling: other sampling parameters, for every prompt or a list with one for each. timeout_s: of the answer, which
    comes when the last prompt's is there.
    """
    plain = {"max_new_tokens": max_new_tokens, "temperature": 0, "ignore_eos": ignore_eos}
    body = {
        "input_ids": input_ids,
        "sampling_params": plain if sampling is None else sampling,
        "return_logprob": True,
        **options,
    }
    response = requests.post(f"{url}/generate", json=body, timeout=timeout_s)
    assert response.status_code == 200, response.text[:500]
    return response.json()


def flush(url: str) -> None:
    """Empty the prefix cache. The server refuses while a request runs, so wait until it is idle."""
    for _ in range(100):
        if requests.post(f"{url}/flush_cache", timeout=TIMEOUT_S).status_code == 200:
            return
        time.sleep(0.1)
    raise AssertionError("expected the server to become idle within 10 s")


def memory(url: str) -> dict[str, Any]:
    """The memory organization as `/server_info` reports it."""
    info = requests.get(f"{url}/server_info", timeout=TIMEOUT_S).json()
    return info["internal_states"][0]["memory_organization"]


def assert_nothing_held(url: str) -> None:
    """At idle every unit of every pool is free or cached; after a flush every unit is free."""
    deadline = time.monotonic() + 20
    while any(pool["held"] for pool in memory(url)["pools"].values()) and time.monotonic() < deadline:
        time.sleep(0.2)
    pools = memory(url)["pools"]
    assert {name: pool["held"] for name, pool in pools.items()} == dict.fromkeys(pools, 0)
    flush(url)
    pools = memory(url)["pools"]
    assert {name: pool["free"] for name, pool in pools.items()} == {n: p["total"] for n, p in pools.items()}


def output_logprobs(answer: dict[str, Any]) -> list[float]:
    return [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


def take_back(url: str) -> None:
    """Retract every running request, with no lack of memory, and go on."""
    for path, body in (("pause_generation", {"mode": "retract"}), ("continue_generation", {})):
        response = requests.post(f"{url}/{path}", json=body, timeout=TIMEOUT_S)
        assert response.status_code == 200, response.text[:500]
