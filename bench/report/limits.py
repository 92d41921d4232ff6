"""What the numbers of a report can say and what they cannot, from where and how they were measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.environment import statement
from bench.outcome import CellOutcome, Condition, adopted
from bench.paper_values import CEILING_TOKENS_PER_S, OUTPUT_TOKENS_PER_REQUEST
from bench.stats.conditions import measured, measurements_of
from bench.stats.targets import METRIC

CPU = (
    "A nano model on a CPU has the paper's counts of tokens, pages, checkpoints and requests, so which state fits, "
    "what is reused, who waits and who is preempted carry over; its seconds do not. The time of a step is made of "
    "other parts here: a decode step grows with the number of running requests where a GPU's hardly does, so an arm "
    "that runs more requests at once gains less here than there, and copies and gathers cost other shares.",
    "The client shares the processor with the server it measures. All arms pay this alike; latencies contain it.",
    "The paged kernels of this project do not run on a CPU: its arms are served by torch operators through the same "
    "tables, and SGLang's by torch operators through its own. What a kernel's page mapping costs is measured apart.",
)
ENGINES = (
    "The arms of this project run SGLang's prefix tree in its Python core; SGLang's own arms run the Rust core. What "
    "that costs or gains either side was not measured.",
    "SGLang's own arms run on the CPU reference platform of this project (`sgl_hybrid_cpu`), because SGLang ships no "
    "Mamba2 operators for a CPU.",
)
UNIFIED = (
    "`stock-unified` is SGLang's pool with its refusals of a CPU lifted; its virtual token ids are translated row by "
    "row in each step, which costs it a few milliseconds a step that a GPU would not pay.",
)
VLLM = (
    "vLLM's CPU build has C++ operators of its own. Beside the absolute numbers it is compared as a share of its own "
    "ceiling, the same engine with memory to spare; its chunk scan is patched so that it keeps checkpoints at all, "
    "and its worker leaves one core to its other processes by default.",
)


SEEDS_TO_TEST = 6
"""The fewest with which a sign-flip test of one comparison can reach 5 %: 2 / 2^6."""


def limits(
    environments: Sequence[dict[str, Any]], outcomes: Iterable[CellOutcome], paces: Mapping[str, float]
) -> list[str]:
    """Return the limits of a report, from the general to what this one lacks. paces: by case."""
    held = list(outcomes)
    found = list(dict.fromkeys(statement({**environment, "device": "cpu"}) for environment in environments))
    found += CPU + ENGINES
    if any(outcome.arm == "stock-unified" for outcome in held):
        found += UNIFIED
    if any(outcome.arm.startswith("vllm") for outcome in held):
        found += VLLM
    ok = [outcome for outcome in adopted(held) if outcome.status == "ok"]
    for case, pace in paces.items():
        found += _offered(case, pace, [outcome for outcome in ok if outcome.case == case])
    if few := {case: seeds for case, seeds in _seeds(ok).items() if seeds < SEEDS_TO_TEST}:
        counted = ", ".join(f"{seeds} seed{'' if seeds == 1 else 's'} of {case}" for case, seeds in few.items())
        found.append(
            f"{counted}: a sign-flip test needs six to reach 5 % even for one comparison. Read the intervals and the "
            "signs; no test can confirm anything here."
        )
    if any((environment["git"] or {}).get("dirty") for environment in environments):
        found.append(
            "The checkout had uncommitted changes when some cells ran: the commit alone does not say what ran."
        )
    commits = {(environment["git"] or {}).get("commit") for environment in environments}
    if len(commits) > 1:
        found.append(f"Cells were measured at {len(commits)} commits; each cell's manifest names its own.")
    drifting = [outcome for outcome in held if outcome.metrics.get("central_drift")]
    if drifting:
        found.append(
            f"{len(drifting)} of {sum(outcome.status == 'ok' for outcome in held)} runs fail the drift screen: "
            "running or waiting requests differ between the early and the late half of the central arrivals. No steady "
            "state is claimed; the paper's runs fail it too (83 of 84, section E.9)."
        )
    lost = [outcome for outcome in held if outcome.status != "ok"]
    if lost:
        found.append(f"{len(lost)} attempts do not count; each is listed with its reason.")
    return found


def _offered(case: str, pace: float, ok: Sequence[CellOutcome]) -> list[str]:
    """Return what is to be said of a case's load: its pace, and what it asked of the ceiling where one was measured."""
    said = (
        "" if pace == 1 else f" requests arrived at {pace:g} times the rates that are named (`python -m bench pace`)."
    )
    ceilings = [measured(arms.get("ceiling", {})).values() for arms in measurements_of(ok, METRIC).values()]
    ceiling = max((sum(speeds) / len(speeds) for speeds in ceilings if speeds), default=None)
    asked = []
    for rate in sorted({outcome.rate for outcome in ok}):
        tokens = _output_tokens(outcome for outcome in ok if outcome.rate == rate)
        if ceiling is not None and tokens is not None:
            paper = rate * OUTPUT_TOKENS_PER_REQUEST / CEILING_TOKENS_PER_S
            asked.append(
                f"{rate:g} req/s asked for {pace * rate * tokens / ceiling:.2f} of that (the paper {paper:.2f})"
            )
    if asked:
        said += f" SGLang with memory to spare reached {ceiling:.0f} tokens/s; {', '.join(asked)}."
    return [f"Load of {case}:{said}"] if said else []


def _output_tokens(outcomes: Iterable[CellOutcome]) -> float | None:
    """Return the mean output of a request that was answered, or None if it was not counted."""
    counted = [outcome.counters for outcome in outcomes if outcome.counters.get("num_ok")]
    tokens = sum(counters.get("output_tokens", 0) for counters in counted)
    return tokens / sum(counters["num_ok"] for counters in counted) if tokens else None


def _seeds(outcomes: Iterable[CellOutcome]) -> dict[str, int]:
    """Return for each case the most seeds that one of its conditions has."""
    seeds: dict[Condition, set[int]] = {}
    for outcome in outcomes:
        seeds.setdefault(outcome.condition, set()).add(outcome.seed)
    most: dict[str, int] = {}
    for condition, held in seeds.items():
        most[condition.case] = max(most.get(condition.case, 0), len(held))
    return most
