"""What a user reads of a verification: a table for each arm, what differs first, and a sentence for each arm."""

from __future__ import annotations

from rich.table import Table

from bench.verify.compare import Verdict
from bench.verify.records import REFERENCE, ArmResult, Finding, PathResult, VerifyResult

EXIT_CODES = {Verdict.EQUAL: 0, Verdict.WITHIN: 0, Verdict.DIFFERENT: 1, Verdict.NOT_EXERCISED: 3}
"""Exit status by verdict; 2 is a mistake in the command, 3 also a server that ended or did not answer."""


def arm_table(arm: ArmResult) -> Table:
    """Return a row for each path of one arm."""
    title = f"{arm.arm}, a boundary every {arm.grid_tokens:,} tokens"
    table = Table("path", "result", title=title, title_justify="left")
    for column in ("equal", "within", "different", "not exercised", "largest difference"):
        table.add_column(column, justify="right")
    for path in arm.paths:
        equal, within, missed, different = (f"{path.counts[verdict.value]:,}" for verdict in Verdict)
        table.add_row(path.path, path.verdict.value, equal, within, different, missed, _size(path))
    return table


def arms_table(result: VerifyResult) -> Table:
    """Return the verdicts of all arms side by side: a row for each path, a column for each arm."""
    table = Table("path", title="side by side", title_justify="left")
    verdicts = []
    for arm in result.arms:
        table.add_column(arm.arm)
        verdicts.append({path.path: path for path in arm.paths})
    for name in dict.fromkeys(path.path for arm in result.arms for path in arm.paths):
        table.add_row(name, *(_cell(paths[name]) if name in paths else "-" for paths in verdicts))
    return table


def remarks(arm: ArmResult) -> list[str]:
    """Return a line for each path that differs or was not exercised: where, or why."""
    lines = []
    for path in arm.paths:
        if path.first_difference is not None:
            lines.append(f"{path.path}, {path.verdict.value}: {where(path.first_difference)}")
        if path.reason is not None:
            lines.append(f"{path.path}, not exercised {path.counts[Verdict.NOT_EXERCISED.value]} times: {path.reason}")
    return lines


def sentence(arm: ArmResult) -> str:
    """Return the verdict on one arm in one sentence; paths that measure the reference itself are not counted."""
    counted = [path for path in arm.paths if path.path not in REFERENCE]
    made = [path for path in counted if path.verdict is not Verdict.NOT_EXERCISED]
    missed = [path.path for path in counted if path.verdict is Verdict.NOT_EXERCISED]
    rest = f"; not exercised: {', '.join(missed)}" if missed else ""
    verdict = arm.verdict
    if verdict is Verdict.NOT_EXERCISED:
        return f"{arm.arm}: no verdict: no answer used the cache on any of {len(counted)} paths"
    if verdict is Verdict.EQUAL:
        return f"{arm.arm}: equal on {len(made)} of {len(made)} paths: a cache hit changed nothing but the time{rest}"
    if verdict is Verdict.WITHIN:
        within = [path.path for path in made if path.verdict is Verdict.WITHIN]
        return (
            f"{arm.arm}: no difference that the reference does not show itself: bit for bit equal on "
            f"{len(made) - len(within)} of {len(made)} paths, within its own variation on: {', '.join(within)}{rest}"
        )
    different = [path for path in made if path.verdict is Verdict.DIFFERENT]
    first = different[0].first_difference
    return (
        f"{arm.arm}: DIFFERENT on {len(different)} of {len(made)} paths ({', '.join(p.path for p in different)}); "
        f"first: {different[0].path}, {'' if first is None else where(first)}, "
        f"organization {arm.organization or 'none (stock SGLang)'}{rest}"
    )


def where(finding: Finding) -> str:
    """Return where an answer departs from the reference."""
    return (
        f"{finding.kind} at position {finding.position:,} of request {finding.request} "
        f"({finding.step}; hit depth {finding.cached_tokens:,})"
    )


def _cell(path: PathResult) -> str:
    return path.verdict.value if path.verdict is Verdict.NOT_EXERCISED else f"{path.verdict.value} ({_size(path)})"


def _size(path: PathResult) -> str:
    size = path.max_logprob_difference
    return "-" if size is None else "0" if size == 0 else f"{size:.1e}"
