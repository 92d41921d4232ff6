"""The answer to each question in one sentence, made from the rows of the statistics and nothing else.

A row is `confirmed` when its corrected test rejects, `seen` when only its 95 % interval excludes zero, `open` when it
does not, `single` with one seed and `absent` without a pair. With few seeds no test can reject; the sentence says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from bench.metrics import METRICS
from bench.stats.contrasts import Kind
from bench.stats.decisions import LEVEL, least_p
from bench.stats.intervals import CONTAINMENT_MARGIN
from bench.stats.rows import Row

Strength = Literal["confirmed", "seen", "open", "single", "absent"]

_ABOUT: dict[str, tuple[Kind, ...]] = {
    "q3": ("sharing",),
    "q6": ("preselected", "headroom"),
    "q9": ("reuse",),
    "auto": ("best-fixed",),
    "split": ("split",),
    "pinning": ("pinning",),
}
"""What the sentence of a case is about; where the outcomes hold none of it, and in the other cases, it is the arms."""
_CHANGES: tuple[Kind, ...] = ("bursts", "caps")
"""What is told besides: how the load changes what the sentence is about. The paper tests none of it."""
_BETWEEN_ARMS = ("arms", "rival", "preselected")
AUTO_MARGIN_PCT = 3.0
"""How far the automatic headroom may stay below the best fixed one. Source: a goal of this project."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """One case in one sentence. `strength` is that of its strongest row."""

    case: str
    sentence: str
    strength: Strength


def verdict(
    case: str,
    rows: Sequence[Row],
    *,
    metric: str = "output_tokens_per_s",
    beside: Mapping[str, Sequence[Row]] | None = None,
) -> Verdict:
    """Return the sentence for a case from the rows of `analyse`, which may hold other cases too.

    metric: the one that was analysed; its direction decides what counts as ahead. beside: the rows of other metrics by
    what the sentence calls them, where the question is whether a gain goes with less input work (Q2), or what it costs.
    """
    chosen = _chosen(case, [row for row in rows if row.case == case])
    strengths = [strength(row) for row in chosen]
    if all(found == "absent" for found in strengths):
        return Verdict(case=case, sentence="Not measured: no seed has both sides of a comparison.", strength="absent")
    groups: dict[str, list[Row]] = {}
    for row in chosen:
        groups.setdefault(row.name, []).append(row)
    parts = [_group(name, held, metric) for name, held in groups.items()]
    for name, others in (beside or {}).items():
        parts += _beside(name, [row for row in others if row.case == case and row.kind == "arms"])
    sentence = "; ".join(parts)
    return Verdict(
        case=case,
        sentence=f"{sentence[0].upper()}{sentence[1:]}; {_caveat(chosen)}.",
        strength=next(grade for grade in ("confirmed", "seen", "open", "single") if grade in strengths),
    )


def strength(row: Row) -> Strength:
    """Return how much a row says."""
    if row.num_seeds == 0:
        return "absent"
    if row.interval is None:
        return "single"
    if row.decision is not None and row.decision.rejected:
        return "confirmed"
    return "seen" if row.interval.excludes_zero else "open"


def phrase(row: Row) -> str:
    """Return effect and interval, such as `+8.9 % (+5.1 to +12.9)`; percentage points are `points`."""
    if row.effect is None:
        return "not measured"
    unit = "points" if row.unit == "pp" else "%"
    if row.interval is None:
        return f"{row.effect:+.1f} {unit} (one seed)"
    return f"{row.effect:+.1f} {unit} ({row.interval.low:+.1f} to {row.interval.high:+.1f})"


def _chosen(case: str, rows: Sequence[Row]) -> list[Row]:
    """Return the rows that the sentence is about: tested ones, or else descriptive ones."""
    asked = [[row for row in rows if row.kind in kinds] for kinds in (_ABOUT.get(case, ("arms",)), ("arms",))]
    tested = [[row for row in held if row.family is not None] for held in asked]
    chosen = next((held for held in (*tested, *asked) if held), [])
    return [*chosen, *(row for row in rows if row.kind in _CHANGES)]


def _group(name: str, rows: Sequence[Row], metric: str) -> str:
    """Return the clause of one comparison over all the places where it was made."""
    if rows[0].kind in _BETWEEN_ARMS:
        first, _, rest = name.partition("/")
        second, _, how = rest.partition(",")
        said = {
            "ahead": f"is ahead of {second}",
            "behind": f"is behind {second}",
            "level": f"is within {CONTAINMENT_MARGIN:g} % of {second} by the 90 % interval",
            "open": f"is not told apart from {second}",
            "once": f"ran once beside {second}",
            "absent": f"was not measured beside {second}",
        }
        by_side = {side: [row for row in rows if _side(row, metric) == side] for side in said}
        clauses = [f"{said[side]} at {_places(held)}" for side, held in by_side.items() if held]
        return f"{first}{f' ({how.strip()})' if how else ''} {_joined(clauses)}"
    about, _, change = name.partition(", ")
    subject = f"the ratio {about}" if "/" in about else about
    return f"with {change}, {subject} changes by {_places(rows)}"


def _beside(subject: str, rows: Sequence[Row]) -> list[str]:
    """Return the clause about another metric, if it was measured."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row.effect is not None:
            groups.setdefault(row.name, []).append(row)
    if not groups:
        return []
    return [f"{subject} changes " + _joined([f"{name} by {_each(held)}" for name, held in groups.items()])]


