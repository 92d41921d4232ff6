"""The commands of the benchmark suite, added to the command line of `bench`: `list`, `run`, `report`, `compare`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from sgl_hybrid.errors import SettingError

CASE, SERVED, KEPT = ({"rich_help_panel": panel} for panel in ("What is measured", "What is served", "What is kept"))


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.command("list")(list_cases)
    app.command("run")(run_case)
    app.command("pace")(pace_command)
    app.command("report")(report)
    app.command("compare")(compare)


def list_cases(
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of tables")] = False,
) -> None:
    """List the cases (what is asked, how many cells) and the arms that they can compare."""
    import msgspec

    from bench.arms import ARMS
    from bench.cases import CASES
    from bench.cells import Changes, cells_of

    sizes = {case.name: len(cells_of(case, Changes())) for case in CASES.values()}
    if as_json:
        cases = [{**msgspec.to_builtins(case), "num_cells": sizes[case.name]} for case in CASES.values()]
        typer.echo(msgspec.json.encode({"cases": cases, "arms": list(ARMS.values())}).decode())
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("case", "question", "arms", "cells", "paper", title="Cases", title_justify="left")
    for case in CASES.values():
        arms = dict.fromkeys(arm for grid in case.grids for arm in grid.arms)
        table.add_row(case.name, case.question, " ".join(arms), str(sizes[case.name]), case.source)
    arms_table = Table("arm", "what it is", title="Arms", title_justify="left")
    for arm in ARMS.values():
        arms_table.add_row(arm.name, arm.summary)
    console = Console()
    console.print(table)
    console.print(arms_table)


def run_case(
    context: typer.Context,
    case: Annotated[str, typer.Argument(help="a case of `bench list`")],
    arms: Annotated[str | None, typer.Option(help="arms to compare, with commas; default the case's", **CASE)] = None,
    budget: Annotated[str | None, typer.Option(help="budgets, with commas: b63, 512MiB, ...", **CASE)] = None,
    seeds: Annotated[int | None, typer.Option(help="number of seeds, from the case's first", **CASE)] = None,
    requests: Annotated[int | None, typer.Option(help="requests of a cell", **CASE)] = None,
    rate: Annotated[float | None, typer.Option(help="mean offered rate [requests/s]", **CASE)] = None,
    q: Annotated[str | None, typer.Option(help="common-prefix fractions, with commas", **CASE)] = None,
    headroom: Annotated[
        str | None, typer.Option(help="admission headrooms of a case that has several, with commas", **CASE)
    ] = None,
    pace: Annotated[float, typer.Option(help="factor on every arrival rate (`bench pace`)", **CASE)] = 1.0,
    quick: Annotated[bool, typer.Option("--quick", help="a look in ten minutes on two cores", **CASE)] = False,
    model: Annotated[str, typer.Option(help="nano model, or a folder with a model", **SERVED)] = "falcon-h1-pico",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16", **SERVED)] = "float32",
    dataset: Annotated[Path | None, typer.Option(help="ShareGPT-format JSON to take text from", **SERVED)] = None,
    vllm: Annotated[Path | None, typer.Option(help="interpreter of vLLM's environment", **SERVED)] = None,
    ttft_ms: Annotated[float | None, typer.Option(help="goodput: largest TTFT [ms]", **KEPT)] = None,
    tpot_ms: Annotated[float | None, typer.Option(help="goodput: largest TPOT [ms]", **KEPT)] = None,
    e2e_ms: Annotated[float | None, typer.Option(help="goodput: largest E2E latency [ms]", **KEPT)] = None,
    host_limit: Annotated[
        float | None, typer.Option(help="largest `host_ms` of a cell that counts; a slower one is run again", **KEPT)
    ] = None,
    order_seed: Annotated[int, typer.Option(help="seed of the order in which cells run", **KEPT)] = 0,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="try failed cells again", **KEPT)] = False,
    out: Annotated[Path | None, typer.Option(help="folder; one of this campaign is gone on with", **KEPT)] = None,
) -> None:
    """Measure a case on the CPU: every arm at every condition, one server at a time, in balanced random order.

    A quick look; the case with three of its seeds; chosen arms at one budget:

        python -m bench run q1 --quick
        python -m bench run q1 --seeds 3 --out run/q1
        python -m bench run q3 --arms s0,s2,stock-tuned --budget b83 --seeds 3

    Ctrl-C stops it; the same command with the same --out goes on. `python -m bench report DIR` makes the report. Exit
    status: 0 all cells measured, 1 some failed (a row with its reason each), 2 a mistake in the command, 130 stopped.
    """
    from rich.console import Console

    from bench.arm_plan import Serving
    from bench.campaign.cell import Conditions, real_launcher
    from bench.campaign.run import Campaign
    from bench.cases import case_of
    from bench.cells import Changes
    from bench.metrics.latency import Limits
    from bench.nano import model_folder

    chosen = case_of(case)
    changes = Changes(
        arms=_names(arms),
        budgets=_names(budget),
        num_seeds=seeds,
        num_requests=requests,
        rate=rate,
        shared_fractions=_fractions("--q", q),
        headrooms=_fractions("--headroom", headroom),
        quick=quick,
    )
    serving = Serving(model=model_folder(model, dtype), dtype=dtype)
    given = [ttft_ms, tpot_ms, e2e_ms]
    conditions = Conditions(
        serving=serving,
        dataset=dataset,
        pace=pace,
        limits=Limits(ttft_ms=ttft_ms, tpot_ms=tpot_ms, e2e_ms=e2e_ms) if any(given) else None,
        host_limit_ms=host_limit,
        command=("python", "-m", "bench", *context.find_root().obj),
    )
    folder = out or Path("run") / time.strftime(f"{case}-%Y%m%d-%H%M%S")
    result = Campaign(
        chosen,
        changes,
        conditions,
        real_launcher(serving, vllm),
        folder,
        console=Console(soft_wrap=True),
        retry_failed=retry_failed,
        order_seed=order_seed,
    ).run()
    if result.interrupted or result.num_failed or result.num_left:
        how = "stopped" if result.interrupted else "ended"
        counts = f"{result.num_ok} cells measured, {result.num_failed} failed, {result.num_left} left"
        print(f"error: {how} with {counts}; rows and records are in {folder}", file=sys.stderr)
    raise typer.Exit(130 if result.interrupted else int(result.num_failed + result.num_left > 0))


def pace_command(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="nano model, or a folder with a model", **SERVED)] = "falcon-h1-pico",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16", **SERVED)] = "float32",
    out: Annotated[Path | None, typer.Option(help="new folder for the records; default run/pace-TIME", **KEPT)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table", **KEPT)] = False,
) -> None:
    """Measure what a prompt costs in decode steps and what the engine can do with memory to spare, beside the paper's.

    The last row is the factor for `bench run --pace` at which a case offers this machine the share of its ceiling that
    the paper offered its GPU. Takes a few minutes; a busy machine gives a wrong answer.
    """
    import msgspec
    from rich.console import Console

    from bench.arm_plan import Serving
    from bench.campaign.cell import real_launcher
    from bench.nano import model_folder
    from bench.pace import measure_pace, pace_table

    serving = Serving(model=model_folder(model, dtype), dtype=dtype)
    folder = out or Path("run") / time.strftime("pace-%Y%m%d-%H%M%S")
    command = ("python", "-m", "bench", *context.find_root().obj)
    console = Console(stderr=as_json)
    found = measure_pace(serving, real_launcher(serving), folder, command=command, say=console.print)
    if as_json:
        typer.echo(msgspec.json.encode({**msgspec.to_builtins(found), "pace": found.pace}).decode())
        return
    console.print(pace_table(found))


def report(
    folder: Annotated[Path, typer.Argument(help="folder of a campaign, or of several")],
    out: Annotated[Path | None, typer.Option(help="where the pages go; default FOLDER/report")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print everything as JSON too")] = False,
) -> None:
    """Make the report of what a campaign has measured so far: HTML, Markdown and Parquet; print the answers.

    Of one campaign, or of all that lie in a folder:

        python -m bench report run/q1
        python -m bench report run

    Start with FOLDER/report/choose.html; FOLDER/report/index.html has all numbers.
    """
    import msgspec

    from bench.figures import CAPTIONS, draw, to_svg
    from bench.report.gather import gather
    from bench.report.render import Drawing, write_report

    found = gather(folder)
    drawings = [
        Drawing(figure.get_suptitle(), to_svg(figure, name), CAPTIONS[name])
        for name, figure in draw(found.outcomes).items()
    ]
    paths = write_report(found, out or folder / "report", drawings)
    if as_json:
        typer.echo(msgspec.json.encode(found).decode())
        return
    for case in found.cases:
        typer.echo(f"{case.case}: {case.verdict.sentence}")
    for goal in found.goals:
        met = "met" if goal.met else f"missed ({goal.limits or 'no counters'})"
        shares = ", as shares of their ceilings," if goal.of_ceiling else ""
        typer.echo(f"goal {goal.arm} over {goal.other}{shares} at {goal.where}: {goal.effect_pct:+.1f} %, {met}")
    typer.echo(f"report: {paths[0]}")


def compare(
    before: Annotated[Path, typer.Argument(help="folder A: a campaign, or several")],
    after: Annotated[Path, typer.Argument(help="folder B: the same case elsewhere or at another commit")],
    metric: Annotated[str, typer.Option(help="what is compared")] = "output_tokens_per_s",
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Show what changed from one campaign to another, for each arm and condition, paired by seed.

    Throughput, or another metric of the runs:

        python -m bench compare run/q1-before run/q1-after
        python -m bench compare run/q1-before run/q1-after --metric ttft_p99_ms

    Cells that only one of them has are left out.
    """
    import msgspec

    from bench.report.compare import changes_table
    from bench.report.compare import compare as find_changes

    changes = find_changes(before, after, metric)
    if as_json:
        typer.echo(msgspec.json.encode(changes).decode())
        return
    from rich.console import Console

    Console().print(changes_table(changes, metric))


def _names(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(name.strip() for name in text.split(",") if name.strip())


def _fractions(option: str, text: str | None) -> tuple[float, ...] | None:
    try:
        return None if text is None else tuple(float(word) for word in text.split(","))
    except ValueError:
        raise SettingError(f"{option}: expected numbers of 0 to 1 with commas between them, got {text!r}") from None
