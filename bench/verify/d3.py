"""The paper's correctness checks (its table D-3), each repeated on a unit of this project.

Checks of kernels and allocators are the project's own tests, run from its checkout; checks of served answers start a
server on a nano model. A check counts the cases without a difference. Nothing is tolerated: equal means equal bits.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from bench.server import ServerError
from bench.verify import paths
from bench.verify.arms import make_arm, start_arm
from bench.verify.client import Answer, Client
from bench.verify.compare import Verdict
from bench.verify.d3_table import PAPER, Check
from bench.verify.prompts import generate_prompts, random_tokens, shared_prompts
from bench.verify.records import Request
from bench.verify.subject import Facts, Journal, read_facts
from sgl_hybrid.errors import SettingError

DEPTHS = (600, 1200, 1800, 2400)
"""Tokens of the shared prefix in the pre-logit checks."""

ARMS = (
    ("falcon-h1-nano", "float32", "--memory-org s2 --memory-budget b63 --enable-return-hidden-states"),
    (
        "falcon-h1-nano",
        "bfloat16",
        "--memory-org s2 --memory-budget b63 --enable-return-hidden-states --mamba-ssm-dtype float32",
    ),
)
"""Model, dtype and flags of the servers whose answers are checked; the second computes as the paper's do."""

GRANITE = ("granite-h-nano", "float32", "--memory-org s2 --memory-budget b24")
"""The server of the forced reclaim: room for a few prompts, so that other prompts take the slabs of a cached one."""

RECLAIM_PROMPTS = 12
PROMPTS_PER_DEPTH = 6
CONCURRENT = 16
READY_TIMEOUT_S = 300.0
NEW_TOKENS = 8
VOCAB_TOKENS = 500

TESTS: tuple[tuple[str, str, dict[str, str], list[str]], ...] = (
    (
        "ssm kernel",
        "paged SSM update in Triton's interpreter, batches 8, 32 and 53, states in fp32 and bf16",
        {"KERNEL_TESTS": "interpret", "TRITON_INTERPRET": "1"},
        ["tests/kernels/interpret/test_ssm_update_batches.py", "-k", "8 or 32 or 53"],
    ),
    (
        "conv kernel",
        "slot-packed convolution update in Triton's interpreter, all line strides, batches 8, 32 and 53 among them",
        {"KERNEL_TESTS": "interpret", "TRITON_INTERPRET": "1"},
        ["tests/kernels/interpret/test_conv_update.py"],
    ),
    (
        "state bytes",
        "states and conv windows of a scan resumed at a boundary, against one that passed it",
        {},
        ["tests/unit/test_ssm_scan.py", "tests/unit/test_conv_scan.py", "-k", "resumed_at_a_boundary"],
    ),
    (
        "slab reclaim",
        "slabs taken back by invalidation and by moving states, ids and bytes checked",
        {},
        ["tests/seams/test_slab_reclaim.py"],
    ),
    (
        "allocator",
        "random operations on stores and trees of every organization, ledgers checked after each, against an oracle",
        {},
        ["tests/property/test_checkpoint_machine.py", "tests/seams/test_tree_machine.py"],
    ),
)
"""Name of a check, what it covers, environment and arguments of pytest."""


def run_tests(root: Path) -> list[Check]:
    """Run the project's own tests behind the checks. Raises: SettingError outside a checkout."""
    missing = [str(file) for *_, arguments in TESTS for file in arguments[:1] if not (root / file).is_file()]
    if missing:
        raise SettingError(f"expected to run in a checkout of the project, got {root} without {', '.join(missing)}")
    checks = []
    for name, scope, environment, arguments in TESTS:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        done = subprocess.run(
            command, cwd=root, env={**os.environ, **environment}, capture_output=True, text=True, check=False
        )
        counts = {kind: int(count) for count, kind in re.findall(r"(\d+) (passed|failed|error)", done.stdout)}
        shown = " ".join([*(f"{key}={value}" for key, value in environment.items()), "pytest", *arguments])
        checks.append(_check(name, counts.get("passed", 0), sum(counts.values()), scope, shown))
    return checks


