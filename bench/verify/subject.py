"""The server under test: what it says about its grid and its room, and the journal of what it answered."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.server import ServerError
from bench.verify.client import Answer, Client
from bench.verify.compare import Scores, Verdict, classify
from bench.verify.records import Finding, Request, Run
from sgl_hybrid.errors import SettingError

BATCH_BOUND = {"float32": 2e-5, "bfloat16": 0.125}
"""Bound on the difference of a log-probability between two batch shapes, by dtype of the model, fixed beforehand.

The rows of a matrix product depend on how many rows there are: the library picks another order of summation. In float32
that moved log-probabilities by up to 6e-6, in bfloat16 by up to 1.5e-2 (docs/verify.md).
"""

STATE_BOUND = {"bfloat16": 0.03125}
"""The same by dtype of the states, beside a model of higher precision: a last digit decides now and then how a state is
rounded after a decode step, and the states go on from there. Without any reuse that moved log-probabilities by up to
4.2e-3 within 192 tokens, where states in float32 moved them by up to 8.5e-6 (s2, before it padded decode steps).
"""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the server.

    organization: None for stock SGLang. grid_tokens: distance of two boundaries in prefill; decode_grid_tokens: of
    those at which decoding publishes a state. page_tokens: of attention in a page. capacity_tokens: attention tokens
    that the pools can hold at most. num_checkpoints: states that they can hold, None if unknown. max_running: requests
    that run at once. dtype, state_dtype: of the model and of the recurrent states.
    """

    organization: str | None
    grid_tokens: int
    decode_grid_tokens: int
    page_tokens: int
    capacity_tokens: int
    num_checkpoints: int | None
    max_running: int
    dtype: str
    state_dtype: str

    @property
    def batch_bound(self) -> float:
        """Largest difference of a log-probability under load that is taken for rounding."""
        return max(BATCH_BOUND.get(self.dtype, BATCH_BOUND["bfloat16"]), STATE_BOUND.get(self.state_dtype, 0.0))


def read_facts(info: dict[str, Any], *, grid_tokens: int | None = None) -> Facts:
    """Return the facts of a server from its `/server_info`; `grid_tokens` overrides its grid.

    Raises: SettingError if the grid is neither given nor to be found, or is no positive number.
    """
    if grid_tokens is not None and grid_tokens < 1:
        raise SettingError(f"expected a grid of at least 1 token, got {grid_tokens}")
    memory = (info.get("internal_states") or [{}])[0].get("memory_organization")
    config = _local_config(info)
    dtype = str(info.get("dtype", "auto"))
    state_dtype = str(info.get("mamba_ssm_dtype") or config.get("mamba_ssm_dtype") or "float32")
    if memory is not None:
        units, page_tokens = memory["units"], int(memory["page_tokens"])
        return Facts(
            organization=memory["organization"],
            grid_tokens=grid_tokens or memory["checkpoint_interval"],
            decode_grid_tokens=grid_tokens or memory["checkpoint_interval"],
            page_tokens=page_tokens,
            capacity_tokens=(units["pages"] or units["attention_pages"]) * page_tokens,
            num_checkpoints=units["checkpoints"] or None,
            max_running=memory["running_requests_cap"],
            dtype=dtype,
            state_dtype=state_dtype,
        )
    found = grid_tokens or _stock_grid(info, config)
    if found is None:
        raise SettingError(
            "expected --grid with this server (tokens between two positions where it caches a state): it reports "
            "no memory organization, and its model's config names no chunk size"
        )
    interval = int(info.get("mamba_track_interval") or 256)
    return Facts(
        organization=None,
        grid_tokens=found,
        decode_grid_tokens=math.lcm(found, interval),
        page_tokens=int(info.get("page_size") or 1),
        capacity_tokens=int(info.get("max_total_num_tokens") or 0),
        num_checkpoints=info.get("max_mamba_cache_size"),
        max_running=int(info.get("max_running_requests") or 16),
        dtype=dtype,
        state_dtype=state_dtype,
    )


def _local_config(info: dict[str, Any]) -> dict[str, Any]:
    """Return the text model's part of a local model's `config.json`, empty if the model is elsewhere."""
    try:
        config = msgspec.json.decode((Path(str(info["model_path"])) / "config.json").read_bytes(), type=dict[str, Any])
    except (KeyError, OSError, msgspec.MsgspecError):
        return {}
    found: dict[str, Any] = config.get("text_config", config)
    return found


