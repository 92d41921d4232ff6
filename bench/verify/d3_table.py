"""The correctness checks that the paper reports, and the page that shows ours beside them. Pure.

Source of the paper's column: table D-3 and section D.5.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from bench.environment import statement


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One row: what is checked, what the paper reports, what came out here, over what, and by which command.

    passed, total: cases without a difference or a failure, of all.
    """

    name: str
    paper: str
    passed: int
    total: int
    scope: str
    command: str


PAPER = {
    "ssm kernel": "exact at batches 8, 32, 53 (bf16 output, fp32 state)",
    "conv kernel": "output and state compared",
    "state bytes": "agreement at depth 1200 (one thread, eager, seed 0)",
    "slab reclaim": "",
    "forced reclaim": "28 conditions, 4 of them references, 24 comparisons (Granite)",
    "pre-logit 600 to 1800": "18 of 18 hashes match",
    "pre-logit 2400": "0 of 6 hashes match, 2 of 6 token sequences",
    "concurrent repeats": "11 of 16 token sequences, 6 of 16 states agree",
    "reference repeats": "5 of 5 repeat sets without instability",
    "isolation": "1 of 5 pairs eligible (S2), 0 of 5 (PGK); not compared",
    "accounting": "96 of 96 cells complete; token sequences not kept",
    "allocator": "0 violations in 24 conditions",
}
"""What the paper reports, by check."""


def page(checks: Sequence[Check], *, command: str, environment: dict[str, Any]) -> str:
    """Return the page in Markdown: how it was made, and a row for each check."""
    git = environment["git"] or {"commit": "unknown", "dirty": False}
    versions = environment["versions"]
    lines = [
        "# The paper's correctness checks, repeated",
        "",
        "The paper's checks cover different units, with different references (its table D-3 and section D.5). Here",
        "each is repeated on the units of this project, served from nano models with random weights. A case passes",
        "only where every compared value is equal bit for bit, or every token where it says tokens. The command below",
        "wrote this page; what a check does and the servers' flags are in `bench/verify/d3.py`.",
        "",
        f"- Command: `{command}`",
        f"- Commit: `{git['commit']}`{', with uncommitted changes' if git['dirty'] else ''}",
        f"- Versions: {', '.join(f'{name} {version}' for name, version in sorted(versions.items()))}",
        f"- {statement(environment)}",
        "",
        "| check | paper | here | of | over what | by |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {check.name} | {check.paper} | {check.passed} | {check.total} | {check.scope} | `{check.command}` |"
        for check in checks
    ]
    return "\n".join(lines) + "\n"
