"""One attempt at one cell: start the arm's server, check it, drive the load, stop it, and say what it came to.

Whatever goes wrong inside becomes the outcome's reason; only the user's stop and a folder that cannot be written leave
as exceptions. The server is stopped on every way out.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import zstandard

from bench.arm_plan import ArmPlan, Serving, default_vllm_python, server_command, server_environment
from bench.arms import Arm, arm_of
from bench.atomic import write_whole
from bench.campaign.folder import Row, outcome_of
from bench.campaign.gate import GateError, check_answers, check_server
from bench.campaign.gauges import PERIOD_S, READERS, numbers, polling, read_samples
from bench.campaign.manifest import CellManifest
from bench.cells import Cell
from bench.environment import describe_environment
from bench.load import LoadSettings
from bench.metrics.latency import Limits
from bench.metrics.measure import measure
from bench.metrics.work import fallen
from bench.records import PlannedRequest, RequestRecord, read_records
from bench.server import ServerError, ServerProcess, free_port
from bench.session import LoadCase, LoadResult, run_load
from bench.summary import Summary
from bench.variants import variant_of
from bench.workloads import digest, make_workload
from sgl_hybrid.errors import SettingError

READY_TIMEOUT_S = 600.0


class Launch(NamedTuple):
    """How one server process is started."""

    command: list[str]
    environment: Mapping[str, str]


class Launcher(Protocol):
    """Turns an arm's plan into a process to start on a port."""

    def __call__(self, arm: Arm, plan: ArmPlan, cap: int, port: int) -> Launch: ...


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """What all cells of a campaign have in common.

    scale: factor on every length. pace: factor on every arrival rate (`bench.pace`); cells keep the paper's rates as
    their names. limits: the user's latency limits for goodput. host_limit_ms: the largest `host_ms` of a cell that
    counts.
    """

    serving: Serving
    scale: float = 1.0
    pace: float = 1.0
    dataset: Path | None = None
    limits: Limits | None = None
    host_limit_ms: float | None = None
    command: tuple[str, ...] = ()
    progress: bool = True
    period_s: float = PERIOD_S

    def __post_init__(self) -> None:
        if not 0 < self.pace < float("inf"):
            raise SettingError(f"--pace: expected a pace above 0, got {self.pace}")
        if self.host_limit_ms is not None and not 0 < self.host_limit_ms < float("inf"):
            raise SettingError(f"--host-limit: expected milliseconds above 0, got {self.host_limit_ms}")


def load_case(cell: Cell, conditions: Conditions) -> LoadCase:
    """Return what is asked of the server in a cell: equal for all arms of a block."""
    variant = variant_of(cell.variant)
    workload = make_workload("paper", scale=conditions.scale, num_requests=cell.num_requests, shared_fraction=cell.q)
    return LoadCase(
        workload=workload,
        arrivals=variant.arrivals(cell.rate, pace=conditions.pace),
        seed=cell.seed,
        isolate=variant.isolate,
        dataset=conditions.dataset,
        tokenizer=conditions.serving.model if conditions.dataset else None,
    )


def keep_workload(requests: Sequence[PlannedRequest], folder: Path) -> Path:
    """Write token ids and planned times of a run, unless the folder has them; the name is their SHA-256.

    The file holds the lines of a workload.jsonl, compressed with zstd, and the manifest of each run names its digest.
    """
    path = folder / f"{digest(requests)}.jsonl.zst"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        encode = msgspec.json.Encoder().encode
        content = zstandard.compress(b"".join(encode(request) + b"\n" for request in requests))
        write_whole(path, content)
    return path


def real_launcher(serving: Serving, vllm: Path | None = None) -> Launcher:
    """Return the launcher of the real servers. vllm: its interpreter, default where `make vllm` puts it."""

    def launch(arm: Arm, plan: ArmPlan, cap: int, port: int) -> Launch:
        python = vllm or default_vllm_python()
        if arm.engine == "vllm" and not python.is_file():
            raise SettingError("expected vLLM in an environment of its own, got none: run `make vllm`")
        return Launch(server_command(arm, plan, serving, cap, port, python), server_environment(arm, serving))

    return launch


