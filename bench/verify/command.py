"""The command `verify` of `python -m bench`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from bench.server import ServerError

SERVER, WORK, KEPT = ({"rich_help_panel": panel} for panel in ("Server", "What is asked", "What is kept"))


def d3(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="the page to write", **KEPT)] = Path("run/d3_validation.md"),
    models: Annotated[Path, typer.Option(help="folder for the nano models", **SERVER)] = Path("models"),
) -> None:
    """Repeat the paper's correctness checks (its table D-3) and write ours beside the paper's, as a page.

    Runs the project's own tests of kernels and allocators, so it needs a checkout, and starts three servers on nano
    models, one after another. Exit status: 0 every case is equal, 1 one is not, 2 a mistake in the command, 3 a server
    ended or did not answer as SGLang does.

        python -m bench d3 --out docs/measurements/d3_validation.md
    """
    from rich.console import Console

    from bench.environment import describe_environment
    from bench.verify.d3 import run_served, run_tests
    from bench.verify.d3_table import page

    console = Console(stderr=True)
    with console.status("running the tests behind the checks"):
        checks = run_tests(Path.cwd())
    try:
        checks += run_served(models, Path("run") / time.strftime("d3-%Y%m%d-%H%M%S"), console)
    except ServerError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(3) from error
    command = " ".join(["python", "-m", "bench", *context.find_root().obj])
    content = page(checks, command=command, environment=describe_environment())
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(content, encoding="utf-8")
    print(content)
    raise typer.Exit(0 if all(check.passed == check.total > 0 for check in checks) else 1)


def verify(
    context: typer.Context,
    url: Annotated[str | None, typer.Option(help="a running server, which should be idle", **SERVER)] = None,
    serve: Annotated[
        list[str] | None,
        typer.Option(
            help='start a server on a nano model with these flags, e.g. "--memory-org s2"; repeatable', **SERVER
        ),
    ] = None,
    stock: Annotated[bool, typer.Option(help="report stock SGLang beside what --serve names", **SERVER)] = False,
    model: Annotated[str, typer.Option(help="--serve: falcon-h1-nano or granite-h-nano", **SERVER)] = "falcon-h1-nano",
    dtype: Annotated[str, typer.Option(help="--serve: float32, or bfloat16, which cuda needs", **SERVER)] = "float32",
    device: Annotated[str, typer.Option(help="--serve: cpu (reference platform) or cuda", **SERVER)] = "cpu",
    models: Annotated[Path, typer.Option(help="--serve: folder for the nano models", **SERVER)] = Path("models"),
    grid: Annotated[
        int | None, typer.Option(help="tokens between two cached states; default: what the server reports", **SERVER)
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="less of everything; under five minutes", **WORK)] = False,
    prompts: Annotated[Path | None, typer.Option(help="JSON lines with prompt_ids; default: random", **WORK)] = None,
    vocab_tokens: Annotated[int | None, typer.Option(help="random ids stay below this; default 500", **WORK)] = None,
    concurrent: Annotated[int | None, typer.Option(help="requests under load; 64, quick 12", **WORK)] = None,
    restores: Annotated[int | None, typer.Option(help="visits to one state; 100, quick 10", **WORK)] = None,
    only: Annotated[list[str] | None, typer.Option(help="walk this path; repeatable; default: all", **WORK)] = None,
    seed: Annotated[int, typer.Option(help="the same seed asks the same", **WORK)] = 0,
    out: Annotated[Path | None, typer.Option(help="result file; default run/verify-TIME.json", **KEPT)] = None,
    page: Annotated[Path | None, typer.Option(help="also write the result as a Markdown page", **KEPT)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the summary as JSON", **KEPT)] = False,
) -> None:
    """Check that answers that use the prefix cache equal answers that compute everything.

    Every prompt is answered on an empty cache, five times, and again from every boundary, after parts of it were
    evicted, behind a boundary that decoding crossed, after it was taken back while it decoded, under concurrent load
    and after retraction; one state is restored many times. Token ids and log-probabilities are compared.
    **The server's prefix cache is emptied over and over.**

    Start a server on a nano model, check it, stop it; with stock SGLang's result beside it:

        python -m bench verify --serve "--memory-org s2" --quick
        python -m bench verify --serve "--memory-org s2" --serve "--memory-org d0" --stock

    A running server, with prompts of your own:

        python -m bench verify --url http://127.0.0.1:30000 --prompts run/first/workload.jsonl

    Paths: cold, warm, eviction, decode boundary, restore, resume, concurrent, retraction. A path that could not be
    brought about is reported as not exercised, never as equal.

    | exit status | |
    |---|---|
    | 0 | equal, or within the variation that the reference shows without a cache |
    | 1 | different |
    | 2 | a mistake in the command |
    | 3 | no verdict: the server ended or did not answer, or no answer used the cache |
    | 130 | stopped with Ctrl-C |
    """
    from rich.console import Console

    from bench.environment import statement
    from bench.verify.page import page as markdown
    from bench.verify.records import summary, write_result
    from bench.verify.report import EXIT_CODES, arm_table, arms_table, remarks, sentence
    from bench.verify.session import VerifySettings, run_verify

    settings = VerifySettings(
        url=url,
        serve=serve or [],
        stock=stock,
        quick=quick,
        model=model,
        dtype=dtype,
        device=device,
        grid_tokens=grid,
        prompts=prompts,
        vocab_tokens=vocab_tokens,
        concurrent=concurrent,
        restores=restores,
        only=only or [],
        seed=seed,
    )
    path = out or Path("run") / time.strftime("verify-%Y%m%d-%H%M%S.json")
    console = Console(stderr=True)
    command = ["python", "-m", "bench", *context.find_root().obj]
    try:
        result = run_verify(settings, command=command, models_folder=models, logs=path.with_suffix(""), console=console)
    except ServerError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(3) from error
    write_result(result, path)
    if page is not None:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(markdown(result), encoding="utf-8")
    if as_json:
        import msgspec

        print(msgspec.json.encode(summary(result)).decode())
    else:
        output = Console()
        for arm in result.arms:
            output.print(arm_table(arm))
            for line in remarks(arm):
                output.print(f"- {line}", highlight=False)
        if len(result.arms) > 1:
            output.print(arms_table(result))
        for arm in result.arms:
            output.print(sentence(arm) + (" (beside, does not count)" if arm.arm in result.beside else ""))
        output.print(f"{result.seconds:.0f} s; token ids and log-probabilities are in {path}")
        output.print(statement(result.environment))
    raise typer.Exit(EXIT_CODES[result.verdict])
