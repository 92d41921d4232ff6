"""What a report says it cannot say: pace and offered load, number of seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import pytest

from bench.outcome import CellOutcome
from bench.report.limits import limits
from tests.unit.outcomes import cells


def counted(outcomes: Sequence[CellOutcome], **counters: float) -> list[CellOutcome]:
    return [msgspec.structs.replace(outcome, counters=counters) for outcome in outcomes]


def loads(outcomes: Sequence[CellOutcome], paces: Mapping[str, float]) -> list[str]:
    return [limit for limit in limits([], outcomes, paces) if limit.startswith("Load of")]


def test_the_pace_and_what_was_asked_of_the_ceiling_are_numbers() -> None:
    """4.02 x 69,082 / 300 over 710.9 is 1.302; the paper's 3 x 72,908 / 300 over 708.2 is 1.029."""
    outcomes = cells("q1", {"s2": [663.0], "ceiling": [710.9]}) + cells("q1", {"ceiling": [400.0]}, rate=0.8)
    assert loads(counted(outcomes, output_tokens=69_082.0, num_ok=300.0), {"q1": 1.34}) == [
        "Load of q1: requests arrived at 1.34 times the rates that are named (`python -m bench pace`). SGLang with "
        "memory to spare reached 711 tokens/s; 0.8 req/s asked for 0.35 of that (the paper 0.27), 3 req/s "
        "asked for 1.30 of that (the paper 1.03)."
    ]


def test_without_a_ceiling_the_pace_is_all_that_is_said() -> None:
    outcomes = counted(cells("auto", {"s2": [663.0]}), output_tokens=69_082.0, num_ok=300.0)
    [said] = loads(outcomes, {"auto": 1.34})
    assert said.endswith("1.34 times the rates that are named (`python -m bench pace`).")
    assert loads(outcomes, {"auto": 1.0}) == []


@pytest.mark.parametrize(
    ("seeds", "said"),
    [
        ({"q1": 3, "q2": 3}, "3 seeds of q1, 3 seeds of q2: a sign-flip test needs six"),
        ({"q1": 1, "q2": 6}, "1 seed of q1: a sign-flip test needs six"),
        ({"q1": 6, "q2": 6}, None),
    ],
)
def test_seeds_of_different_cases_are_not_added(seeds: dict[str, int], said: str | None) -> None:
    outcomes = [
        msgspec.structs.replace(cell, seed=cell.seed + 100 * place)
        for place, (case, number) in enumerate(seeds.items())
        for cell in cells(case, {"s2": [1.0] * number})
    ]
    found = [limit for limit in limits([], outcomes, dict.fromkeys(seeds, 1.0)) if "sign-flip" in limit]
    assert found == [] if said is None else found[0].startswith(said)


def test_seeds_of_different_conditions_are_not_added() -> None:
    outcomes = [
        *cells("q2", {"s1": [1.0] * 3}),
        *(msgspec.structs.replace(cell, seed=cell.seed + 42000) for cell in cells("q2", {"s1": [1.0] * 4}, q=0.0)),
    ]
    assert any(limit.startswith("4 seeds of q2: a sign-flip") for limit in limits([], outcomes, {}))
