"""How bursts and caps change the gap between two arms: contrasts and the sentence. They are in no family."""

from __future__ import annotations

import pytest

from bench.stats.rows import analyse
from bench.stats.verdicts import verdict
from tests.unit.outcomes import cells, row_of

SEVEN = [100.0] * 7


def test_bursts_change_the_ratio_by_points_within_the_seed() -> None:
    outcomes = [
        *cells("bursts", {"d0": [98.0, 96.0], "s2": [100.0, 100.0]}, variant="onoff"),
        *cells("bursts", {"d0": [105.0, 101.0], "s2": [100.0, 100.0]}),
    ]
    rows = analyse(outcomes)
    row = row_of(rows, "D0/S2, bursts instead of steady arrivals")
    assert (row.unit, row.family) == ("pp", None)
    assert row.effect == pytest.approx(-6.0)  # -2 - 5 and -4 - 1
    assert "bursts instead" not in verdict("bursts", analyse(outcomes[:4])).sentence


def test_every_lower_cap_stands_against_the_highest_of_its_budget() -> None:
    outcomes = [
        cell
        for budget, gaps in (("b63", {3: 96.0, 8: 92.0, 63: 99.0}), ("b108", {8: 95.0, 109: 100.0}))
        for cap, d0 in gaps.items()
        for cell in cells("caps", {"d0": [d0], "s2": [100.0]}, budget=budget, cap=cap)
    ]
    name = "D0/S2, a lower cap instead of the highest"
    found = {row.where: row.effect for row in analyse(outcomes) if row.name == name}
    assert found == {
        "b63, cap 3": pytest.approx(-3.0),
        "b63, cap 8": pytest.approx(-7.0),
        "b108, cap 8": pytest.approx(-5.0),
    }
    open_end = outcomes + cells("caps", {"d0": [90.0], "s2": [100.0]}, cap=None)
    found = {row.where: row.effect for row in analyse(open_end) if row.name == name}
    assert found["b63, cap 63"] == pytest.approx(9.0)  # no cap is the highest


def test_the_sentence_tells_the_tested_gap_and_how_the_load_changes_it() -> None:
    outcomes = [
        *cells("bursts", {"d0": [98.1 + seed / 10 for seed in range(7)], "s2": SEVEN}, variant="onoff"),
        *cells("bursts", {"d0": [105.1 + seed / 10 for seed in range(6)] + [None], "s2": SEVEN}),
    ]
    sentence = verdict("bursts", analyse(outcomes)).sentence
    assert sentence.startswith("D0 is behind S2 at b63, onoff (-1.6 %, ")
    assert (
        "; with bursts instead of steady arrivals, the ratio D0/S2 changes by -7.0 points (-7.0 to -7.0) at" in sentence
    )
    assert sentence.endswith(
        "; 95 % intervals over 6 to 7 paired seeds, the sign-flip test holds, the changes descriptive."
    )
