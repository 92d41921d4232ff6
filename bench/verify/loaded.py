"""The paths on which many requests run at once.

On most servers a matrix product adds in another order for another number of rows. What that alone does to
log-probabilities is measured first, on the same requests at the same concurrency with nothing reused; it belongs to the
reference's own variation. A further difference is tolerated up to `Facts.batch_bound`, and reported.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from bench.verify.client import Answer, Client
from bench.verify.compare import Scores
from bench.verify.paths import CONCURRENT, RETRACTION, Effort, scored
from bench.verify.prompts import random_tokens, shared_prompts
from bench.verify.records import COLD_CONCURRENT, Request
from bench.verify.subject import Facts, Journal

RETRACTION_NEW_TOKENS = 96
MAX_RETRACTION_PROMPT = 1500
MAX_RETRACTION_REQUESTS = 24
SLACK_TOKENS = 32


async def concurrent(journal: Journal, effort: Effort) -> None:
    """Send prompts that share contexts, all at once, twice: the second time the cache is full of them."""
    grid = journal.facts.grid_tokens
    prompts = shared_prompts(
        effort.concurrent, context_tokens=grid + grid // 4 + 5, seed=effort.seed, vocab_tokens=effort.vocab_tokens
    )
    requests = [scored(prompt, grid, effort.new_tokens) for prompt in prompts]
    references = await _references(journal, CONCURRENT, requests)
    salts = [f"verify-{index}" for index in range(len(requests))]
    apart = await _together(journal, requests, effort.in_flight, salts=salts)
    for request, answer, known in zip(requests, apart, references, strict=True):
        journal.compare(COLD_CONCURRENT, "nothing shared", request, answer, list(known), own=True)
        known.append(answer.scores)
    rounds = [
        ("first round", await _together(journal, requests, effort.in_flight)),
        ("second round", await _together(journal, requests, effort.in_flight, flush=False)),
    ]
    if not any(answer.cached_tokens for _, answers in rounds for answer in answers):
        journal.missed(CONCURRENT, "all", f"none of {2 * len(requests)} answers was a hit")
        return
    for step, answers in rounds:
        _compare_all(journal, CONCURRENT, step, requests, answers, references)


async def retraction(journal: Journal, effort: Effort) -> None:
    """Send more than the pool can hold once the answers grow, so that the server takes requests back, or is told to;
    then ask each again alone, with what the disturbed run left in the cache."""
    requests = retraction_requests(journal.facts, effort)
    if not requests:
        held, running = journal.facts.capacity_tokens, journal.facts.max_running
        reason = f"the pool holds {held:,} tokens for {running} requests: serve with a smaller --memory-budget"
        journal.missed(RETRACTION, "overfill", reason)
        return
    references = await _references(journal, RETRACTION, requests)
    begun = time.monotonic()
    answers = await _together(journal, requests, len(requests))
    if not any(answer.num_retractions for answer in answers):
        # The server admits no more than fits to the end, or ended some in time: have it take back what runs.
        half_s = (time.monotonic() - begun) / 2
        answers, _ = await asyncio.gather(
            _together(journal, requests, len(requests)), _take_back_after(journal.client, half_s)
        )
    retracted = sum(answer.num_retractions for answer in answers)
    if retracted == 0:
        reason = (
            f"none of {len(requests)} requests was retracted, not even on request: serve with a smaller --memory-budget"
        )
        journal.missed(RETRACTION, "overfill", reason, requests[0])
        return
    _compare_all(journal, RETRACTION, f"{retracted} retractions", requests, answers, references)
    for request, known in zip(requests, references, strict=True):
        answer = await journal.client.generate(request)
        bound = journal.facts.batch_bound
        journal.compare(RETRACTION, "alone afterwards", request, answer, known, bound=bound)
        journal.tick()


async def _take_back_after(client: Client, seconds: float) -> None:
    await asyncio.sleep(seconds)
    await client.take_back()


def retraction_requests(facts: Facts, effort: Effort) -> list[Request]:
    """Return requests of which those that the server admits together outgrow its pool; none if it holds too much.

    With long pages the prompts end shortly before a page does, so that all need another page within a few steps. With
    short ones as many as run at once fill the pool but for `SLACK_TOKENS` each. Where the answers end is left to the
    model: SGLang reserves the whole output of a request that must reach its length.
    """
    at_once = max(2, min(10, 3 * facts.max_running // 4))
    at_once = max(at_once, -(-facts.capacity_tokens // MAX_RETRACTION_PROMPT))
    if at_once > 4 * facts.max_running:
        return []
    typical = facts.capacity_tokens // at_once
    requests = []
    for index in range(min(MAX_RETRACTION_REQUESTS, 2 * facts.max_running)):
        if facts.page_tokens > SLACK_TOKENS:
            pages = -(-typical * (70 + (37 * index) % 60) // (100 * facts.page_tokens))
            length = pages * facts.page_tokens - 4 - index % 8
        else:
            length = max(2, typical - SLACK_TOKENS - index % 4)
        requests.append(
            Request(
                prompt_ids=random_tokens(length, (effort.seed, 6, index), effort.vocab_tokens),
                first_scored=length - 1,
                max_new_tokens=RETRACTION_NEW_TOKENS,
                ignore_eos=False,
            )
        )
    return requests


async def _references(journal: Journal, path: str, requests: Sequence[Request]) -> list[list[Scores]]:
    return [list(await journal.cold(path, request, 1)) for request in requests]


async def _together(
    journal: Journal,
    requests: Sequence[Request],
    in_flight: int,
    *,
    salts: Sequence[str] | None = None,
    flush: bool = True,
) -> list[Answer]:
    if flush:
        await journal.client.flush()
    answers = await journal.client.generate_all(requests, max_concurrency=in_flight, salts=salts)
    for _ in answers:
        journal.tick()
    return answers


def _compare_all(
    journal: Journal,
    path: str,
    step: str,
    requests: Sequence[Request],
    answers: Sequence[Answer],
    references: Sequence[list[Scores]],
) -> None:
    for request, answer, known in zip(requests, answers, references, strict=True):
        journal.compare(path, step, request, answer, known, bound=journal.facts.batch_bound)
