"""The commands `python -m bench micro ...`: costs of single parts, measured alone."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from sgl_hybrid.errors import SettingError


def add_to(app: typer.Typer) -> None:
    """Register the group `micro` with its commands."""
    group = typer.Typer(help="Costs of single parts: a decode step, the prefix tree.", no_args_is_help=True)
    group.command("step")(step)
    group.command("tree")(tree)
    app.add_typer(group, name="micro")


def step(
    arms: Annotated[str, typer.Option(help="organizations to compare with stock-extra, with commas")] = "s2,s0,s1,d0",
    batch: Annotated[int, typer.Option(help="requests in the batch")] = 32,
    rounds: Annotated[int, typer.Option(help="rounds of every arm, after one to warm up")] = 7,
    steps: Annotated[int, typer.Option(help="decode steps of a round; 512 is one boundary of a shared pool")] = 512,
    budget: Annotated[str, typer.Option(help="state memory of every arm")] = "512MiB",
    model: Annotated[str, typer.Option(help="nano model, or a folder with a model")] = "falcon-h1-nano",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16")] = "float32",
    seed: Annotated[int, typer.Option(help="seed of the prompts")] = 0,
    out: Annotated[Path | None, typer.Option(help="new folder; default run/step-TIME")] = None,
) -> None:
    """Time what one decode step costs the scheduler's processor beside the model, against stock SGLang.

        python -m bench micro step
        python -m bench micro step --arms s2 --rounds 3 --steps 128

    Writes step.json, step.md and the raw steps of every arm. Exit status: 0, 1 if a server ended or the arms' tokens
    differ (then there is no number), 2 a mistake in the command.
    """
    from bench.campaign.gate import GateError
    from bench.environment import describe_environment, statement
    from bench.micro.step import StepCase, measure, table
    from bench.nano import model_folder

    case = StepCase(
        arms=tuple(arms.split(",")),
        batch=batch,
        rounds=rounds,
        output_tokens=steps,
        budget=budget,
        model=model_folder(model, dtype),
        dtype=dtype,
        seed=seed,
    )
    folder = out or Path("run") / time.strftime("step-%Y%m%d-%H%M%S")
    try:
        results = measure(case, folder)
    except GateError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    print(table(results, case))
    print(statement({**describe_environment(), "device": "cpu"}))


def tree(
    arms: Annotated[str, typer.Option(help="organizations, with commas")] = "s0,s1,s2,d0",
    nodes: Annotated[str, typer.Option(help="cached nodes of each size, with commas")] = "1000,10000,100000",
    rounds: Annotated[int, typer.Option(help="rounds of every arm, after one to warm up")] = 9,
    turns: Annotated[int, typer.Option(help="prompts of one round")] = 20,
    out: Annotated[Path | None, typer.Option(help="new folder; default run/tree-TIME")] = None,
) -> None:
    """Time look-up, eviction and insertion of a prompt in the prefix tree, against SGLang's own component.

        python -m bench micro tree
        python -m bench micro tree --arms s2 --nodes 1000,20000 --rounds 3

    Writes tree.json, tree.md and the raw turns. Exit status: 0, 1 if a process ended, 2 a mistake in the command.
    """
    from bench.environment import describe_environment, statement
    from bench.micro.tree import TreeCase, measure, table

    try:
        sizes = tuple(int(word) for word in nodes.split(","))
    except ValueError:
        raise SettingError(f"--nodes: expected whole numbers with commas between them, got {nodes!r}") from None
    case = TreeCase(arms=tuple(arms.split(",")), nodes=sizes, rounds=rounds, turns=turns)
    results = measure(case, out or Path("run") / time.strftime("tree-%Y%m%d-%H%M%S"))
    print(table(results))
    print(statement({**describe_environment(), "device": "cpu"}))