class CellRunner:
    """Runs attempts one after the other; remembers which arms have passed their gate in this invocation."""

    def __init__(self, conditions: Conditions, launch: Launcher, workloads: Path) -> None:
        """workloads: folder that keeps what was asked, once for all cells that asked the same."""
        self._conditions = conditions
        self._launch = launch
        self._workloads = workloads
        self._gates: dict[tuple[str, tuple[str, ...]], str | None] = {}

    def run(self, cell: Cell, plan: ArmPlan, attempt: int, folder: Path) -> Row:
        """Run one attempt in `folder` and return its row. Raises: KeyboardInterrupt after the server is stopped."""
        begun, port = time.monotonic(), free_port()

        def row(status: str, reason: str | None = None, **found: dict[str, float]) -> Row:
            outcome = outcome_of(cell, attempt, status, reason, **found)
            return Row(key=cell.key, seconds=time.monotonic() - begun, outcome=outcome)

        red = self._gates.get((cell.arm, plan.flags))
        if plan.missing:
            return row("refused", f"this server has no {', '.join(plan.missing)}")
        if red is not None:
            return row("failed", red)
        try:
            launch = self._launch(arm_of(cell.arm), plan, cell.cap, port)
        except SettingError as error:
            return row("refused", _line(error))
        self._write_manifest(cell, plan, attempt, folder, launch)
        server = ServerProcess(launch.command, port=port, log=folder / "server.log", environment=launch.environment)
        try:
            with server:
                return self._measure(cell, plan, server, folder, row)
        except GateError as error:
            self._gates[cell.arm, plan.flags] = reason = f"gate: {error}"
            return row("failed", reason)
        except (ServerError, ValueError) as error:  # a SettingError, or a record that no number can be made of
            return row("failed", _line(error))

    def _measure(self, cell: Cell, plan: ArmPlan, server: ServerProcess, folder: Path, row: Callable[..., Row]) -> Row:
        """Check the server, drive the load, form the numbers. Raises: GateError, ServerError, SettingError."""
        arm = arm_of(cell.arm)
        ready_s = server.wait_ready(READY_TIMEOUT_S)
        counters = {"ready_s": ready_s, **self._pass_gate(arm, plan, server, folder)}
        begun_ns = time.monotonic_ns()
        result = self._drive(cell, arm, server, folder)
        episode_ns = time.monotonic_ns() - begun_ns
        if result.ended == "interrupted":
            raise KeyboardInterrupt
        if result.ended == "server lost":
            server.check_alive()  # says why, if the process ended
            return row("failed", "the server no longer answers")
        counters |= _counted_by_client(result.summary)
        lacks = []
        if arm.engine == "sglang":
            try:
                counters |= _counted_by_server(server.info())
            except ServerError as error:  # the load was answered: its numbers stand
                lacks.append(f"no counters of the server after the load: {_line(error)}")
        records = read_records(folder / "load")
        problem = _problem(records)
        if problem is not None:
            return row("failed", problem, counters=counters)
        samples = read_samples(folder)
        counters["num_samples"] = float(len(samples))
        metrics = measure(records, samples, episode_ns=episode_ns, limits=self._conditions.limits)
        lacks += [f"no work: the server's counter of {name} fell" for name in fallen(samples)]
        return row("ok", "; ".join(lacks) or None, metrics=metrics, counters=counters)

    def _write_manifest(self, cell: Cell, plan: ArmPlan, attempt: int, folder: Path, launch: Launch) -> None:
        threads = {name: value for name, value in os.environ.items() if name.startswith(("OMP_", "MKL_"))}
        manifest = CellManifest(
            cell=cell,
            attempt=attempt,
            started_utc=datetime.now(UTC).isoformat(timespec="milliseconds"),
            plan=plan,
            tree_core=arm_of(cell.arm).tree_core,
            command=_portable(launch.command),
            environment_variables={**threads, **launch.environment},
            environment=describe_environment(),
        )
        (folder / "cell.json").write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")

    def _pass_gate(self, arm: Arm, plan: ArmPlan, server: ServerProcess, folder: Path) -> dict[str, float]:
        """Check the server, and with the first cell of an arm's flags its answers too. Raises: GateError."""
        if arm.engine == "sglang":
            check_server(arm, plan, server.info())
        if (arm.name, plan.flags) in self._gates:
            return {}
        answers = check_answers(server.url, engine=arm.engine, checkpoint_interval=plan.checkpoint_interval)
        self._gates[arm.name, plan.flags] = None
        (folder / "gate.json").write_bytes(msgspec.json.encode(answers))
        return {"gate_cached_tokens": float(sum(answers.cached_tokens))}

    def _drive(self, cell: Cell, arm: Arm, server: ServerProcess, folder: Path) -> LoadResult:
        conditions, read = self._conditions, READERS[arm.engine]
        case = load_case(cell, conditions)
        keep_workload(case.requests(), self._workloads)
        return run_load(
            case,
            LoadSettings(url=server.url, api="completions" if arm.engine == "vllm" else "generate", timeout_s=3600.0),
            folder / "load",
            command=conditions.command,
            flush_cache=arm.engine == "sglang",
            progress=conditions.progress,
            keep_prompts=False,
            beside=lambda start_ns: polling(read, server.url, folder, start_ns, conditions.period_s),
        )


def _counted_by_client(summary: Summary) -> dict[str, float]:
    found = {
        "num_requests": summary.num_requests,
        "num_ok": summary.num_ok,
        "num_short": summary.num_short,
        "num_retries": summary.num_retries,
        "output_tokens": summary.output_tokens,
        "prompt_tokens": summary.prompt_tokens,
        "cached_tokens": summary.cached_tokens,
    }
    return {name: float(value) for name, value in found.items() if value is not None}


def _counted_by_server(info: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of an SGLang server's report under its own names, and how many requests it runs at most."""
    state: dict[str, Any] = (info.get("internal_states") or [{}])[0]
    cap = state.get("effective_max_running_requests_per_dp")
    counted = {} if cap is None else {"running_requests_cap": float(cap)}
    return counted | numbers(state.get("memory_organization") or {})


def _problem(records: list[RequestRecord]) -> str | None:
    """Return why a run that ended is not a measurement, in one line; None if every request was answered in full."""
    bad = [record for record in records if record.status != "ok"]
    if not bad:
        short = sum(record.output_tokens != record.target_tokens for record in records)
        return f"{short} of {len(records)} answers had another length than asked for" if short else None
    reason, _ = Counter(record.error or record.status for record in bad).most_common(1)[0]
    return f"{len(bad)} of {len(records)} requests failed, most of them with: {' '.join(reason.split())[:200]}"


def _line(error: Exception) -> str:
    """Return an error's message on one line; of a server's log its last line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if len(lines) == 1 else f"{lines[0].split('; the last lines')[0]}; its log ends: {lines[-1]}"[:400]


def _portable(command: list[str]) -> list[str]:
    """Return a command without the folders of this machine: base names instead of absolute paths."""
    return [Path(word).name if word.startswith("/") else word for word in command]
