"""Arguments of `python -m sgl_hybrid plan`. A mistake is one line on stderr and exit status 2.

rich is imported only to print tables, so `--json` and every error answer without it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

import msgspec

from sgl_hybrid.errors import SettingError
from sgl_hybrid.memory.budget import parse_budget
from sgl_hybrid.memory.cost import parse_mix
from sgl_hybrid.memory.organization import ORGANIZATIONS, organization_of
from sgl_hybrid.memory.presets import PRESETS, model_geometry
from sgl_hybrid.plan.answer import Answer, Request, answer
from sgl_hybrid.plan.paper_tables import TABLES, Cell

PAPER_MODEL = "falcon-h1-7b"


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 0, or 2 after a user's mistake."""
    arguments = _parser().parse_args(_attach_negative_values(sys.argv[1:] if argv is None else argv))
    try:
        return _plan(arguments)
    except SettingError as error:
        print(f"python -m sgl_hybrid plan: error: {error}", file=sys.stderr)
        return 2


def _attach_negative_values(argv: Sequence[str]) -> list[str]:
    """Join "--budget -4GiB" to "--budget=-4GiB", so that a negative value is refused as a value, with what is valid."""
    joined: list[str] = []
    for word in argv:
        if word[:1] == "-" and word[1:2].isdigit() and joined and joined[-1].startswith("--"):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m sgl_hybrid", description="Plan state memory of hybrid attention+SSM models.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="plan")
    plan = commands.add_parser(
        "plan",
        help="cost of a model's state in each organization and what a budget buys",
        description="Show what a model's state costs in each memory organization, what a budget buys and which page "
        "wastes least. Nothing is started and no weights are read.",
        epilog=f"Presets: {', '.join(PRESETS)}.",
    )
    plan.add_argument("--model", metavar="NAME|PATH", help="a preset, a config.json or a folder with one")
    plan.add_argument(
        "--budget",
        metavar="SIZE",
        help="state memory over all layers (4GiB, 512MiB, bytes), per plane (100MiB/layer) or a label (b63)",
    )
    plan.add_argument("--org", metavar="ORG", action="append", help=f"one or more of {','.join(ORGANIZATIONS)}")
    plan.add_argument(
        "--mix",
        metavar="COUNTS",
        help="attention=120,checkpoints=16[,requests=8]: objects of 512 tokens, checkpoints, and sequences whose last "
        "block is half empty on average; also searches page sizes",
    )
    plan.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel size (default 1)")
    plan.add_argument("--state-dtype", default="bfloat16", metavar="DTYPE", help="recurrent state (default bfloat16)")
    plan.add_argument("--kv-dtype", default="bfloat16", metavar="DTYPE", help="attention KV (default bfloat16)")
    plan.add_argument("--conv-dtype", default="bfloat16", metavar="DTYPE", help="convolution state (default bfloat16)")
    plan.add_argument("--page-tokens", type=int, metavar="N", help="tokens per page (of d0 only when asked alone)")
    plan.add_argument("--checkpoint-interval", type=int, metavar="N", help="checkpoint grid in tokens, likewise")
    plan.add_argument("--attention-fraction", metavar="F", help="d0: a number in (0, 1), auto or paper")
    plan.add_argument("--context", type=int, metavar="N", help="also show the smallest budget of one such request")
    plan.add_argument("--table", choices=sorted(TABLES), help="reproduce a table of the paper beside computed values")
    plan.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


def _plan(arguments: argparse.Namespace) -> int:
    if arguments.model is None and arguments.table is None:
        raise SettingError(f"expected --model, a preset or a path to a config.json; presets: {', '.join(PRESETS)}")
    geometry = model_geometry(
        arguments.model or PAPER_MODEL,
        kv_dtype=arguments.kv_dtype,
        ssm_dtype=arguments.state_dtype,
        conv_dtype=arguments.conv_dtype,
        tp_size=arguments.tp,
    )
    if arguments.table is not None:
        _show(TABLES[arguments.table](geometry), arguments, title=f"Table {arguments.table} for {geometry.name}")
        return 0
    request = Request(
        geometry=geometry,
        organizations=_organizations(arguments.org),
        budget=None if arguments.budget is None else parse_budget(arguments.budget, geometry),
        mix=None if arguments.mix is None else parse_mix(arguments.mix),
        context_tokens=arguments.context,
        page_tokens=arguments.page_tokens,
        checkpoint_interval=arguments.checkpoint_interval,
        attention_fraction=arguments.attention_fraction,
    )
    _show(answer(request), arguments)
    return 0


def _organizations(asked: list[str] | None) -> tuple[str, ...]:
    """Return the organizations of `--org` ("s2", "s1,d0", repeated) in registry order; all when none is given."""
    names = [part.strip().lower() for value in asked or ORGANIZATIONS for part in value.split(",")]
    wanted = {organization_of(name).name for name in names}
    return tuple(name for name in ORGANIZATIONS if name in wanted)


def _show(result: Answer | list[Cell], arguments: argparse.Namespace, *, title: str = "") -> None:
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(result), indent=2).decode())
        return
    from rich.console import Console

    from sgl_hybrid.plan.render import print_answer, print_cells

    console = Console()
    if isinstance(result, Answer):
        print_answer(result, console)
    else:
        print_cells(title, result, console)
