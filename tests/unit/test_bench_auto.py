"""Whether the automatic headroom is as good as the best fixed one: cells, contrasts and the sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from bench.cases import case_of
from bench.cells import Changes, cells_of
from bench.outcome import CellOutcome
from bench.stats.conditions import labels
from bench.stats.effects import highest
from bench.stats.rows import analyse
from bench.stats.verdicts import verdict
from bench.variants import AUTO_HEADROOM
from tests.unit.outcomes import cells, row_of


def campaign(
    auto: Sequence[float | None], fixed: Mapping[float, Sequence[float | None]], arm: str = "s2", budget: str = "b63"
) -> list[CellOutcome]:
    found = cells("auto", {arm: auto}, budget=budget, variant=AUTO_HEADROOM)
    return found + [cell for f, row in fixed.items() for cell in cells("auto", {arm: row}, budget=budget, headroom=f)]


FIXED = {0.0: [100.0, 100.0], 0.1: [110.0, 130.0], 0.27: [120.0, 110.0]}


def test_the_automatic_headroom_is_set_beside_each_fixed_one_and_the_best() -> None:
    rows = analyse(campaign([114.0, 126.1], FIXED))
    assert row_of(rows, "S2, headroom auto instead of 0").effect == pytest.approx(20.05)  # +14 and +26.1
    assert row_of(rows, "S2, headroom auto instead of 0.27").effect == pytest.approx((-5 + 161 / 11) / 2)
    best = row_of(rows, "S2, headroom auto instead of the best fixed one", "b63, f 0.1")  # 120 in the mean, 115, 100
    assert best.effect == pytest.approx((40 / 11 - 3) / 2)
    assert best.num_seeds == 2
    assert best.family is None  # the paper has no such test


def test_organizations_have_a_best_fixed_headroom_of_their_own() -> None:
    rows = analyse(campaign([100.0], {0.0: [99.0], 0.1: [98.0]}) + campaign([50.0], {0.0: [49.0], 0.1: [60.0]}, "d0"))
    found = {row.name: row.where for row in rows if row.kind == "best-fixed"}
    assert found == {
        "S2, headroom auto instead of the best fixed one": "b63, f 0",
        "D0, headroom auto instead of the best fixed one": "b63, f 0.1",
    }


@pytest.mark.parametrize(
    ("auto", "said"),
    [
        ([99.0, 100.0, 101.0], "not more than 3 % below; all of its interval too"),
        ([90.0, 100.0, 110.0], "not more than 3 % below; part of its interval is on the other side"),
        ([90.0, 80.0, 100.0], "more than 3 % below; part of its interval is on the other side"),
        ([90.0, 91.0, 89.0], "more than 3 % below; all of its interval too"),
        ([98.0], "not more than 3 % below"),
    ],
)
def test_the_sentence_says_on_which_side_of_three_percent_it_is(auto: list[float], said: str) -> None:
    found = verdict("auto", analyse(campaign(auto, {0.0: [90.0] * 3, 0.19: [100.0] * 3})))
    assert found.sentence.startswith("With headroom auto instead of the best fixed one, S2 changes by ")
    assert f" at b63, f 0.19 ({said});" in found.sentence


def test_a_campaign_under_way_answers_with_what_it_has() -> None:
    """Seed 2 of f 0.27 has failed and seed 3 of the automatic one has not run; at b83 nothing fixed has."""
    outcomes = campaign([99.0, 98.0], {0.0: [80.0, 80.0, 80.0], 0.27: [100.0, None, 500.0]})
    found = verdict("auto", analyse(outcomes + campaign([1.0], {}, budget="b83")))
    assert found.sentence == (
        "With headroom auto instead of the best fixed one, S2 changes by -1.0 % (one seed) at b63, f 0.27 (not more "
        "than 3 % below); 1 paired seed, 1 planned pair without a measurement: an example, no interval and no test."
    )
    assert verdict("auto", analyse(campaign([1.0], {}))).strength == "absent"


def test_the_highest_is_found_on_common_seeds() -> None:
    assert highest({"a": {1: 500.0, 2: 300.0}, "b": {1: 450.0}}) == "a"  # at seed 1; the means would be 400 and 450
    assert highest({"a": {1: 1.0, 2: 5.0}, "b": {1: 2.0, 2: 2.0}, "c": {3: 9.0}}) == "a"  # c shares no seed
    assert highest({"a": {}, "b": {1: 2.0}}) == "b"
    assert highest({"a": {}}) is None
    assert highest({}) is None


def test_labels_name_the_automatic_headroom_as_one() -> None:
    conditions = [outcome.condition for outcome in campaign([1.0], {0.0: [1.0], 0.19: [1.0]})]
    assert list(labels(conditions).values()) == ["b63, f 0", "b63, f auto", "b63, f 0.19"]


def test_a_quick_run_has_the_automatic_headroom_and_two_fixed_ones() -> None:
    quick = cells_of(case_of("auto"), Changes(quick=True))
    assert [(cell.arm, cell.headroom, cell.variant) for cell in quick] == [
        ("s2", 0.0, ""),
        ("s2", 0.19, ""),
        ("s2", 0.0, AUTO_HEADROOM),
    ]
