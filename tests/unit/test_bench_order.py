"""The order of a campaign and its estimate: arms next to each other, each place taken by each arm, from a seed."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.campaign.estimate import REQUEST_S, START_S, Estimator, duration
from bench.campaign.order import interleave
from bench.cases import CASES, case_of
from bench.cells import Changes, cells_of


@given(st.sampled_from(sorted(CASES)), st.integers(0, 2**32))
def test_an_order_is_a_permutation_in_whole_blocks(name: str, seed: int) -> None:
    cells = cells_of(case_of(name), Changes(num_seeds=2))
    ordered = interleave(cells, seed)
    assert sorted(cell.key for cell in ordered) == sorted(cell.key for cell in cells)
    blocks = [cell.block for cell in ordered]
    changes = sum(a != b for a, b in pairwise(blocks))
    assert changes == len(set(blocks)) - 1


def test_every_arm_takes_every_place_equally_often() -> None:
    """Q1 has 36 blocks of 8 arms: four whole squares and four rows. Each arm has each place four or five times."""
    ordered = interleave(cells_of(case_of("q1"), Changes()), seed=3)
    places = Counter((cell.arm, index % 8) for index, cell in enumerate(ordered))
    assert len(places) == 64
    assert set(places.values()) == {4, 5}
    four = interleave(cells_of(case_of("q4"), Changes()), seed=3)
    assert set(Counter((cell.arm, index % 4) for index, cell in enumerate(four)).values()) == {9}


def test_the_order_is_random_and_comes_from_the_seed() -> None:
    cells = cells_of(case_of("q1"), Changes())
    assert interleave(cells, 0) == interleave(cells, 0) != interleave(cells, 1)
    firsts = {tuple(cell.arm for cell in interleave(cells, seed)[:8]) for seed in range(40)}
    assert len(firsts) > 30
    seeds = [cell.seed for cell in interleave(cells, 0)[::8]]
    assert seeds != sorted(seeds)


def test_the_estimate_learns_from_finished_cells() -> None:
    cells = cells_of(case_of("q4"), Changes(num_seeds=1, budgets=("b63",)))  # one cell of each of four arms
    estimator = Estimator()
    assert estimator.seconds(cells) == pytest.approx(4 * (START_S + 300 * REQUEST_S))
    estimator.observe("s0", 300, START_S + 600.0)  # 2 s a request
    assert estimator.seconds(cells) == pytest.approx(4 * (START_S + 300 * 2.0))
    estimator.observe("d0", 300, START_S + 300.0)  # 1 s; the two others are guessed at the mean, 1.5 s
    assert estimator.seconds(cells) == pytest.approx(4 * START_S + 600 + 300 + 2 * 450)
    assert estimator.seconds([]) == 0


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (89, "89 s"), (90, "2 min"), (5000, "83 min"), (11_100, "3 h 05 min")]
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text
