"""From a report to files: `index.html`, `choose.html`, `report.md`, `choose.md`, `outcomes.parquet`, `effects.parquet`.

The HTML pages carry their style and figures inside and load nothing. Numbers are formatted here and nowhere else, so
HTML and Markdown print the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import msgspec

from bench.arms import ARMS
from bench.metrics import METRICS
from bench.outcome import CellOutcome
from bench.report.choice import choices
from bench.report.gather import SHOWN_METRICS, VIEW_METRICS, ArmLine, Compared, Report
from bench.stats.contrasts import arm_title
from bench.stats.rows import Row
from bench.stats.verdicts import phrase, strength


class Drawing(NamedTuple):
    """One figure inside a page. `svg` is the whole element; `text` says in a sentence what it shows."""

    title: str
    svg: str
    text: str


def write_report(report: Report, folder: Path, drawings: Sequence[Drawing] = ()) -> list[Path]:
    """Write every file of the report into `folder`, made if missing, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("bench.report"),
        autoescape=lambda name: name is not None and name.endswith(".html.j2"),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"title": arm_title, "signed": _signed, "ratio": _ratio}
    content = {
        "report": report,
        "choices": choices(report),
        "drawings": drawings,
        "effects": {case.case: [_effect(compared) for compared in case.effects] for case in report.cases},
        "arm_header": [_column(name) for name in SHOWN_METRICS],
        "arm_rows": [_arm_row(line) for line in report.arms],
        "view_header": [_column(name) for name in VIEW_METRICS],
        "view_rows": [_view_row(line) for line in report.arms],
        "summaries": {arm.name: arm.summary for arm in ARMS.values()},
        "versions": _versions(report),
    }
    pages = ("index.html", "choose.html", "report.md", "choose.md")
    written = []
    for name in pages:
        path = folder / name
        path.write_text(environment.get_template(f"{name}.j2").render(content), encoding="utf-8")
        written.append(path)
    return [*written, *_write_tables(report, folder)]


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


class EffectLine(NamedTuple):
    """One contrast as text. `p_relative` is of the effects as shown, uncorrected; `grade` is the strength of ours."""

    name: str
    where: str
    ours: str
    seeds: str
    p: str
    p_relative: str
    paper: str
    source: str
    grade: str


def _effect(compared: Compared) -> EffectLine:
    row, paper = compared.ours, compared.paper
    theirs, source = "-", ""
    if paper is not None:
        unit = "points" if row.unit == "pp" else "%"
        bounds = "" if paper.low is None or paper.high is None else f" ({paper.low:+.1f} to {paper.high:+.1f})"
        tested = "" if paper.p is None else f", p {paper.p:.3f}"
        theirs, source = f"{paper.effect:+.1f} {unit}{bounds}{tested}", paper.source
    relative = "-" if row.p_relative is None else f"{row.p_relative:.3g}"
    return EffectLine(row.name, row.where, phrase(row), _seeds(row), _p(row), relative, theirs, source, strength(row))


def _seeds(row: Row) -> str:
    return f"{row.num_seeds} ({row.num_positive} up, {row.num_negative} down)" if row.num_seeds else "0"


def _p(row: Row) -> str:
    if row.decision is not None:
        looks = ", two looks" if row.num_looks == 2 else ""
        return f"{row.decision.adjusted_p:.3g} (Holm, {row.family_size}{looks})"
    return "-" if row.p is None else f"{row.p:.3g}, uncorrected"


def _arm_row(line: ArmLine) -> list[str]:
    """Return the cells of one row of the table of arms."""
    share = "-" if line.share_of_ceiling is None else f"{100 * line.share_of_ceiling:.0f} %"
    seeds = f"{line.num_seeds}" + (f" + {line.num_failed} failed" if line.num_failed else "")
    return [line.case, line.where, arm_title(line.arm), seeds, share, *(_mean(line, name) for name in SHOWN_METRICS)]


def _view_row(line: ArmLine) -> list[str]:
    """Return the cells of one row of the table of views."""
    return [line.case, line.where, arm_title(line.arm), *(_mean(line, name) for name in VIEW_METRICS)]


def _mean(line: ArmLine, name: str) -> str:
    value = line.means.get(name)
    if value is None:
        return "-"
    if _in_seconds(name):
        return f"{value / 1000:.2f}"
    return f"{100 * value:.1f} %" if name.endswith("_share") else f"{value:,.1f}"


def _in_seconds(name: str) -> bool:
    """Return whether a metric in milliseconds is printed in seconds: latencies but TPOT are."""
    return METRICS[name].unit == "ms" and not name.startswith(("tpot", "host"))


def _column(name: str) -> str:
    """Return a heading with its unit."""
    unit = METRICS[name].unit
    words = name.removesuffix("_ms").removesuffix("_per_s").replace("_", " ")
    short = {"1": "", "requests": "", "ms": " [s]" if _in_seconds(name) else " [ms]"}
    return words + short.get(unit, f" [{unit}]")


def _versions(report: Report) -> list[tuple[str, str]]:
    """Return what every session ran with, one line a thing, different values side by side."""
    seen: dict[str, list[str]] = {}
    for session in report.sessions:
        git = session.environment.get("git") or {}
        commit = f"{git.get('commit', 'no checkout')[:12]}{' with changes' if git.get('dirty') else ''}"
        machine = session.environment["machine"]
        where = f"{machine['cpu']}, {machine['num_cores']} cores, {machine['memory_gib']} GiB"
        found = {"commit": commit, "machine": where, **session.environment["versions"]}
        for name, value in found.items():
            seen.setdefault(name, [])
            if value not in seen[name]:
                seen[name].append(value)
    return [(name, ", ".join(values)) for name, values in seen.items()]


def _write_tables(report: Report, folder: Path) -> list[Path]:
    """Write all attempts and all effects as Parquet tables with one column per number."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    effects = [_flat_effect(compared) for case in report.cases for compared in case.effects]
    written = []
    for name, rows in (("outcomes", [_flat_outcome(outcome) for outcome in report.outcomes]), ("effects", effects)):
        columns = list(dict.fromkeys(key for row in rows for key in row))
        table = pa.table({column: [row.get(column) for row in rows] for column in columns})
        path = folder / f"{name}.parquet"
        pq.write_table(table, path, compression="zstd")
        written.append(path)
    return written


def _flat_outcome(outcome: CellOutcome) -> dict[str, Any]:
    fields = msgspec.structs.asdict(outcome)
    metrics, counters = fields.pop("metrics"), fields.pop("counters")
    return {**fields, **metrics, **{f"counter.{name}": value for name, value in counters.items()}}


def _flat_effect(compared: Compared) -> dict[str, Any]:
    row, paper = compared.ours, compared.paper
    fields = msgspec.structs.asdict(row)
    at, interval, display, decision = (fields.pop(name) for name in ("at", "interval", "display", "decision"))
    return {
        **at._asdict(),
        **fields,
        "low": None if interval is None else interval.low,
        "high": None if interval is None else interval.high,
        "display_low": None if display is None else display.low,
        "display_high": None if display is None else display.high,
        "adjusted_p": None if decision is None else decision.adjusted_p,
        "rejected": None if decision is None else decision.rejected,
        "paper_effect": None if paper is None else paper.effect,
        "paper_low": None if paper is None else paper.low,
        "paper_high": None if paper is None else paper.high,
        "paper_p": None if paper is None else paper.p,
        "paper_source": None if paper is None else paper.source,
    }