def run_served(models_folder: Path, logs: Path, console: Console) -> list[Check]:
    """Start a server for each arm and for the forced reclaim, and return their checks. Raises: ServerError."""
    checks = []
    for index, (model, dtype, flags) in enumerate((*ARMS, GRANITE)):
        log = logs.with_name(f"{logs.name}-{index}-{model}-{dtype}.log")
        console.print(f"starting SGLang on {model} in {dtype}; its log is {log}")
        arm = make_arm(flags, dtype)
        with start_arm(arm, model=model, dtype=dtype, models_folder=models_folder, log=log) as server:
            server.wait_ready(READY_TIMEOUT_S)
            checks += asyncio.run(_checks(server.url, f"{model} {dtype}", reclaim=model == GRANITE[0]))
    return checks


async def _checks(url: str, label: str, *, reclaim: bool) -> list[Check]:
    async with Client(url) as client:
        facts = read_facts(await client.info())
        return [await _forced_reclaim(client, facts, label)] if reclaim else await Served(client, facts, label).run()


async def _forced_reclaim(client: Client, facts: Facts, label: str) -> Check:
    """Fill the pool until a prompt's deep state is gone, answer it again, and again from the state published anew."""
    journal = Journal(client, facts)
    prompts = generate_prompts(
        RECLAIM_PROMPTS, grid_tokens=facts.grid_tokens, num_boundaries=2, seed=12, vocab_tokens=VOCAB_TOKENS
    )
    await paths.eviction(journal, prompts, paths.QUICK)
    made = [finding for finding in journal.findings if finding.verdict is not Verdict.NOT_EXERCISED]
    passed = sum(finding.verdict is Verdict.EQUAL for finding in made)
    scope = (
        f"answers after eviction and after publication anew, {len(prompts)} prompts, {label}: tokens, log-probabilities"
    )
    return _check("forced reclaim", passed, len(made), scope, "bench d3")


