"""Host cost of a decode step: what the scheduler's processor spends beside the model, an organization against stock.

The servers of all arms are up at once, idle ones asleep, and decode in turn: one round of every arm, then the next
round in another order. In a round a batch of requests decodes as many tokens as lie between two boundaries of a shared
pool, so a round has as many crossings as a long run has in that time. The scheduler itself times its steps
(`SGLANG_HYBRID_STEP_TIMES`), by the clock of its own thread.

Host cost is everything but the model's forward. The gate: every server says it serves what its arm asks for, and all
arms give the same greedy tokens in every round; otherwise there is no number.
"""

from __future__ import annotations

import contextlib
import json
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench.arm_plan import ArmPlan, Policy, Serving, default_vllm_python, plan_arm, server_command, server_environment
from bench.arms import arm_of
from bench.campaign.gate import GateError, check_server
from bench.micro.rounds import new_folder, over, percent, turn_order, write_result
from bench.server import ServerProcess, free_port
from bench.stats.intervals import Interval
from bench.workloads import stream_rng
from sgl_hybrid.errors import SettingError

BASELINE = "stock-extra"
ARMS = ("s2", "s0", "s1", "d0")
TIMES_VARIABLE = "SGLANG_HYBRID_STEP_TIMES"
HOST_PARTS = ("schedule", "launch", "metadata", "process")
PARTS = (*HOST_PARTS, "model")
MOST_ADDED_PERCENT = 10.0
"""What an organization may add to stock's host cost of a decode step."""
VOCAB_TOKENS = 512
_STREAM = 0x73746570


