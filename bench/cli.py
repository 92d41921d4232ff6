"""The command line of the benchmarks: `python -m bench COMMAND`.

A user's mistake is one line on stderr and exit status 2. Commands import what they need when they run, so `--help`
answers at once.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bench import suite_commands
from bench.micro import commands as micro_commands
from bench.server import ServerError
from bench.verify.command import d3, verify
from sgl_hybrid.errors import SettingError

if TYPE_CHECKING:
    from bench.session import LoadResult

DEFAULT_URL = "http://127.0.0.1:30000"
SERVER, WORK, TIMES, KEPT = (
    {"rich_help_panel": panel} for panel in ("Server", "What is asked", "When it is asked", "What is kept")
)

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
    name: Annotated[str, typer.Argument(help="falcon-h1-nano, falcon-h1-pico or granite-h-nano")],
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


@app.command()
def load(
    context: typer.Context,
    url: Annotated[str, typer.Option(help="where the server listens", **SERVER)] = DEFAULT_URL,
    api: Annotated[str, typer.Option(help="generate (SGLang's own) or completions (OpenAI's)", **SERVER)] = "generate",
    flush_cache: Annotated[bool, typer.Option(help="empty SGLang's prefix cache first", **SERVER)] = False,
    max_concurrency: Annotated[int | None, typer.Option(help="most requests in flight at once", **SERVER)] = None,
    retries: Annotated[int, typer.Option(help="attempts after a connection error", **SERVER)] = 2,
    timeout_s: Annotated[float, typer.Option(help="longest time for one request [s]", **SERVER)] = 600.0,
    workload: Annotated[str, typer.Option(help="paper, probe or smoke", **WORK)] = "paper",
    requests: Annotated[int | None, typer.Option(help="number of requests", **WORK)] = None,
    contexts: Annotated[int | None, typer.Option(help="number of shared contexts", **WORK)] = None,
    q: Annotated[float | None, typer.Option(help="common-prefix fraction of a context, 0 to 1", **WORK)] = None,
    scale: Annotated[float, typer.Option(help="factor on every length, up to 1", **WORK)] = 1.0,
    vocab_tokens: Annotated[int | None, typer.Option(help="random ids stay below this", **WORK)] = None,
    isolate: Annotated[bool, typer.Option(help="a cache salt for each request: nothing is shared", **WORK)] = False,
    dataset: Annotated[Path | None, typer.Option(help="ShareGPT-format JSON to take text from", **WORK)] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="model folder whose tokenizer reads it", **WORK)] = None,
    seed: Annotated[int, typer.Option(help="the same seed plans the same requests and times", **WORK)] = 0,
    arrivals: Annotated[str, typer.Option(help="poisson, onoff or at-once", **TIMES)] = "poisson",
    rate: Annotated[float, typer.Option(help="mean offered rate [requests/s]", **TIMES)] = 3.0,
    on_s: Annotated[float, typer.Option(help="onoff: length of a burst [s]", **TIMES)] = 5.0,
    off_s: Annotated[float, typer.Option(help="onoff: length of a pause [s]", **TIMES)] = 15.0,
    out: Annotated[Path | None, typer.Option(help="new folder for the records; default run/load-TIME", **KEPT)] = None,
    token_times: Annotated[bool, typer.Option(help="keep the arrival time of every token", **KEPT)] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the summary as JSON", **KEPT)] = False,
) -> None:
    """Send a seeded, prefix-sharing load to a running server and record every request.

    Ask a server on port 30000 for the paper's load at 3 requests/s:

        python -m bench load --rate 3 --seed 42000 --out run/first

    Nothing shared between requests, two ways - no common prefix, or a cache salt for each request:

        python -m bench load --q 0
        python -m bench load --isolate

    Bursts of 5 s with 15 s of silence; 40 requests at once with at most 8 in flight:

        python -m bench load --arrivals onoff --rate 1.7
        python -m bench load --workload probe --arrivals at-once --max-concurrency 8

    A conversation file instead of random tokens; a quarter of every length, for a quick look:

        python -m bench load --dataset sharegpt.json --tokenizer models/falcon-h1-nano
        python -m bench load --scale 0.25 --requests 60

    The folder gets manifest.json, workload.jsonl (token ids and planned times) and requests.jsonl (what came back).
    `python -m bench summary FOLDER` prints the table again. Exit status: 0 all answered, 1 some failed or the server
    went away (what was measured is kept), 2 a mistake in the command, 130 stopped with Ctrl-C.
    """
    from bench.arrivals import make_arrivals
    from bench.load import LoadSettings
    from bench.session import LoadCase, run_load
    from bench.workloads import make_workload

    changes = {
        "num_requests": requests,
        "num_contexts": contexts,
        "shared_fraction": q,
        "vocab_tokens": vocab_tokens,
    }
    case = LoadCase(
        workload=make_workload(workload, scale=scale, **changes),
        arrivals=make_arrivals(arrivals, rate_per_s=rate, on_s=on_s, off_s=off_s),
        seed=seed,
        isolate=isolate,
        dataset=dataset,
        tokenizer=tokenizer,
    )
    settings = LoadSettings(
        url=url,
        api=api,
        max_concurrency=max_concurrency,
        max_retries=retries,
        timeout_s=timeout_s,
        keep_token_times=token_times,
    )
    folder = out or Path("run") / time.strftime("load-%Y%m%d-%H%M%S")
    result = run_load(case, settings, folder, command=_command(context), flush_cache=flush_cache)
    _report(result, as_json=as_json)
    raise typer.Exit(_status(result))


@app.command()
def summary(
    folder: Annotated[Path, typer.Argument(help="folder that a load run filled")],
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Print the numbers of a finished or interrupted load run again, from its records."""
    from bench.records import read_manifest, read_records
    from bench.session import LoadResult
    from bench.summary import summarize

    ended = read_manifest(folder).ended
    _report(LoadResult(ended, summarize(read_records(folder)), folder), as_json=as_json)


