"""The prefix tree of an organization against SGLang's own component over the same Python tree core.

One process for each arm and number of cached nodes (`sgl_hybrid.seams.tree_times`, which holds a real tree without a
model) takes turns with a prompt of 3,332 tokens: look up, evict, insert, look up again. The arms of one size take their
rounds in changing order; the times are thread times, the raw ones are kept.

Goals: not slower than SGLang's component, and flat: no slower among many cached nodes than among few.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np

from bench.micro.rounds import new_folder, over, percent, turn_order, write_result
from bench.server import ServerError
from bench.stats.intervals import Interval
from sgl_hybrid.errors import SettingError

RIVALS = {"s0": "stock-512", "s1": "stock-512", "s2": "stock-512", "d0": "stock-16"}
"""SGLang's arm with the page length of each organization."""
OPERATIONS = ("match_new", "evict", "insert", "match_cached")
MOST_GROWTH = 1.5
"""How much longer a turn may take among the most nodes than among the fewest: the heap that Python walks is larger."""


class TreeCase(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured. nodes: cached nodes of each size; turns: turns of an arm in one round."""

    arms: tuple[str, ...] = tuple(RIVALS)
    nodes: tuple[int, ...] = (1_000, 10_000, 100_000)
    rounds: int = 9
    turns: int = 20

    def check(self) -> None:
        """Raises: SettingError for a case that cannot be measured."""
        for name in self.arms:
            if name not in RIVALS:
                raise SettingError(f"--arms: expected organizations out of {', '.join(RIVALS)}, got {name!r}")
        counts = (("nodes", min(self.nodes, default=0), 1), ("rounds", self.rounds, 2), ("turns", self.turns, 1))
        for option, value, least in counts:
            if value < least:
                raise SettingError(f"--{option}: expected at least {least}, got {value}")


class TreeResult(msgspec.Struct, frozen=True, kw_only=True):
    """One arm at one size. parts_us: median of each operation; rounds_us: median turn of each round. over_rival: what a
    turn takes more than the rival's, in percent, paired by round."""

    arm: str
    nodes: int
    tree_core: str
    parts_us: dict[str, float]
    rounds_us: list[float]
    over_rival: Interval | None = None

    @property
    def turn_us(self) -> float:
        return float(np.median(self.rounds_us))


class TreeProcess:
    """One process with a tree. A context manager: entering starts it, leaving ends it."""

    def __init__(self, arm: str, nodes: int, errors: Path) -> None:
        self.arm, self.nodes = arm, nodes
        self._errors = errors

    def __enter__(self) -> TreeProcess:
        command = [sys.executable, "-W", "ignore", "-m", "sgl_hybrid.seams.tree_times", self.arm]
        with open(self._errors, "ab") as errors:
            self._process = subprocess.Popen(
                [*command, "--nodes", str(self.nodes)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "SGLANG_PLATFORM": "sgl_hybrid_cpu", "OMP_NUM_THREADS": "1"},
            )
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()  # Closes the pipes and waits.

    def ready(self) -> str:
        """Wait until the tree is built; return the name of its core."""
        return str(self._answer()["tree_core"])

    def take(self, turns: int) -> list[dict[str, int]]:
        """Take turns; return the nanoseconds of their operations."""
        _pipe(self._process.stdin).write(f"{turns}\n")
        _pipe(self._process.stdin).flush()
        answer: list[dict[str, int]] = self._answer()
        return answer

    def _answer(self) -> Any:
        line = _pipe(self._process.stdout).readline()
        if not line:
            last = self._errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
            raise ServerError(f"expected an answer of the tree of {self.arm}, got none: {' '.join(last)}")
        return json.loads(line)


def measure(
    case: TreeCase,
    folder: Path,
    *,
    start: Callable[[str, int, Path], TreeProcess] = TreeProcess,
    say: Callable[[str], None] = print,
) -> list[TreeResult]:
    """Measure all sizes, write the raw times, the result and the table into `folder`, and return the results.

    Raises: SettingError for a case that cannot be measured, ServerError if a process ends.
    """
    case.check()
    new_folder(folder)
    results: list[TreeResult] = []
    with open(folder / "turns.jsonl", "w", encoding="utf-8") as raw:
        for nodes in case.nodes:
            for rival in dict.fromkeys(RIVALS[arm] for arm in case.arms):
                arms = [rival, *(arm for arm in case.arms if RIVALS[arm] == rival)]
                with contextlib.ExitStack() as stack:
                    trees = {arm: stack.enter_context(start(arm, nodes, folder / f"{arm}.log")) for arm in arms}
                    results += _measure_size(case, trees, nodes, raw)
                say(f"{nodes:,} nodes: {', '.join(arms)} measured")
    write_result(folder, "tree", msgspec.to_builtins(case), msgspec.to_builtins(results), table(results))
    return results


def summarize(rounds: Mapping[str, Sequence[Sequence[Mapping[str, int]]]], nodes: int, core: str) -> list[TreeResult]:
    """Return the results of the arms of one size; the first is the rival of the others.

    rounds: turns of each arm by round, each with the nanoseconds of its operations.
    """
    results: list[TreeResult] = []
    for arm, found in rounds.items():
        turns = [turn for taken in found for turn in taken]
        medians = [float(np.median([sum(turn.values()) for turn in taken])) / 1e3 for taken in found]
        results.append(
            TreeResult(
                arm=arm,
                nodes=nodes,
                tree_core=core,
                parts_us={name: float(np.median([turn[name] for turn in turns])) / 1e3 for name in OPERATIONS},
                rounds_us=medians,
                over_rival=over(medians, results[0].rounds_us) if results else None,
            )
        )
    return results


def table(results: Sequence[TreeResult]) -> str:
    """Return the results as Markdown, and which goals each organization meets."""
    lines = [
        "Thread time of one prompt of 3,332 tokens in µs (medians); a turn is the four operations together, over the "
        "rival in percent with the 95 % interval over rounds.",
        "",
        f"| arm | cached nodes | {' | '.join(OPERATIONS)} | turn | over rival |",
        "|---|" + "---:|" * (len(OPERATIONS) + 3),
    ]
    for result in results:
        parts = " | ".join(f"{result.parts_us[name]:,.0f}" for name in OPERATIONS)
        turn = f"{result.turn_us:,.0f} | {percent(result.over_rival)}"
        lines.append(f"| {result.arm} | {result.nodes:,} | {parts} | {turn} |")
    return "\n".join([*lines, "", *_goals(results)])


def _goals(results: Sequence[TreeResult]) -> list[str]:
    lines = []
    for arm in dict.fromkeys(result.arm for result in results if result.over_rival is not None):
        own = [result for result in results if result.arm == arm]
        worst = max(result.over_rival.estimate for result in own if result.over_rival is not None)
        lines.append(f"- {arm}: not slower than {RIVALS[arm]}: {_met(worst <= 0)} (worst {worst:+.1f} %)")
        growth = own[-1].turn_us / own[0].turn_us
        span = f"from {own[0].nodes:,} to {own[-1].nodes:,} nodes"
        lines.append(f"- {arm}: flat {span}: {_met(growth <= MOST_GROWTH)} ({growth:.2f} times)")
    return lines


def _measure_size(case: TreeCase, trees: Mapping[str, TreeProcess], nodes: int, raw: IO[str]) -> list[TreeResult]:
    """Take the rounds of all arms of one size; the first arm is the rival."""
    rounds: dict[str, list[list[dict[str, int]]]] = {arm: [] for arm in trees}
    cores = {tree.ready() for tree in trees.values()}
    if len(cores) != 1:
        raise ServerError(f"expected one tree core in all arms, got {', '.join(sorted(cores))}")
    for number in range(case.rounds + 1):
        for arm in turn_order(list(trees), number):
            turns = trees[arm].take(case.turns)
            if number > 0:  # The first round is for caches to warm up.
                rounds[arm].append(turns)
            for turn in turns:
                raw.write(json.dumps({"arm": arm, "nodes": nodes, "round": number, **turn}) + "\n")
    return summarize(rounds, nodes, cores.pop())


def _met(holds: bool) -> str:
    return "met" if holds else "NOT met"


def _pipe(pipe: IO[str] | None) -> IO[str]:
    if pipe is None:
        raise ValueError("expected a process with pipes, got one without")
    return pipe
