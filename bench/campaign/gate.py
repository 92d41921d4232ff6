"""The gate of an arm: what must hold before a number of it is kept.

The server must say that it serves what the arm asks for, with the units that were planned; vLLM does not say. It must
answer a few prompts the same when they are new to it and when it has answered them, and then find the longest in its
cache. Red means no number: the cell fails with the gate's reason.
"""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np

from bench.arm_plan import ArmPlan
from bench.arms import Arm
from bench.workloads import stream_rng

NUM_PROMPTS = 3
PROMPT_TOKENS = (700, 1900, 2300)
"""Lengths on both sides of the first boundary of every organization (512 and 1,792 tokens) and of vLLM (1,664)."""
OUTPUT_TOKENS = 8
_STREAM, _SEED = 0x67617465, 1
TIMEOUT_S = 120.0


class GateError(RuntimeError):
    """The gate of an arm is red. The message is one line."""


class Answers(msgspec.Struct, frozen=True, kw_only=True):
    """What the gate saw: tokens of each prompt when new, and how many prompt tokens were cached the second time."""

    output_ids: list[list[int]]
    cached_tokens: list[int]


def check_server(arm: Arm, plan: ArmPlan, info: dict[str, Any]) -> None:
    """Compare what `/server_info` of an SGLang server says with what the arm asks for. Raises: GateError."""
    state = (info.get("internal_states") or [{}])[0]
    report = state.get("memory_organization") or {}
    _expect("memory organization", arm.organization, report.get("organization"))
    if arm.organization is not None:
        _expect("bytes of state memory", plan.total_bytes, (report.get("units") or {}).get("total_bytes"))
        return
    _expect("unified memory", "--enable-unified-memory" in arm.flags, bool(info.get("enable_unified_memory")))
    _expect("state slots", plan.units["state slots"], state.get("max_mamba_cache_size"))
    _expect("tokens", plan.units["tokens"], info.get("max_total_num_tokens"))
    _expect("mamba radix cache strategy", arm.strategy, state.get("mamba_radix_cache_strategy"))


def check_answers(url: str, *, engine: str, checkpoint_interval: int, vocab_tokens: int = 512) -> Answers:
    """Ask each prompt twice, greedily, compare the tokens, and look for a hit on the longest.

    checkpoint_interval: tokens between two places where a cached prefix can end; a hit is asked for only where the
    longest prompt has such a place. Raises: GateError.
    """
    new, cached = [], []
    for index in range(NUM_PROMPTS):
        rng = stream_rng(_SEED, _STREAM, index)
        prompt = _prompt(rng, PROMPT_TOKENS[index], vocab_tokens)
        first, _ = _ask(url, engine, prompt, index)
        again, reused = _ask(url, engine, prompt, index + NUM_PROMPTS)
        if first != again:
            at = next((i for i, (a, b) in enumerate(zip(first, again, strict=False)) if a != b), len(first))
            raise GateError(
                f"expected the same tokens for a cached prompt of {len(prompt)} tokens, got another at output {at} "
                f"({reused} tokens cached)"
            )
        new.append(first)
        cached.append(reused)
    if checkpoint_interval < PROMPT_TOKENS[-1] and not cached[-1]:
        raise GateError(f"expected a hit on a prompt of {PROMPT_TOKENS[-1]} tokens that was asked before, got none")
    return Answers(output_ids=new, cached_tokens=cached)


def _prompt(rng: np.random.Generator, count: int, vocab_tokens: int) -> list[int]:
    ids: list[int] = rng.integers(4, vocab_tokens, count).tolist()
    return ids


def _ask(url: str, engine: str, prompt: list[int], index: int) -> tuple[list[int], int]:
    if engine == "vllm":
        body = {"model": "nano", "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0.0}
        answer = _post(url, "/v1/completions", {**body, "ignore_eos": True, "return_token_ids": True})
        details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
        return answer["choices"][0]["token_ids"], details.get("cached_tokens") or 0
    sampling = {"max_new_tokens": OUTPUT_TOKENS, "temperature": 0.0, "ignore_eos": True}
    body = {"rid": f"gate-{index}", "input_ids": prompt, "sampling_params": sampling}
    answer = _post(url, "/generate", body)
    return answer["output_ids"], answer["meta_info"].get("cached_tokens") or 0


def _post(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "127.0.0.1", address.port, timeout=TIMEOUT_S)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        content = response.read()
        if response.status != 200:
            raise GateError(
                f"expected an answer to a prompt of the gate, got HTTP {response.status}: {content[:200]!r}"
            )
        answer: dict[str, Any] = json.loads(content)
        return answer
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise GateError(f"expected an answer to the gate's prompt, got {type(error).__name__}: {error}") from error
    finally:
        connection.close()


def _expect(what: str, wanted: object, found: object) -> None:
    if wanted != found:
        raise GateError(f"expected a server with {what} {wanted}, got {found}")
