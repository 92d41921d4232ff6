"""Which comparisons the outcomes of a campaign hold.

A contrast is found by structure: two arms at one condition, or the same two arms at two conditions (an interaction), or
one arm under two policies. `primary` marks those that the paper tests in a family; what is looked at besides (middle
sharing levels, further rates and headrooms, low load) stays descriptive however large it is.
Source: paper appendices B.5 (families), B.12 (confirmation), E.3 to E.6 and E.13, section 4.5 (Q9).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from bench.cases import CASES
from bench.outcome import CellOutcome, Condition, adopted
from bench.stats.conditions import labels, measured, measurements_of
from bench.stats.effects import Effects, highest, interaction, relative
from bench.variants import AUTO_HEADROOM

Kind = Literal[
    "arms",
    "rival",
    "sharing",
    "budget",
    "headroom",
    "preselected",
    "fixed",
    "best-fixed",
    "split",
    "pinning",
    "reuse",
    "bursts",
    "caps",
]

OWN_PAIRS = (
    ("s1", "s0"),
    ("s2", "s1"),
    ("d0", "s2"),
    ("d0-m512", "s2"),
    ("s2-retained", "s2"),
    ("s2-transient", "s2"),
    ("s2-value", "s2"),
    ("s2", "s2-inexact"),
)
OWN_ARMS = ("s0", "s1", "s2", "d0")
AUTO_ARMS = tuple(f"{arm}-auto" for arm in OWN_ARMS)
"""The same with the automatic headroom, as a user gets them. The paper has none, so between them nothing is primary."""
AUTO_PAIRS = (
    ("s1-auto", "s0-auto"),
    ("s2-auto", "s1-auto"),
    ("d0-auto", "s2-auto"),
    *zip(AUTO_ARMS, OWN_ARMS, strict=True),
)
RIVALS = ("stock", "stock-extra", "stock-lazy", "stock-tuned", "stock-unified", "vllm")
PRESELECTED_HEADROOM = {
    "b63": {"d0": 0.0, "s2": 0.27},
    "b83": {"d0": 0.10, "s2": 0.35},
    "b108": {"d0": 0.10, "s2": 0.0},
}
"""Headroom of each arm, chosen before the confirmation. Source: Table B-7, section C.1."""
COMMON_HEADROOM = 0.19


class Contrast(msgspec.Struct, frozen=True, kw_only=True):
    """One comparison.

    at: the condition, of an interaction or a policy the one that is not the baseline. where: what sets it apart in its
    case. planned: the seeds that both sides were to have. geometric: the effect is the mean log ratio turned into
    percent, as in Q9 (G3), and not the mean of the percentages.
    """

    case: str
    kind: Kind
    name: str
    at: Condition
    where: str
    primary: bool
    planned: tuple[int, ...]
    effects: Effects
    geometric: bool = False

    @property
    def first_look(self) -> int | None:
        """Return after how many planned seeds its test was looked at first, or None if it has one look or no test."""
        return CASES[self.case].first_look if self.family is not None else None

    @property
    def family(self) -> str | None:
        """Return the family that its test is corrected in, or None if it is descriptive."""
        if self.kind == "rival":
            return f"{self.case}, against other servers"
        return self.case if self.primary else None


def find(outcomes: Iterable[CellOutcome], metric: str) -> list[Contrast]:
    """Return every contrast that the outcomes hold, those without a measured pair too, case by case."""
    by_case: dict[str, list[CellOutcome]] = {}
    for outcome in adopted(outcomes):
        by_case.setdefault(outcome.case, []).append(outcome)
    return [contrast for case, held in by_case.items() for contrast in _Finder(case, held, metric).contrasts()]


class _Finder:
    """The contrasts of one case."""

    def __init__(self, case: str, outcomes: Sequence[CellOutcome], metric: str) -> None:
        self._case = case
        self._cells = measurements_of(outcomes, metric)
        self._labels = labels(self._cells)
        self._budgets = list(dict.fromkeys(condition.budget for condition in self._cells))

    def contrasts(self) -> Iterator[Contrast]:
        for condition in self._cells:
            for pair in (*OWN_PAIRS, *AUTO_PAIRS):
                yield from self._pair("arms", pair, condition)
            for pair in ((own, rival) for rival in RIVALS for own in (*OWN_ARMS, *AUTO_ARMS)):
                yield from self._pair("rival", pair, condition)
        for condition in self._cells:
            yield from self._sharing(condition)
            yield from self._across_budgets(condition)
            yield from self._pinning(condition)
            yield from self._reuse(condition)
            yield from self._bursts(condition)
            yield from self._caps(condition)
            yield from self._policies(condition)
            yield from self._automatic(condition)
            yield from self._preselected(condition)

    def _pair(self, kind: Kind, pair: tuple[str, str], at: Condition) -> Iterator[Contrast]:
        arms = self._cells[at]
        if pair[0] in arms and pair[1] in arms:
            primary = kind == "rival" or (pair in OWN_PAIRS and self._is_primary_pair(pair, at))
            yield self._made(kind, _ratio(pair), at, self._labels[at], primary, (arms[pair[0]], arms[pair[1]]))

    def _is_primary_pair(self, pair: tuple[str, str], at: Condition) -> bool:
        """Return whether the paper tests this pair at this condition in a family of its own."""
        match self._case:
            case "q1" | "exact":
                return True
            case "q4":
                return pair == ("d0", "s2")
            case "q5":
                return at.rate == max(c.rate for c in self._cells if c.budget == at.budget)
            case "q6":
                return at.headroom in (0.0, COMMON_HEADROOM)
            case "caps":
                return at.budget == "b63" and at.cap == 8
            case "bursts":
                return at.variant == "onoff"
        return False

    def _interaction(
        self,
        kind: Kind,
        pair: tuple[str, str],
        at: Condition,
        baseline: Condition,
        change: str,
        *,
        primary: bool = False,
        where: str | None = None,
    ) -> Iterator[Contrast]:
        here, there = self._cells[at], self._cells[baseline]
        if all(arm in arms for arm in pair for arms in (here, there)):
            sides = (here[pair[0]], here[pair[1]], there[pair[0]], there[pair[1]])
            yield self._made(kind, f"{_ratio(pair)}, {change}", at, where or at.budget, primary, sides)

    def _sharing(self, at: Condition) -> Iterator[Contrast]:
        levels = sorted({c.q for c in self._cells if c._replace(q=at.q) == at})
        if len(levels) > 1 and at.q == levels[-1]:
            change = f"q {at.q:g} instead of {levels[0]:g}"
            for pair in OWN_PAIRS:
                yield from self._interaction(
                    "sharing", pair, at, at._replace(q=levels[0]), change, primary=self._case == "q3"
                )

    def _across_budgets(self, at: Condition) -> Iterator[Contrast]:
        """Yield D0/S2 against the smallest budget; in the confirmation at the largest only, as its family has it."""
        first = at._replace(budget=self._budgets[0])
        if at == first or first not in self._cells or (self._case == "q6" and at.budget != self._budgets[-1]):
            return
        primary = self._case in ("q1", "q4") or (self._case == "q6" and at.headroom in (0.0, COMMON_HEADROOM))
        yield from self._interaction(
            "budget",
            ("d0", "s2"),
            at,
            first,
            f"{at.budget} instead of {first.budget}{_at_headroom(at)}",
            primary=primary,
        )

    def _pinning(self, at: Condition) -> Iterator[Contrast]:
        loosest = at._replace(variant="pin=3")
        if at.variant == "pin=1" and loosest in self._cells:
            yield from self._interaction("pinning", ("d0", "s2"), at, loosest, "pin K 1 instead of 3", primary=True)

    def _reuse(self, at: Condition) -> Iterator[Contrast]:
        isolated = at._replace(variant="isolate")
        if at.variant == "share" and isolated in self._cells:
            yield from self._interaction(
                "reuse", ("s2-retained", "s2"), at, isolated, "share instead of isolate", primary=True
            )

    def _bursts(self, at: Condition) -> Iterator[Contrast]:
        steady = at._replace(variant="")
        if at.variant == "onoff" and steady in self._cells:
            for pair in OWN_PAIRS:
                yield from self._interaction("bursts", pair, at, steady, "bursts instead of steady arrivals")

    def _caps(self, at: Condition) -> Iterator[Contrast]:
        """Yield each pair at each cap but the highest against the highest of the same load."""
        caps = {c.cap for c in self._cells if c._replace(cap=at.cap) == at}
        top = None if None in caps else max(cap for cap in caps if cap is not None)
        if at.cap != top:
            for pair in OWN_PAIRS:
                change, where = "a lower cap instead of the highest", self._labels[at]
                yield from self._interaction("caps", pair, at, at._replace(cap=top), change, where=where)

    def _policies(self, at: Condition) -> Iterator[Contrast]:
        """Yield one arm under two policies: with headroom against without, another split against the default."""
        for arm, values in self._cells[at].items():
            plain = self._cells.get(at._replace(headroom=0.0, variant=""), {}).get(arm)
            if plain is None:
                continue
            if at.headroom and not at.variant:
                chosen = PRESELECTED_HEADROOM.get(at.budget, {}).get(arm) == at.headroom
                name = f"{arm_title(arm)}, headroom {at.headroom:g} instead of 0"
                yield self._made("headroom", name, at, at.budget, chosen and self._case == "q6", (values, plain))
            if at.variant.startswith("split="):
                name = f"{arm_title(arm)}, {at.variant} instead of the default"
                yield self._made("split", name, at, at.budget, True, (values, plain))

    def _automatic(self, at: Condition) -> Iterator[Contrast]:
        """Yield one arm with the automatic headroom against each fixed one, and against the fixed one that is best."""
        if at.variant != AUTO_HEADROOM:
            return
        levels = sorted(c.headroom for c in self._cells if c._replace(headroom=0.0) == at._replace(variant=""))
        for arm, values in self._cells[at].items():
            ours, name = measured(values), f"{arm_title(arm)}, headroom auto instead of"
            fixed = {f: self._cells[at._replace(headroom=f, variant="")].get(arm, {}) for f in levels}
            for f in (f for f in levels if fixed[f]):
                yield self._made("fixed", f"{name} {f:g}", at, at.budget, False, (values, fixed[f]))
            paired = {f: {s: v for s, v in measured(fixed[f]).items() if s in ours} for f in levels}
            best = highest(paired)
            if best is not None:
                where = f"{at.budget}, f {best:g}"
                yield self._made("best-fixed", f"{name} the best fixed one", at, where, False, (values, fixed[best]))

    def _preselected(self, at: Condition) -> Iterator[Contrast]:
        """Yield D0 and S2, each with the headroom chosen for it before; skipped where both have the same."""
        chosen = PRESELECTED_HEADROOM.get(at.budget)
        if self._case != "q6" or chosen is None or at.headroom:
            return
        sides = {arm: self._cells.get(at._replace(headroom=f), {}).get(arm) for arm, f in chosen.items()}
        if sides["d0"] is not None and sides["s2"] is not None:
            name = f"D0/S2, headroom {chosen['d0']:g} and {chosen['s2']:g}"
            yield self._made("preselected", name, at, at.budget, True, (sides["d0"], sides["s2"]))

    def _made(
        self,
        kind: Kind,
        name: str,
        at: Condition,
        where: str,
        primary: bool,
        sides: Sequence[Mapping[int, float | None]],
    ) -> Contrast:
        """Return the contrast of two sides, or the interaction of four: a pair, then the same pair at the baseline."""
        planned = set.intersection(*(set(side) for side in sides))
        values = [measured(side) for side in sides]
        effects = relative(values[0], values[1])
        if len(values) == 4:
            effects = interaction(effects, relative(values[2], values[3]))
        return Contrast(
            case=self._case,
            kind=kind,
            name=name,
            at=at,
            where=where,
            primary=primary,
            planned=tuple(sorted(planned)),
            effects=effects,
            geometric=self._case == "q9",
        )


def arm_title(arm: str) -> str:
    """Return an arm's name as tables print it: the organization in capitals (S2, D0-m512), rivals as they are."""
    organization, dash, rest = arm.partition("-")
    return f"{organization.upper()}{dash}{rest}" if organization in OWN_ARMS else arm


def _ratio(pair: tuple[str, str]) -> str:
    return "/".join(map(arm_title, pair))


def _at_headroom(condition: Condition) -> str:
    return f" at headroom {condition.headroom:g}" if condition.headroom else ""
