"""The planner's answer as tables for a terminal. Organizations are columns, so four fit in 80 characters."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

from rich import box
from rich.console import Console
from rich.table import Table

from sgl_hybrid.memory.organization import ConvPlacement
from sgl_hybrid.plan.answer import Answer, OrganizationAnswer, PageAnswer
from sgl_hybrid.plan.paper_tables import Cell

_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def size(num_bytes: int | None) -> str:
    """Return bytes as the largest binary unit of at least one, exact when it is a whole number of it."""
    if num_bytes is None:
        return ""
    for unit, factor in _UNITS:
        if num_bytes >= factor:
            value = num_bytes / factor
            return f"{value:.0f} {unit}" if num_bytes % factor == 0 else f"{value:.2f} {unit}"
    return f"{num_bytes} B"


def print_answer(answer: Answer, console: Console) -> None:
    """Print the state of the model, the organizations, the D0 split and the page search."""
    console.print(
        f"[bold]{answer.model}[/bold] ({answer.family}), tensor parallel {answer.tp_size}: {answer.num_layers} layers, "
        f"{answer.num_attention_layers} with attention, {answer.num_recurrent_layers} recurrent",
        highlight=False,
    )
    console.print(
        f"per layer: KV {size(answer.kv_token_bytes)}/token, recurrent {size(answer.ssm_bytes)}, "
        f"convolution {size(answer.conv_bytes)}, composite {size(answer.composite_bytes)}; "
        f"planes: {answer.planes}, budget unit {size(answer.budget_unit_bytes)} per plane",
        highlight=False,
    )
    if answer.budget is not None:
        console.print(
            f"budget {answer.budget}: {size(answer.budget_plane_bytes)} per plane, "
            f"{size(answer.budget_total_bytes)} in total",
            highlight=False,
        )
    console.print(_organizations(answer))
    for entry in answer.organizations:
        if entry.refusal:
            console.print(f"{entry.organization.upper()}: {entry.refusal}", highlight=False)
    if answer.leanest is not None:
        console.print(_verdict(answer), highlight=False)
    if answer.split is not None:
        console.print(_split(answer), highlight=False)
    if answer.searches:
        console.print(_searches(answer))


def print_cells(title: str, cells: list[Cell], console: Console) -> None:
    """Print one table of the paper, a row per cell group, printed and computed values side by side."""
    table = Table(title=title, box=box.SIMPLE)
    for name in ("row", "value", "paper", "computed", "equal"):
        table.add_column(name, justify="right" if name in ("paper", "computed") else "left")
    for row, group in groupby(cells, key=lambda cell: cell.row):
        for index, cell in enumerate(group):
            table.add_row("" if index else row, cell.column, cell.paper, cell.computed, "yes" if cell.equal else "NO")
    console.print(table)


def _organizations(answer: Answer) -> Table:
    shown = [entry for entry in answer.organizations if entry.refusal is None]
    table = Table(box=box.SIMPLE)
    table.add_column("")
    for entry in shown:
        table.add_column(entry.organization.upper(), justify="right")

    def row(label: str, cell: Callable[[OrganizationAnswer], str]) -> None:
        cells = [cell(entry) for entry in shown]
        if any(cells):
            table.add_row(label, *cells)

    row("tokens/attention page", lambda e: str(e.page_tokens))
    row("grid (tokens)", lambda e: str(e.checkpoint_interval))
    row("attention page", lambda e: size(e.attention_page_bytes))
    row("recurrent page", lambda e: size(e.recurrent_page_bytes))
    row("groups x members", lambda e: f"{e.groups} x {e.members}")
    row("convolution state", _conv)
    row("512 tokens, total", lambda e: size(e.object_total_bytes))
    row("checkpoint, total", lambda e: size(e.checkpoint_total_bytes))
    if answer.budget is not None:
        table.add_section()
        row("pages", lambda e: _count(e.units.num_pages if e.units else None))
        row("attention pages", lambda e: _count(e.units.num_attention_pages if e.units else None))
        row("checkpoints", lambda e: _count(e.units.num_checkpoints if e.units else None))
        row("bytes per plane", lambda e: size(e.units.plane_bytes) if e.units else "")
        row("bytes in total", lambda e: size(e.units.total_bytes) if e.units else "")
    if any(entry.mix for entry in shown):
        table.add_section()
        row("mix per plane", lambda e: size(e.mix.plane_bytes) if e.mix else "")
        row("mix in total", lambda e: size(e.mix.total_bytes) if e.mix else "")
        row("mix efficiency", lambda e: f"{e.mix.efficiency:.2%}" if e.mix else "")
        row("mix fits", _fits)
        row("copies that fit", lambda e: _count(e.mix.capacity if e.mix else None))
    row("smallest budget", lambda e: size(e.minimum_total_bytes))
    return table


def _count(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _conv(entry: OrganizationAnswer) -> str:
    if entry.conv_placement == ConvPlacement.SLAB:
        return f"{entry.slots_per_slab} x {size(entry.conv_stride_bytes)}"
    return "own page" if entry.conv_placement == ConvPlacement.PAGE else "inside"


def _fits(entry: OrganizationAnswer) -> str:
    if entry.mix is None or entry.mix.pools is None:
        return ""
    short = [pool.pool for pool in entry.mix.pools if not pool.fits]
    return f"no: {', '.join(short)}" if short else "yes"


def _verdict(answer: Answer) -> str:
    least = f"fewest bytes for the mix: {str(answer.leanest).upper()}"
    if answer.fitting is None:
        return least
    names = ", ".join(name.upper() for name in answer.fitting) or "none"
    return f"fits the budget, most copies first: {names}; {least}"


def _split(answer: Answer) -> str:
    split = answer.split
    if split is None:
        return ""
    line = (
        f"D0 split: attention {split.used:.6g} of the bytes; worst stranded share {split.worst_stranded_used:.1%} over "
        f"{split.low_tokens_per_checkpoint:.0f} to {split.high_tokens_per_checkpoint:.0f} tokens per checkpoint; "
        f"auto {split.auto:.6f} ({split.worst_stranded_auto:.1%})"
    )
    if split.paper is not None and split.auto_minus_paper is not None:
        line += (
            f", paper {split.paper:.6f} ({split.worst_stranded_paper:.1%}), auto - paper {split.auto_minus_paper:+.4f}"
        )
    return line


def _searches(answer: Answer) -> Table:
    table = Table(title="page search for the mix (least waste first)", box=box.SIMPLE)
    for name in ("", "tokens", "page", "planes", "members", "conv slots", "efficiency"):
        table.add_column(name, justify="left" if not name else "right")

    def add(label: str, page: PageAnswer) -> None:
        table.add_row(
            label,
            str(page.page_tokens),
            size(page.page_bytes),
            str(page.planes),
            str(page.members),
            f"{page.slots_per_slab} x {size(page.conv_stride_bytes)}",
            f"{page.efficiency:.2%}",
        )

    for search in answer.searches or ():
        for index, page in enumerate(search.best):
            add("" if index else search.organization.upper(), page)
        if search.preset is not None:
            add("  preset", search.preset)
        table.add_section()
    return table
