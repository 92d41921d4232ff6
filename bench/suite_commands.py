"""The commands of the benchmark suite, added to the command line of `bench`: `list`, `run`, `report`, `compare`."""

from __future__ import annotations

from typing import Annotated

import typer


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.command("list")(list_cases)


def list_cases(
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of tables")] = False,
) -> None:
    """List the cases (what is asked, how many cells) and the arms that they can compare."""
    import msgspec

    from bench.arms import ARMS
    from bench.cases import CASES, Changes, cells_of

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