@app.command()
def demo(
    context: typer.Context,
    org: Annotated[str, typer.Option(help="memory organization: s0, s1, s2 or d0")] = "s2",
    budget: Annotated[str, typer.Option(help="state memory: bytes with a unit, or a label such as b63")] = "b63",
    model: Annotated[str, typer.Option(help="falcon-h1-nano, falcon-h1-pico or granite-h-nano")] = "falcon-h1-nano",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16")] = "float32",
    requests: Annotated[int, typer.Option(help="number of requests")] = 48,
    full: Annotated[bool, typer.Option("--full", help="300 requests, as the paper's runs")] = False,
    rate: Annotated[float, typer.Option(help="mean offered rate [requests/s]")] = 3.0,
    q: Annotated[float, typer.Option(help="common-prefix fraction of a context, 0 to 1")] = 1.0,
    cap: Annotated[int, typer.Option(help="most requests the server runs at once")] = 63,
    seed: Annotated[int, typer.Option(help="seed of the requests and their times")] = 0,
    models: Annotated[Path, typer.Option(help="folder for the nano models")] = Path("models"),
    out: Annotated[Path | None, typer.Option(help="new folder for the records; default run/demo-TIME")] = None,
) -> None:
    """Serve a nano model on this machine's CPU with a memory organization, drive a load, print the numbers.

    Makes the model if it is missing, starts `python -m sglang.launch_server`, sends prefix-sharing requests at a
    saturating rate, stops the server. Takes a minute or two on two cores; `--full` takes several.

        python -m bench demo
        python -m bench demo --full --budget b83 --q 0.5
    """
    from rich.console import Console

    from bench.demo import DemoSettings, run_demo

    settings = DemoSettings(
        organization=org,
        budget=budget,
        model=model,
        dtype=dtype,
        num_requests=300 if full else requests,
        rate_per_s=rate,
        shared_fraction=q,
        cap=cap,
        seed=seed,
        models_folder=models,
    )
    folder = out or Path("run") / time.strftime("demo-%Y%m%d-%H%M%S")
    result = run_demo(settings, folder, command=_command(context), console=Console())
    _report(result, as_json=False)
    raise typer.Exit(_status(result))


suite_commands.add_to(app)
micro_commands.add_to(app)
app.command()(verify)
app.command()(d3)


def _command(context: typer.Context) -> list[str]:
    """Return the command line as it would be typed, for the manifest."""
    return ["python", "-m", "bench", *context.find_root().obj]


def _report(result: LoadResult, *, as_json: bool) -> None:
    """Print the summary of a run, and on stderr the one line that says why it is not complete."""
    if as_json:
        import msgspec

        print(msgspec.json.encode({"ended": result.ended, **msgspec.to_builtins(result.summary)}).decode())
    else:
        from rich.console import Console

        from bench.environment import statement
        from bench.records import read_manifest
        from bench.summary import summary_table

        Console().print(summary_table(result.summary, str(result.folder)))
        print(statement(read_manifest(result.folder).environment))
    done, planned = result.summary.num_ok, result.summary.num_requests
    if result.ended != "complete":
        how = "killed" if result.ended == "running" else result.ended
        line = f"{how} after {done} of {planned} requests; the records so far are in {result.folder}"
        print(f"error: {line}", file=sys.stderr)
    elif done < planned:
        line = f"{planned - done} of {planned} requests failed; each has its reason in {result.folder}/requests.jsonl"
        print(f"error: {line}", file=sys.stderr)


def _status(result: LoadResult) -> int:
    if result.ended == "interrupted":
        return 130
    return 0 if result.ended == "complete" and result.summary.num_ok == result.summary.num_requests else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line with `arguments` (default: the process's own) and return the exit status."""
    try:
        given = list(sys.argv[1:] if arguments is None else arguments)
        status = app(args=given, obj=given, prog_name="python -m bench", standalone_mode=False)
    except SettingError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ServerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (typer.Abort, KeyboardInterrupt):
        print("error: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        show = getattr(error, "show", None)  # click's own errors about the command line know how to print themselves
        if show is None:
            raise
        show()
        return int(getattr(error, "exit_code", 2))
    return int(status or 0)
