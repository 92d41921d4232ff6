"""The command line of the benchmarks: `python -m bench COMMAND`.

A user's mistake is one line on stderr and exit status 2. Commands import what they need when they run, so `--help`
answers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from sgl_hybrid.errors import SettingError

app = typer.Typer(
    help="Make nano models, drive load against a server, measure memory organizations.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


@app.callback()
def _commands() -> None:
    """Keep `model` a sub-command even while it is the only one."""


@app.command()
def model(
    name: Annotated[str, typer.Argument(help="falcon-h1-nano or granite-h-nano")],
    folder: Annotated[Path, typer.Argument(help="where the checkpoint goes; made if missing")],
    seed: Annotated[int, typer.Option(help="seed of the weights; the same seed gives the same bytes")] = 0,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16")] = "float32",
) -> None:
    """Make a hybrid model with seeded random weights and its tokenizer, without a download.

    Example: `python -m bench model falcon-h1-nano models/falcon-h1-nano --seed 0`
    """
    from bench.nano import write_model

    size_bytes = write_model(name, folder, seed=seed, dtype=dtype)
    typer.echo(f"{name} (seed {seed}, {dtype}, {size_bytes / 2**20:.1f} MiB of weights) is in {folder}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line with `arguments` (default: the process's own) and return the exit status."""
    try:
        status = app(args=arguments, prog_name="python -m bench", standalone_mode=False)
    except SettingError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except typer.Abort:
        return 1
    except Exception as error:
        show = getattr(error, "show", None)  # click's own errors about the command line know how to print themselves
        if show is None:
            raise
        show()
        return int(getattr(error, "exit_code", 2))
    return int(status or 0)
