"""The paths of a verification on which one request runs at a time: there equal means equal bits.

Each path prepares a state of the cache, asks the same request again and compares with the answers of an empty cache.
Whether the state was reached is read from the reported `cached_tokens`; where it was not, the step is not exercised.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import msgspec

from bench.verify.client import Answer, Client
from bench.verify.prompts import boundaries, random_tokens
from bench.verify.records import COLD, Request
from bench.verify.subject import Journal

WARM, EVICTION, DECODE, RESTORE, RESUME = "warm", "eviction", "decode boundary", "restore", "resume"
CONCURRENT, RETRACTION = "concurrent", "retraction"

RESUME_NEW_TOKENS = 64
RESUME_TRIES = 8

SEED_TAIL_TOKENS = 8
"""Tokens behind a boundary in the prefix that makes the server publish the state there and nowhere deeper."""


class Effort(msgspec.Struct, frozen=True, kw_only=True):
    """How much is asked. cold_repeats: of every prompt; derived_repeats: of requests that a path makes up itself.
    restores: visits to one checkpoint. concurrent: requests of that path, `in_flight` at once."""

    num_prompts: int
    num_boundaries: int
    new_tokens: int
    cold_repeats: int
    derived_repeats: int
    restores: int
    concurrent: int
    in_flight: int
    vocab_tokens: int
    seed: int


QUICK = Effort(
    num_prompts=2,
    num_boundaries=2,
    new_tokens=8,
    cold_repeats=5,
    derived_repeats=2,
    restores=10,
    concurrent=12,
    in_flight=8,
    vocab_tokens=500,
    seed=0,
)
FULL = Effort(
    num_prompts=5,
    num_boundaries=3,
    new_tokens=32,
    cold_repeats=5,
    derived_repeats=2,
    restores=100,
    concurrent=64,
    in_flight=16,
    vocab_tokens=500,
    seed=0,
)


def scored(prompt_ids: list[int], grid_tokens: int, new_tokens: int) -> Request:
    """Return the request for a prompt, scored from its deepest usable boundary on: no hit is kept from happening."""
    depths = boundaries(len(prompt_ids), grid_tokens)
    first = depths[-1] if depths else len(prompt_ids) - 1
    return Request(prompt_ids=prompt_ids, first_scored=first, max_new_tokens=new_tokens)


async def publish(journal: Journal, prompt_ids: Sequence[int], depth: int) -> None:
    """Have the server publish the prompt's state at `depth`, and none behind it."""
    prefix = list(prompt_ids[: depth + SEED_TAIL_TOKENS])
    await journal.client.generate(Request(prompt_ids=prefix, first_scored=len(prefix) - 1, max_new_tokens=1))


async def cold(journal: Journal, prompts: Sequence[list[int]], effort: Effort) -> None:
    """Repeat every prompt on an empty cache: how well does the reference repeat itself?"""
    for prompt in prompts:
        request = scored(prompt, journal.facts.grid_tokens, effort.new_tokens)
        await journal.cold(COLD, request, effort.cold_repeats)
        journal.own_variation(COLD, request)


async def warm(journal: Journal, prompts: Sequence[list[int]], effort: Effort) -> None:
    """Continue every prompt from every boundary before its last token."""
    for prompt in prompts:
        request = scored(prompt, journal.facts.grid_tokens, effort.new_tokens)
        references = await journal.cold(WARM, request, 1)
        for depth in boundaries(len(prompt), journal.facts.grid_tokens):
            await journal.client.flush()
            await publish(journal, prompt, depth)
            answer = await journal.client.generate(request)
            journal.compare(WARM, f"hit at {depth}", request, answer, references, wanted_tokens=depth)
            journal.tick()


async def eviction(journal: Journal, prompts: Sequence[list[int]], effort: Effort) -> None:
    """Publish a shallow and a deep state, fill the pool until the deep one is gone while the shallow one stays in use,
    continue from what is left; then continue from the deep state that this published again."""
    for prompt in prompts:
        request = scored(prompt, journal.facts.grid_tokens, effort.new_tokens)
        depths = boundaries(len(prompt), journal.facts.grid_tokens)
        if len(depths) < 2:
            journal.missed(EVICTION, "fill", f"expected two boundaries in the prompt, got {len(depths)}", request)
            continue
        references = await journal.cold(EVICTION, request, 1)
        await journal.client.flush()
        await publish(journal, prompt, depths[0])
        await journal.client.generate(request)
        answer = await _fill(journal, request, depths, effort)
        journal.tick()
        if answer is None:
            journal.missed(EVICTION, "fill", f"the state at {depths[-1]} was never evicted", request)
            continue
        step = f"states behind {answer.cached_tokens} evicted"
        journal.compare(EVICTION, step, request, answer, references)
        again = await journal.client.generate(request)
        journal.compare(EVICTION, "published again", request, again, references, wanted_tokens=depths[-1])
        journal.tick()


