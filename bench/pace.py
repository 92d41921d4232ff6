"""How fast a model is here beside the paper's, and the pace that makes its load the paper's.

What a load does to an engine depends on two ratios: what a prompt costs in decode steps, and what is offered over what
the engine could do with memory to spare. The first is a property of the model; the second is set by the arrival rate. A
pace p stretches the arrivals of a case by 1/p; p = ceiling here / ceiling there offers this engine the share of its
ceiling that the paper's rates offered the paper's engine.

Source of the paper's side: Table E-6 at points L and M (S2). With 72,608 decode tokens a run, event time is
a * prefill tokens + b * forwards: 609,580 a + 4,507.3 b = 154.363 s and 155,948 a + 4,348.7 b = 110.356 s.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
from rich.table import Table

from bench.arm_plan import Policy, Serving, plan_arm
from bench.arms import arm_of
from bench.arrivals import AtOnce
from bench.campaign.cell import READY_TIMEOUT_S, Launcher
from bench.campaign.gate import check_server
from bench.load import LoadSettings
from bench.paper_values import CEILING_TOKENS_PER_S
from bench.server import ServerError, ServerProcess, free_port
from bench.session import LoadCase, LoadResult, run_load
from bench.workloads import Lengths, Workload, make_workload

PAPER_PREFILL_TOKENS_PER_S = 11_200.0
PAPER_STEP_MS = 22.2
PROMPT_TOKENS = 3332
BATCHES = (1, 8, 16, 32)
BATCH_OF_RATIO = 16
"""The paper's runs at points L and M have about this many running requests (section 5.2: 17.0 at b63)."""
NUM_PROMPTS = 5
STEPS = 64
SATURATED_REQUESTS = 300
"""Enough that the batch is full most of the time: of as many as may run at once, most of the run is draining."""
CAP = 63


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured. step_ms: decode step by batch size, at contexts of 512 tokens and a little more."""

    prefill_s: float
    step_ms: dict[int, float]
    ceiling_tokens_per_s: float

    @property
    def prefill_tokens_per_s(self) -> float:
        return PROMPT_TOKENS / self.prefill_s

    @property
    def prompt_in_steps(self) -> float:
        """Return what a prompt costs in decode steps of a batch of 16."""
        return 1000 * self.prefill_s / self.step_ms[BATCH_OF_RATIO]

    @property
    def pace(self) -> float:
        """Return the pace at which a case offers this engine the paper's share of its ceiling."""
        return self.ceiling_tokens_per_s / CEILING_TOKENS_PER_S


def paper_prompt_in_steps() -> float:
    """Return the paper's price of a prompt in decode steps: about 13."""
    return 1000 * PROMPT_TOKENS / PAPER_PREFILL_TOKENS_PER_S / PAPER_STEP_MS


def measure_pace(
    serving: Serving, launch: Launcher, folder: Path, *, command: tuple[str, ...], say: Callable[[str], None]
) -> Pace:
    """Measure SGLang with memory to spare on one server; records go into `folder`.

    Raises: ServerError if the server does not come up or a request fails, SettingError if the folder is not new.
    """
    arm, port = arm_of("ceiling"), free_port()
    plan = plan_arm(arm, "b63", serving, Policy(cap=CAP))
    started = launch(arm, plan, CAP, port)
    log = folder.with_name(folder.name + "-server.log")
    with ServerProcess(started.command, port=port, log=log, environment=started.environment) as server:
        server.wait_ready(READY_TIMEOUT_S)
        check_server(arm, plan, server.info())

        def drive(name: str, workload: Workload, max_concurrency: int | None = None) -> LoadResult:
            say(f"measuring {name}")
            result = run_load(
                LoadCase(workload=workload, arrivals=AtOnce()),
                LoadSettings(url=server.url, max_concurrency=max_concurrency),
                folder / name.replace(" ", "-"),
                command=command,
                flush_cache=True,
                progress=False,
                keep_prompts=False,
            )
            if result.summary.num_ok != workload.num_requests:
                raise ServerError(f"expected {workload.num_requests} answers while {name} was measured, see {folder}")
            return result

        drive("warm-up", _fixed(2, PROMPT_TOKENS, 4))
        prompts = drive("prefill", _fixed(NUM_PROMPTS, PROMPT_TOKENS, 1), max_concurrency=1)
        steps = {batch: drive(f"batch {batch}", _fixed(batch, 512, STEPS)) for batch in BATCHES}
        saturated = drive("ceiling", make_workload("paper", num_requests=SATURATED_REQUESTS))
    return Pace(
        prefill_s=_median_ms(prompts, "ttft") / 1000,
        step_ms={batch: _median_ms(result, "tpot") for batch, result in steps.items()},
        ceiling_tokens_per_s=saturated.summary.output_tokens_per_s or 0.0,
    )


def pace_table(found: Pace) -> Table:
    """Return what was measured beside the paper's."""
    table = Table("", "here", "paper", title="Pace", title_justify="left")
    table.add_row("prompt of 3,332 tokens [s]", f"{found.prefill_s:.3f}", f"{3332 / PAPER_PREFILL_TOKENS_PER_S:.3f}")
    table.add_row("prefill [tokens/s]", f"{found.prefill_tokens_per_s:,.0f}", f"{PAPER_PREFILL_TOKENS_PER_S:,.0f}")
    for batch, step_ms in found.step_ms.items():
        paper = f"{PAPER_STEP_MS:.1f}" if batch == BATCH_OF_RATIO else "-"
        table.add_row(f"decode step, batch {batch} [ms]", f"{step_ms:.1f}", paper)
    table.add_row("a prompt in decode steps", f"{found.prompt_in_steps:.1f}", f"{paper_prompt_in_steps():.1f}")
    table.add_row("ceiling [output tokens/s]", f"{found.ceiling_tokens_per_s:.0f}", f"{CEILING_TOKENS_PER_S:.0f}")
    table.add_row("pace of the paper's load", f"{found.pace:.2f}", "1")
    return table


def _fixed(num_requests: int, prompt_tokens: int, output_tokens: int) -> Workload:
    """Return requests of one length that share nothing."""
    return Workload(
        num_requests=num_requests,
        num_contexts=1,
        context_tokens=prompt_tokens - 1,
        question=Lengths(1, 0.0, 1, 1),
        output=Lengths(output_tokens, 0.0, output_tokens, output_tokens),
        shared_fraction=0.0,
    )


def _median_ms(result: LoadResult, name: str) -> float:
    spread = result.summary.ttft_ms if name == "ttft" else result.summary.tpot_ms
    if spread is None:
        raise ServerError(f"expected times of tokens in {result.folder}, got none")
    return spread.p50