def _side(row: Row, metric: str) -> str:
    found = strength(row)
    if row.effect is None or found in ("absent", "single"):
        return "absent" if row.effect is None else "once"
    if found == "open":
        return "level" if row.contained else "open"
    better = METRICS[metric].higher_is_better is not False
    return "ahead" if (row.effect > 0) == better else "behind"


def _places(rows: Sequence[Row]) -> str:
    if rows[0].kind in _BETWEEN_ARMS:
        return _joined([f"{row.where} ({_inside(row)})" if row.effect is not None else row.where for row in rows])
    return _each(rows)


def _each(rows: Sequence[Row]) -> str:
    return _joined([f"{phrase(row)} at {row.where}{_against_margin(row)}" for row in rows])


def _against_margin(row: Row) -> str:
    """Say on which side of the margin the automatic headroom is, and whether its interval is there too."""
    if row.kind != "best-fixed" or row.effect is None:
        return ""
    below = row.effect < -AUTO_MARGIN_PCT
    side = f"{'' if below else 'not '}more than {AUTO_MARGIN_PCT:g} % below"
    if row.interval is None:
        return f" ({side})"
    whole = row.interval.high < -AUTO_MARGIN_PCT if below else row.interval.low >= -AUTO_MARGIN_PCT
    return f" ({side}; {'all of its interval too' if whole else 'part of its interval is on the other side'})"


def _inside(row: Row) -> str:
    """Return the phrase without brackets of its own."""
    return phrase(row).replace(" (", ", ").rstrip(")")


def _caveat(rows: Sequence[Row]) -> str:
    seeds = sorted({row.num_seeds for row in rows if row.num_seeds})
    number = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    seeds_text = f"{number} paired seed{'' if seeds == [1] else 's'}"
    tested = [row for row in rows if row.decision is not None]
    missing = sum(row.num_planned - row.num_seeds for row in tested or rows)
    lost = f", {missing} planned pair{'' if missing == 1 else 's'} without a measurement" if missing else ""
    if seeds == [1]:
        return f"{seeds_text}{lost}: an example, no interval and no test"
    intervals = f"95 % intervals over {seeds_text}{lost}"
    if not tested:
        return f"{intervals}, descriptive"
    rest = ", the changes descriptive" if len(tested) < len(rows) else ""
    size = max(row.family_size for row in tested)
    least = min(row.num_looks * least_p(row.num_seeds) if row.num_seeds else 1.0 for row in tested)
    if min(1.0, size * least) > LEVEL:
        return f"{intervals}, too few for the sign-flip test (least p {least:.2g}, {size} tests){rest}"
    rejected = sum(row.decision is not None and row.decision.rejected for row in tested)
    if size == 1:
        return f"{intervals}, the sign-flip test {'holds' if rejected else 'does not hold'}{rest}"
    return f"{intervals}, {rejected} of {len(tested)} hold after Holm's correction of {size} tests{rest}"


def _joined(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
