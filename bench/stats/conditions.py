"""The conditions that outcomes were measured at: in order, with a short name each, and with their measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from bench.outcome import CellOutcome, Condition
from bench.variants import AUTO_HEADROOM
from sgl_hybrid.memory.budget import NAMED, SIZE, SIZE_BYTES

Measurements = Mapping[Condition, Mapping[str, Mapping[int, float | None]]]
"""Condition -> arm -> seed -> measurement, None where the cell has none."""

_FORMS: tuple[Callable[[Condition], str], ...] = (
    lambda condition: f"q {condition.q:g}",
    lambda condition: f"{condition.rate:g} req/s",
    lambda condition: f"cap {condition.cap}",
    lambda condition: "f auto" if condition.variant == AUTO_HEADROOM else f"f {condition.headroom:g}",
    lambda condition: condition.variant if condition.variant not in ("", AUTO_HEADROOM) else "plain",
)
"""What a label says of a condition beside its budget."""


def measurements_of(outcomes: Iterable[CellOutcome], metric: str) -> Measurements:
    """Return the measurements of adopted outcomes by condition, arm and seed.

    Conditions are in order of budget, load and policy, whatever the order that the cells ran in.
    """
    cells: dict[Condition, dict[str, dict[int, float | None]]] = {}
    for outcome in outcomes:
        value = outcome.metrics.get(metric) if outcome.status == "ok" else None
        cells.setdefault(outcome.condition, {}).setdefault(outcome.arm, {})[outcome.seed] = value
    return {condition: cells[condition] for condition in sorted(cells, key=place)}


def place(condition: Condition) -> tuple[object, ...]:
    """Return what conditions of a case are sorted by: a budget's size, then load and policy."""
    named, sized = NAMED.fullmatch(condition.budget), SIZE.fullmatch(condition.budget)
    size = (2, 0.0)
    if named is not None:
        size = (0, float(named[1]))
    elif sized is not None:
        size = (1, float(sized[1]) * SIZE_BYTES.get(sized[2].lower(), 1))
    cap = float("inf") if condition.cap is None else condition.cap
    return (*size, condition.budget, condition.q, condition.rate, cap, condition.headroom, condition.variant)


def measured(seeds: Mapping[int, float | None]) -> dict[int, float]:
    """Return the seeds that have a measurement above zero, which is what a ratio can be formed of."""
    return {seed: value for seed, value in seeds.items() if value is not None and value > 0}


def labels(conditions: Iterable[Condition]) -> dict[Condition, str]:
    """Return a short name for each condition: its budget, and of the other fields those that differ in its case.

    Cases are in order of appearance, conditions within one in the order of `measurements_of`. To be formed of all
    conditions that were planned, measured or not: what differs depends on the others.
    """
    by_case: dict[str, list[Condition]] = {}
    for condition in dict.fromkeys(conditions):
        by_case.setdefault(condition.case, []).append(condition)
    names: dict[Condition, str] = {}
    for held in by_case.values():
        differing = [form for form in _FORMS if len({form(c) for c in held}) > 1]
        names |= {c: ", ".join([c.budget, *(form(c) for form in differing)]) for c in sorted(held, key=place)}
    return names