def _stock_grid(info: dict[str, Any], config: dict[str, Any]) -> int | None:
    """Return SGLang's own prefill grid, the larger of its page and the scan chunk of the model, or None."""
    chunk = config.get("mamba_chunk_size") or config.get("chunk_size")
    return None if chunk is None else max(int(chunk), int(info.get("page_size") or 1))


class Journal:
    """What was asked and answered, the references, and the findings. `tick` is called once for each unit of work."""

    def __init__(self, client: Client, facts: Facts, tick: Callable[[], None] = lambda: None) -> None:
        self.client = client
        self.facts = facts
        self.tick = tick
        self.requests: list[Request] = []
        self.runs: list[Run] = []
        self.findings: list[Finding] = []
        self._index: dict[bytes, int] = {}
        self._references: dict[int, list[int]] = {}

    def number(self, request: Request) -> int:
        """Return the index under which a request is recorded."""
        key = msgspec.json.encode(request)
        if key not in self._index:
            self._index[key] = len(self.requests)
            self.requests.append(request)
        return self._index[key]

    def record(self, path: str, step: str, request: Request, answer: Answer) -> int:
        """Add an answer to the runs and return its index."""
        self.runs.append(
            Run(
                path=path,
                step=step,
                request=self.number(request),
                cached_tokens=answer.cached_tokens,
                num_retractions=answer.num_retractions,
                finish_reason=answer.finish_reason,
                scores=answer.scores,
            )
        )
        return len(self.runs) - 1

    async def cold(self, path: str, request: Request, repeats: int) -> list[Scores]:
        """Return the answers to a request with an empty cache, at least `repeats` of them; the repeats made before
        count. Raises: ServerError if the server reuses something although its cache was emptied."""
        known = self._references.setdefault(self.number(request), [])
        while len(known) < repeats:
            await self.client.flush()
            answer = await self.client.generate(request)
            if answer.cached_tokens:
                raise ServerError(f"expected no hit right after /flush_cache, got {answer.cached_tokens} cached tokens")
            known.append(self.record(path, "cold", request, answer))
            self.tick()
        return [self.runs[run].scores for run in known]

    def own_variation(self, path: str, request: Request) -> None:
        """Compare the repeats of a reference with the first of them. What they differ by is no fault of a cache."""
        first, *others = self._references[self.number(request)]
        for run in others:
            self._found(path, "repeat", request, run, [self.runs[first].scores], own=True)

    def compare(
        self,
        path: str,
        step: str,
        request: Request,
        answer: Answer,
        references: Sequence[Scores],
        *,
        wanted_tokens: int | None = None,
        bound: float = 0.0,
        own: bool = False,
    ) -> None:
        """Record an answer and what its comparison came to.

        wanted_tokens: the hit depth that the step prepared. An answer at another depth that does not differ leaves the
        step not exercised. own: the answer was made without reuse, in another batch than the reference's.
        """
        run = self.record(path, step, request, answer)
        self._found(path, step, request, run, references, wanted_tokens=wanted_tokens, bound=bound, own=own)

    def missed(self, path: str, step: str, reason: str, request: Request | None = None) -> None:
        """Note that a step did not reach the state it was to test."""
        self.findings.append(
            Finding(
                path=path,
                step=step,
                request=None if request is None else self.number(request),
                run=None,
                verdict=Verdict.NOT_EXERCISED,
                wanted_tokens=None,
                cached_tokens=None,
                reason=reason,
            )
        )

    def _found(
        self,
        path: str,
        step: str,
        request: Request,
        run: int,
        references: Sequence[Scores],
        *,
        wanted_tokens: int | None = None,
        bound: float = 0.0,
        own: bool = False,
    ) -> None:
        outcome = classify(references, self.runs[run].scores, bound=bound)
        verdict, cached_tokens, reason = outcome.verdict, self.runs[run].cached_tokens, None
        if own and verdict is Verdict.DIFFERENT:
            verdict = Verdict.WITHIN
        if wanted_tokens not in (None, cached_tokens) and verdict is not Verdict.DIFFERENT:
            verdict = Verdict.NOT_EXERCISED
            reason = f"expected a hit of {wanted_tokens} tokens, got {cached_tokens}"
        position, largest = outcome.comparison.first_position, outcome.comparison.max_logprob_difference
        is_token = position is not None and position == outcome.comparison.first_token
        self.findings.append(
            Finding(
                path=path,
                step=step,
                request=self.number(request),
                run=run,
                verdict=verdict,
                wanted_tokens=wanted_tokens,
                cached_tokens=cached_tokens,
                position=position,
                kind=None if position is None else "token" if is_token else "log-probability",
                max_logprob_difference=largest if math.isfinite(largest) else None,
                reason=reason,
            )
        )
