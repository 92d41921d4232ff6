"""The main job on one machine: make a nano model, serve it with a memory organization, drive a load, print numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from bench.arrivals import Poisson
from bench.load import LoadSettings
from bench.nano import write_model
from bench.server import ServerError, ServerProcess, cpu_environment, free_port, sglang_command
from bench.session import LoadCase, LoadResult, run_load
from bench.workloads import make_workload
from sgl_hybrid.memory.organization import organization_of

READY_TIMEOUT_S = 300.0


class DemoSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the demo serves and how much it asks for. `cap` is the most requests the server runs at once."""

    organization: str = "s2"
    budget: str = "b63"
    model: str = "falcon-h1-nano"
    dtype: str = "float32"
    num_requests: int = 48
    rate_per_s: float = 3.0
    shared_fraction: float = 1.0
    cap: int = 63
    seed: int = 0
    models_folder: Path = Path("models")


def run_demo(settings: DemoSettings, folder: Path, *, command: Sequence[str], console: Console) -> LoadResult:
    """Run the demo, leave the records in `folder` and the server's log beside it, and stop the server.

    Raises: SettingError for a malformed setting, ServerError if the server ends, does not come up or serves another
    organization than asked for.
    """
    organization_of(settings.organization)
    case = LoadCase(
        workload=make_workload("paper", num_requests=settings.num_requests, shared_fraction=settings.shared_fraction),
        arrivals=Poisson(settings.rate_per_s),
        seed=settings.seed,
    )
    model = settings.models_folder / f"{settings.model}-{settings.dtype}"
    write_model(settings.model, model, dtype=settings.dtype)
    port, log = free_port(), folder.with_name(folder.name + "-server.log")
    server = ServerProcess(
        sglang_command(model, port, server_arguments(settings)),
        port=port,
        log=log,
        environment=cpu_environment(settings.dtype),
    )
    console.print(f"starting SGLang with --memory-org {settings.organization} on {model}; its log is {log}")
    with server:
        with console.status("waiting for the server") as status:
            ready_s = server.wait_ready(READY_TIMEOUT_S, lambda s: status.update(f"waiting for the server: {s:.0f} s"))
        check_organization(server.info(), settings.organization)
        console.print(f"ready after {ready_s:.0f} s; sending {settings.num_requests} requests")
        result = run_load(case, LoadSettings(url=server.url), folder, command=command)
        if result.ended == "server lost":
            server.check_alive()  # says why
        elif result.ended == "complete":
            console.print(organization_table(check_organization(server.info(), settings.organization)))
    return result


def server_arguments(settings: DemoSettings) -> list[str]:
    """Return SGLang's flags for the demo on the CPU reference platform."""
    return [
        *("--device", "cpu", "--dtype", settings.dtype, "--attention-backend", "torch_native"),
        *("--memory-org", settings.organization, "--memory-budget", settings.budget),
        *("--max-running-requests", str(settings.cap)),
        *("--enable-cache-report", "--incremental-streaming-output"),
    ]


def check_organization(info: dict[str, Any], wanted: str) -> dict[str, Any]:
    """Return what the server reports of its memory organization. Raises: ServerError if it is not the wanted one."""
    states = info.get("internal_states") or [{}]
    report: dict[str, Any] = states[0].get("memory_organization") or {}
    if report.get("organization") != wanted:
        raise ServerError(f"expected a server with memory organization {wanted}, got {report.get('organization')}")
    return report


def organization_table(report: dict[str, Any]) -> Table:
    """Return the pools of the organization and how their checks came out, as the server reports them."""
    title = f"{report['organization']} at {report['units']['budget']}"
    stranded = report["counters"].get("stranded_byte_fraction")  # a shared pool strands nothing and has no such field
    if stranded is not None:
        title += f": stranded bytes {100 * stranded:.2f} %"
    pools, checks = report["pools"], report["counters"]["checks"]
    names = list(dict.fromkeys([*pools, *checks]))
    table = Table("pool", title=title, title_justify="left")
    for name in names:
        table.add_column(name, justify="right")
    rows = {f"units {unit}": (pools, unit) for unit in ("total", "free", "cached", "held")}
    rows |= {
        f"checks {kind.replace('_', ' ')}": (checks, kind)
        for kind in dict.fromkeys(k for c in checks.values() for k in c)
    }
    for label, (source, key) in rows.items():
        counts = (source.get(name, {}).get(key) for name in names)
        table.add_row(label, *("-" if count is None else f"{count:,}" for count in counts))
    return table