class Served:
    """The checks of served answers, on one server. `num_answers` counts those that came, each of the length asked."""

    def __init__(self, client: Client, facts: Facts, label: str) -> None:
        self.client = client
        self.grid = facts.grid_tokens
        self.label = label
        self.num_answers = 0

    async def run(self) -> list[Check]:
        """Return the checks in the order of the table. Raises: ServerError, also for an answer of another length."""
        checks = [
            await self._pre_logit("pre-logit 600 to 1800", [depth for depth in DEPTHS if depth < 2400]),
            await self._pre_logit("pre-logit 2400", [2400]),
            await self._concurrent_repeats(),
            await self._reference_repeats(),
            await self._isolation(),
        ]
        scope = f"answers of these checks with as many tokens as were asked for, {self.label}; all tokens compared"
        return [*checks, _check("accounting", self.num_answers, self.num_answers, scope, "bench d3")]

    async def _ask(self, request: Request, *, salt: str | None = None) -> Answer:
        answer = await self.client.generate(request, salt=salt, hidden_states=True)
        self.num_answers += 1
        return answer

    async def _pre_logit(self, name: str, depths: Sequence[int]) -> Check:
        """Compare the hidden states before the output matrix behind a hit, of prompt and output, with a cold run's."""
        passed = total = 0
        for depth in depths:
            for index in range(PROMPTS_PER_DEPTH):
                shared = random_tokens(depth, (7, depth, index), VOCAB_TOKENS)
                own = [random_tokens(40, (8, depth, index, visit), VOCAB_TOKENS) for visit in range(2)]
                request = _request(shared + own[1], depth)
                await self.client.flush()
                cold = await self._ask(request)
                await self.client.flush()
                await self._ask(_request(shared + own[0], depth))
                warm = await self._ask(request)
                if warm.cached_tokens != depth // self.grid * self.grid:
                    raise ServerError(f"expected a hit of the boundary before {depth}, got {warm.cached_tokens} tokens")
                total += 1
                behind = len(request.prompt_ids) - warm.cached_tokens
                passed += _digest(warm, behind) == _digest(cold, behind) and warm.scores == cold.scores
        shown = ", ".join(str(depth) for depth in depths)
        scope = f"prompts on a shared prefix of {shown} tokens, {self.label}: hidden states, tokens, log-probabilities"
        return _check(name, passed, total, scope, "bench d3")

    async def _concurrent_repeats(self) -> Check:
        """Send requests with nothing in common at once, twice on an empty cache."""
        requests = [
            _request(random_tokens(700 + 40 * index, (9, index), VOCAB_TOKENS), 0) for index in range(CONCURRENT)
        ]
        rounds = []
        for _ in range(2):
            await self.client.flush()
            rounds.append(await self.client.generate_all(requests, max_concurrency=CONCURRENT))
            self.num_answers += CONCURRENT
        passed = sum(one.scores.output_ids == two.scores.output_ids for one, two in zip(*rounds, strict=True))
        bits = sum(one.scores == two.scores for one, two in zip(*rounds, strict=True))
        scope = f"token sequences of requests at once, twice, {self.label}; log-probabilities equal in {bits}"
        return _check("concurrent repeats", passed, CONCURRENT, scope, "bench d3")

    async def _reference_repeats(self) -> Check:
        """Repeat requests alone on an empty cache, five times each."""
        passed = 0
        for index in range(5):
            request = _request(random_tokens(900 + 150 * index, (10, index), VOCAB_TOKENS), 0)
            answers = []
            for _ in range(5):
                await self.client.flush()
                answers.append(await self._ask(request))
            passed += len({_digest(answer, len(request.prompt_ids)) for answer in answers}) == 1
        scope = f"sets of five repeats on an empty cache, {self.label}: hidden states"
        return _check("reference repeats", passed, 5, scope, "bench d3")

    async def _isolation(self) -> Check:
        """Ask for prompts on shared contexts, each under a salt of its own, and again sharing."""
        prompts = shared_prompts(8, context_tokens=self.grid + 100, seed=11, vocab_tokens=VOCAB_TOKENS)
        requests = [_request(prompt, self.grid) for prompt in prompts]
        await self.client.flush()
        apart = [await self._ask(request, salt=f"d3-{index}") for index, request in enumerate(requests)]
        await self.client.flush()
        shared = [await self._ask(request) for request in requests]
        pairs = [
            (one, two) for one, two in zip(apart, shared, strict=True) if two.cached_tokens and not one.cached_tokens
        ]
        passed = sum(one.scores == two.scores for one, two in pairs)
        scope = f"pairs of an isolated answer and one that hit, {self.label}: tokens and log-probabilities"
        return _check("isolation", passed, len(pairs), scope, "bench d3")


def _request(prompt_ids: list[int], first_scored: int) -> Request:
    first = first_scored or len(prompt_ids) - 1
    return Request(prompt_ids=prompt_ids, first_scored=first, max_new_tokens=NEW_TOKENS)


def _digest(answer: Answer, prompt_tokens: int) -> str:
    """Return a hash of the hidden states of the last `prompt_tokens` of the prompt and of the output, as float32."""
    rows = _rows(answer.hidden_states)
    last = np.asarray(rows[-(prompt_tokens + NEW_TOKENS - 1) :], dtype=np.float32)
    return hashlib.sha256(last.tobytes()).hexdigest()


def _rows(hidden_states: Any) -> list[list[float]]:
    """Return one row for each computed token: SGLang lists a prefill as rows, a decode step as a row."""
    rows: list[list[float]] = []
    for piece in hidden_states or ():
        rows.extend(piece if isinstance(piece[0], list) else [piece])
    if not rows:
        raise ServerError("expected hidden states in the answer, got none: was --enable-return-hidden-states given?")
    return rows


def _check(name: str, passed: int, total: int, scope: str, command: str) -> Check:
    return Check(name=name, paper=PAPER[name], passed=passed, total=total, scope=scope, command=command)