class StepCase(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured. prompt_tokens: shortest and longest prompt, drawn evenly; output_tokens: steps of a round."""

    arms: tuple[str, ...] = ARMS
    budget: str = "512MiB"
    batch: int = 32
    rounds: int = 7
    prompt_tokens: tuple[int, int] = (256, 768)
    output_tokens: int = 512
    model: Path
    dtype: str = "float32"
    seed: int = 0
    ready_timeout_s: float = 600.0

    def check(self) -> None:
        """Raises: SettingError for a count that cannot be measured."""
        for name, value, least in (
            ("batch", self.batch, 1),
            ("rounds", self.rounds, 2),
            ("steps", self.output_tokens, 8),
        ):
            if value < least:
                raise SettingError(f"--{name}: expected at least {least}, got {value}")
        for name in self.arms:
            if arm_of(name).engine != "sglang" or name == BASELINE:
                raise SettingError(f"--arms: expected arms of SGLang other than {BASELINE}, got {name}")


class Step(msgspec.Struct, frozen=True):
    """One decode step as the scheduler timed it: requests in the batch, thread time of each part [ns]."""

    batch: int
    schedule: int
    launch: int
    metadata: int
    model: int
    process: int

    @property
    def host_ns(self) -> int:
        return sum(getattr(self, part) for part in HOST_PARTS)


class ArmResult(msgspec.Struct, frozen=True, kw_only=True):
    """One arm over all rounds. parts_us: mean of each part over all steps. rounds_host_us, rounds_step_us: mean of each
    round. host, step: what it adds to the baseline's host cost and to its whole step, in percent, paired by round."""

    arm: str
    num_steps: int
    parts_us: dict[str, float]
    rounds_host_us: list[float]
    rounds_step_us: list[float]
    host: Interval | None
    step: Interval | None


def measure(case: StepCase, folder: Path, *, say: Callable[[str], None] = print) -> list[ArmResult]:
    """Run the rounds, write the raw steps, the result and the table into `folder`, and return the results.

    Raises: SettingError for a case that cannot be served, ServerError if a server ends, GateError if the gate is red.
    """
    case.check()
    new_folder(folder)
    names = (BASELINE, *case.arms)
    serving = Serving(model=case.model, dtype=case.dtype, context_tokens=case.prompt_tokens[1] + case.output_tokens)
    plans = {name: plan_arm(arm_of(name), case.budget, serving, Policy(cap=case.batch)) for name in names}
    with contextlib.ExitStack() as stack:
        servers = {
            name: stack.enter_context(_server(name, plan, serving, case, folder)) for name, plan in plans.items()
        }
        for name, server in servers.items():
            server.wait_ready(case.ready_timeout_s)
            check_server(arm_of(name), plans[name], server.info())
            say(f"{name}: ready")

        def decode(name: str, prompts: list[list[int]]) -> tuple[Any, list[Step]]:
            return _decode(servers[name], prompts, case, folder / f"steps_{name}.jsonl")

        rounds = take_rounds(case, decode, say=say)
    results = summarize(rounds)
    plain = {"plans": msgspec.to_builtins(plans), **msgspec.to_builtins(case, enc_hook=str)}
    write_result(folder, "step", plain, msgspec.to_builtins(results), table(results, case))
    return results


def take_rounds(
    case: StepCase,
    decode: Callable[[str, list[list[int]]], tuple[Any, list[Step]]],
    *,
    say: Callable[[str], None] = print,
) -> dict[str, list[list[Step]]]:
    """Let every arm decode the same prompts, round by round; return the steps of each arm by round.

    decode: takes an arm and prompts, returns its tokens and its steps. The first round is for caches and allocators to
    warm up and is not kept.

    Raises: GateError if an arm gives other tokens than the baseline.
    """
    names = (BASELINE, *case.arms)
    rounds: dict[str, list[list[Step]]] = {name: [] for name in names}
    for number in range(case.rounds + 1):
        prompts, answers = _prompts(case, number), {}
        for name in turn_order(names, number):
            answers[name], steps = decode(name, prompts)
            if number > 0:
                rounds[name].append(steps)
        for name in case.arms:
            if answers[name] != answers[BASELINE]:
                raise GateError(f"expected the tokens of {BASELINE} from arm {name}, got others (round {number})")
        say(f"round {number} of {case.rounds}")
    return rounds


def summarize(rounds: Mapping[str, Sequence[Sequence[Step]]]) -> list[ArmResult]:
    """Return the results of all arms, the baseline first. rounds: steps of each arm by round; equally many rounds."""
    host = {name: [_mean_us(step.host_ns for step in steps) for steps in found] for name, found in rounds.items()}
    whole = {
        name: [_mean_us(step.host_ns + step.model for step in steps) for steps in found]
        for name, found in rounds.items()
    }
    results = []
    for name, found in rounds.items():
        steps = [step for taken in found for step in taken]
        results.append(
            ArmResult(
                arm=name,
                num_steps=len(steps),
                parts_us={part: _mean_us(getattr(step, part) for step in steps) for part in PARTS},
                rounds_host_us=host[name],
                rounds_step_us=whole[name],
                host=None if name == BASELINE else over(host[name], host[BASELINE]),
                step=None if name == BASELINE else over(whole[name], whole[BASELINE]),
            )
        )
    return results


def table(results: Sequence[ArmResult], case: StepCase) -> str:
    """Return the results as Markdown, and which arms meet the goal."""
    lines = [
        f"Thread time of one decode step at batch {case.batch} in µs, mean of {case.rounds} rounds of "
        f"{case.output_tokens} steps; added in percent over {BASELINE} with the 95 % interval over rounds.",
        "",
        f"| arm | {' | '.join(HOST_PARTS)} | host | added | model | step | added |",
        "|---|" + "---:|" * (len(HOST_PARTS) + 5),
    ]
    for result in results:
        parts = " | ".join(f"{result.parts_us[part]:.0f}" for part in HOST_PARTS)
        host = sum(result.parts_us[part] for part in HOST_PARTS)
        lines.append(
            f"| {result.arm} | {parts} | {host:.0f} | {percent(result.host)} | {result.parts_us['model']:.0f} | "
            f"{host + result.parts_us['model']:.0f} | {percent(result.step)} |"
        )
    lines.append("")
    for result in results:
        if result.host is not None:
            kept = "met" if result.host.estimate <= MOST_ADDED_PERCENT else "NOT met"
            lines.append(f"- {result.arm}: at most {MOST_ADDED_PERCENT:.0f} % host cost over {BASELINE}: {kept}")
    return "\n".join(lines)


def read_steps(path: Path, *, offset: int, batch: int) -> tuple[list[Step], int]:
    """Return the steps of full batches that a scheduler has written behind `offset`, and the offset behind them.

    The first of them is left out: with the overlap schedule it also processes the results of the last prefill. A line
    that is still being written is left for the next call.
    """
    with open(path, "rb") as file:
        file.seek(offset)
        content = file.read()
    end = content.rfind(b"\n") + 1
    decoder = msgspec.json.Decoder(Step)
    steps = [decoder.decode(line) for line in content[:end].splitlines()]
    return [step for step in steps if step.batch == batch][1:], offset + end


def _server(name: str, plan: ArmPlan, serving: Serving, case: StepCase, folder: Path) -> ServerProcess:
    arm, port = arm_of(name), free_port()
    command = server_command(arm, plan, serving, case.batch, port, default_vllm_python())
    environment = {**server_environment(arm, serving), "OMP_NUM_THREADS": "1"}
    environment[TIMES_VARIABLE] = str((folder / f"steps_{name}.jsonl").resolve())
    return ServerProcess(command, port=port, log=folder / f"{name}.log", environment=environment)


def _decode(server: ServerProcess, prompts: list[list[int]], case: StepCase, path: Path) -> tuple[Any, list[Step]]:
    """Let a server decode one batch; return its tokens and its steps."""
    offset = path.stat().st_size if path.exists() else 0
    body = {
        "input_ids": prompts,
        "sampling_params": {"max_new_tokens": case.output_tokens, "temperature": 0.0, "ignore_eos": True},
    }
    request = urllib.request.Request(
        f"{server.url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=1800) as response:
        answers = json.load(response)
    time.sleep(0.2)  # The last step's line is written when the scheduler looks for the next batch.
    steps, _ = read_steps(path, offset=offset, batch=case.batch)
    if len(steps) < case.output_tokens // 2:
        raise GateError(f"expected most of {case.output_tokens} steps with {case.batch} requests, got {len(steps)}")
    return [answer["output_ids"] for answer in answers], steps


def _prompts(case: StepCase, number: int) -> list[list[int]]:
    rng = stream_rng(case.seed, _STREAM, number)
    lengths = rng.integers(case.prompt_tokens[0], case.prompt_tokens[1] + 1, size=case.batch)
    return [rng.integers(8, VOCAB_TOKENS - 8, size=int(length)).tolist() for length in lengths]


def _mean_us(values_ns: Iterator[int]) -> float:
    return float(np.mean(np.fromiter(values_ns, dtype=np.float64))) / 1e3
