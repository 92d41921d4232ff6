"""A verification as a page of the documentation, in Markdown. Pure."""

from __future__ import annotations

from bench.environment import statement
from bench.verify.compare import Verdict
from bench.verify.records import ArmResult, PathResult, VerifyResult
from bench.verify.report import remarks, sentence


def page(result: VerifyResult) -> str:
    """Return the page: how it was made, all arms side by side, the sentences, and where they differ first."""
    git = result.environment["git"] or {"commit": "unknown", "dirty": False}
    versions = ", ".join(f"{name} {version}" for name, version in sorted(result.environment["versions"].items()))
    names = list(dict.fromkeys(path.path for arm in result.arms for path in arm.paths))
    lines = [
        "# Verification",
        "",
        "Written by the command below. A cell has the verdict, the number of comparisons and the largest difference of",
        "a log-probability among them; what the paths do is in [verify](../verify.md).",
        "",
        f"- Command: `{' '.join(result.command)}`",
        f"- Commit: `{git['commit']}`{', with uncommitted changes' if git['dirty'] else ''}",
        f"- Versions: {versions}",
        f"- {statement(result.environment)}",
        "",
        "| path | " + " | ".join(_heading(arm, result) for arm in result.arms) + " |",
        "|---|" + "---|" * len(result.arms),
    ]
    for name in names:
        cells = [next((_cell(path) for path in arm.paths if path.path == name), "-") for arm in result.arms]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", *(f"- {sentence(arm)}." for arm in result.arms), ""]
    for arm in result.arms:
        found = remarks(arm)
        if found:
            lines += [f"## {_heading(arm, result)}", "", *(f"- {line}" for line in found), ""]
    return "\n".join(lines)


def _heading(arm: ArmResult, result: VerifyResult) -> str:
    return f"{arm.arm}{' (beside)' if arm.arm in result.beside else ''}, grid {arm.grid_tokens:,}"


def _cell(path: PathResult) -> str:
    if path.verdict is Verdict.NOT_EXERCISED:
        return path.verdict.value
    made = sum(path.counts.values()) - path.counts[Verdict.NOT_EXERCISED.value]
    size = path.max_logprob_difference
    shown = "" if not size else f", {size:.1e}"
    return f"{path.verdict.value}, {made}{shown}"