async def _fill(journal: Journal, request: Request, depths: Sequence[int], effort: Effort) -> Answer | None:
    """Send other prompts until `request` does not hit its deepest boundary any more, and return its answer then; None
    if it still does after as many prompts as could fill the pool twice."""
    client, facts, size = journal.client, journal.facts, len(request.prompt_ids)
    num_fillers = 2 * facts.capacity_tokens // size + 2
    if facts.num_checkpoints is not None:
        num_fillers = min(num_fillers, 2 * facts.num_checkpoints)
    evicted = await _num_evictions(client)
    for index in range(num_fillers):
        filler = random_tokens(size, (effort.seed, 3, index), effort.vocab_tokens)
        await client.generate(Request(prompt_ids=filler, first_scored=size - 1, max_new_tokens=1))
        await publish(journal, request.prompt_ids, depths[0])
        now = await _num_evictions(client)
        # Where the server counts evictions: its oldest entries are the prompt's tail and its deepest state.
        if (now is not None and evicted is not None and now >= evicted + 4) or index == num_fillers - 1:
            answer = await client.generate(request)
            if answer.cached_tokens < depths[-1]:
                return answer
            evicted = await _num_evictions(client)
    return None


async def _num_evictions(client: Client) -> int | None:
    """Return how many evictions the server has counted; None if it counts none at all."""
    memory = (await client.info())["internal_states"][0].get("memory_organization") or {}
    counts: dict[str, int] = memory.get("evictions") or {}
    return sum(counts.values()) if "shared" in memory.get("pools", {}) else None


async def decode_boundary(journal: Journal, prompts: Sequence[list[int]], effort: Effort) -> None:
    """Let decoding cross a boundary, then continue behind it, from whatever state the server kept: the one at that
    boundary, or an earlier one if it publishes no state that decoding computed."""
    grid = journal.facts.decode_grid_tokens
    for index, prompt in enumerate(prompts):
        boundary = len(prompt) // grid * grid
        if boundary == 0:
            journal.missed(DECODE, "cross", f"expected a prompt of at least {grid} tokens, got {len(prompt)}")
            continue
        begun = Request(prompt_ids=prompt[: boundary - 5], first_scored=boundary - 6, max_new_tokens=11)
        await journal.client.flush()
        output = (await journal.client.generate(begun)).scores.output_ids
        own = random_tokens(24, (effort.seed, 4, index), effort.vocab_tokens)
        request = Request(
            prompt_ids=begun.prompt_ids + output + own, first_scored=boundary, max_new_tokens=effort.new_tokens
        )
        answer = await journal.client.generate(request)
        references = await journal.cold(DECODE, request, effort.derived_repeats)
        step = f"crossed at {boundary}"
        if answer.cached_tokens:
            journal.compare(DECODE, step, request, answer, references)
        else:
            journal.missed(DECODE, step, "the prompt and its answer were not in the cache", request)
        journal.tick()


async def restore(journal: Journal, prompts: Sequence[list[int]], effort: Effort) -> None:
    """Continue one state with many suffixes, then with the first again."""
    prompt = max(prompts, key=len)
    depths = boundaries(len(prompt), journal.facts.grid_tokens)
    requests = [
        Request(
            prompt_ids=prompt[: depths[-1]] + random_tokens(24, (effort.seed, 5, index), effort.vocab_tokens),
            first_scored=depths[-1],
            max_new_tokens=effort.new_tokens,
        )
        for index in range(effort.restores)
    ]
    references = await journal.cold(RESTORE, requests[0], effort.derived_repeats)
    await journal.client.flush()
    await publish(journal, prompt, depths[-1])
    first = await journal.client.generate(requests[0])
    journal.compare(RESTORE, "visit 1", requests[0], first, references, wanted_tokens=depths[-1])
    for visit, request in enumerate(requests[1:], start=2):
        answer = await journal.client.generate(request)
        journal.record(RESTORE, f"visit {visit}", request, answer)
        if answer.cached_tokens != depths[-1]:
            reason = f"expected visit {visit} to hit {depths[-1]} tokens, got {answer.cached_tokens}"
            journal.missed(RESTORE, f"visit {visit}", reason, request)
        journal.tick()
    again = await journal.client.generate(requests[0])
    step = f"visit 1 again after {effort.restores}"
    journal.compare(RESTORE, step, requests[0], again, [first.scores], wanted_tokens=depths[-1])
    journal.tick()


async def resume(journal: Journal, prompts: Sequence[list[int]], effort: Effort) -> None:
    """Take every request back while it decodes, alone, and let it resume; then once more, with what it left cached.

    When it decodes is guessed from how long the reference took, so a request may end before; it is then asked again.
    """
    for prompt in prompts:
        request = msgspec.structs.replace(
            scored(prompt, journal.facts.grid_tokens, effort.new_tokens), max_new_tokens=RESUME_NEW_TOKENS
        )
        references = await journal.cold(RESUME, request, 1)
        await journal.client.flush()
        begun = time.monotonic()
        await journal.client.generate(request)
        wait_s = 0.8 * (time.monotonic() - begun)
        for cached in (False, True):
            answer = await _taken_back(journal.client, request, wait_s, flush=not cached)
            if answer is None:
                reason = f"the request ended before it could be taken back, {RESUME_TRIES} times"
                journal.missed(RESUME, "take back", reason, request)
            else:
                step = f"taken back {answer.num_retractions} times, {'cached' if cached else 'cold'} before"
                journal.compare(RESUME, step, request, answer, references)
            journal.tick()


async def _taken_back(client: Client, request: Request, wait_s: float, *, flush: bool) -> Answer | None:
    """Return the answer to a request that was taken back about `wait_s` after it was asked; None if none was."""
    for _ in range(RESUME_TRIES):
        if flush:
            await client.flush()
        asked = asyncio.create_task(client.generate(request))
        await asyncio.sleep(wait_s)
        await client.take_back()
        answer = await asked
        if answer.num_retractions:
            return answer
        wait_s *= 0.7
    return None
