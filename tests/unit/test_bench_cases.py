"""Cases and variants: what the registered experiments multiply out to, and what the command line changes of them.

Counts of cells and seeds: paper Table 2, Tables E-11, E-12, section B.2 (96 pinning cells), Table B-7 (360 runs).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from bench.arms import ARMS
from bench.arrivals import OnOff, Poisson
from bench.cases import CASES, MAIN_SEEDS, Point, case_of
from bench.cells import QUICK_REQUESTS, Changes, cells_of
from bench.cli import main
from bench.outcome import CellOutcome
from bench.variants import variant_of
from sgl_hybrid.errors import SettingError

PAPER_CELLS = {"q4": 4 * 3 * 12, "q6": 360, "q8": 6, "q9": 24, "pinning": 96, "split": 5 * 2 * 12, "low": 12}


@pytest.mark.parametrize(("name", "count"), PAPER_CELLS.items())
def test_cases_have_as_many_cells_as_the_paper_has_runs(name: str, count: int) -> None:
    assert len(cells_of(case_of(name), Changes())) == count


def test_the_main_case_is_the_papers_runs_the_rivals_and_what_a_user_gets() -> None:
    cells = cells_of(case_of("q1"), Changes())
    assert {cell.seed for cell in cells} == set(range(42000, 42012)) == set(MAIN_SEEDS)
    assert {(cell.budget, cell.rate, cell.cap) for cell in cells} == {(b, 3.0, 63) for b in ("b63", "b83", "b108")}
    assert {cell.q for cell in cells} == {1.0}
    assert Counter(cell.arm for cell in cells) == dict.fromkeys(
        ("s0", "s1", "s2", "d0", "s2-auto", "stock-tuned", "stock-unified", "ceiling"), 36
    )
    assert {cell.num_requests for cell in cells} == {300}


def test_load_curves_share_their_seeds_with_the_enlarged_sets() -> None:
    cells = cells_of(case_of("q5"), Changes())
    seeds: dict[tuple[str, float], set[int]] = {}
    for cell in cells:
        seeds.setdefault((cell.budget, cell.rate), set()).add(cell.seed)
    assert seeds["b63", 3.0] == set(range(6))
    assert seeds["b108", 4.5] == seeds["b108", 3.0] == set(range(9))
    assert seeds["b63", 0.8] == {0, 1, 2}
    assert {cell.cap for cell in cells if cell.budget == "b108"} == {109}


@pytest.mark.parametrize("name", CASES)
def test_names_of_cells_are_unique_and_each_case_is_well_formed(name: str) -> None:
    case = case_of(name)
    cells = cells_of(case, Changes())
    assert len({cell.key for cell in cells}) == len(cells)
    assert all(set(cell.key) <= set("abcdefghijklmnopqrstuvwxyz0123456789._-") for cell in cells)
    # Everything that names a condition of an outcome is in a cell under the same name.
    assert {"case", "arm", "budget", "seed", "q", "rate", "cap", "headroom", "variant"} <= set(
        CellOutcome.__struct_fields__
    ) & set(cells[0].__struct_fields__)


@pytest.mark.parametrize("name", CASES)
def test_a_quick_run_is_a_handful_of_short_cells(name: str) -> None:
    cells = cells_of(case_of(name), Changes(quick=True))
    assert 2 <= len(cells) <= 6
    assert {cell.num_requests for cell in cells} == {QUICK_REQUESTS}
    assert len({cell.seed for cell in cells}) == 1


def test_a_quick_run_keeps_what_its_question_varies() -> None:
    assert {cell.q for cell in cells_of(case_of("q3"), Changes(quick=True))} == {0.0, 1.0}
    assert {cell.headroom for cell in cells_of(case_of("q6"), Changes(quick=True))} == {0.0, 0.19}
    assert {cell.variant for cell in cells_of(case_of("bursts"), Changes(quick=True))} == {"", "onoff"}


def test_the_command_line_changes_the_grid() -> None:
    changes = Changes(arms=("s2", "ceiling"), budgets=("b83", "64MiB"), num_seeds=14, rate=5.0, shared_fractions=(0.5,))
    cells = cells_of(case_of("q1"), changes)
    assert len(cells) == 2 * 2 * 14
    assert {cell.seed for cell in cells} == set(range(42000, 42014))
    assert {(cell.budget, cell.rate, cell.cap, cell.q) for cell in cells} == {
        ("b83", 5.0, 63, 0.5),
        ("64MiB", 5.0, 63, 0.5),
    }


@pytest.mark.parametrize("num_seeds", [1, 4, 8])
def test_so_many_seeds_are_so_many_at_every_point(num_seeds: int) -> None:
    """The load curves have seeds 0 to 2, their top rates 3 to 8 too, in a grid of their own."""
    for name in ("q5", "caps"):
        cells = cells_of(case_of(name), Changes(num_seeds=num_seeds, arms=("s2",)))
        seeds: dict[Point, list[int]] = {}
        for cell in cells:
            seeds.setdefault(cell.point, []).append(cell.seed)
        assert {tuple(sorted(found)) for found in seeds.values()} == {tuple(range(num_seeds))}
    assert {cell.seed for cell in cells_of(case_of("q8"), Changes(num_seeds=num_seeds))} == set(
        range(79010, 79010 + num_seeds)
    )
    quick = cells_of(case_of("q5"), Changes(num_seeds=num_seeds, quick=True, arms=("s2",)))
    assert [cell.seed for cell in quick] == list(range(num_seeds))


def test_a_budget_of_the_case_takes_its_own_points_only() -> None:
    cells = cells_of(case_of("q5"), Changes(budgets=("b63",), num_seeds=1))
    assert {cell.cap for cell in cells} == {63}
    assert {cell.cap for cell in cells_of(case_of("q1-low"), Changes(budgets=("b108",), quick=True))} == {109}


def test_an_arm_with_a_headroom_of_its_own_gets_no_other() -> None:
    cells = cells_of(case_of("q6"), Changes(arms=("s2-auto", "d0"), num_seeds=1, budgets=("b63",)))
    assert [cell.headroom for cell in cells if cell.arm == "s2-auto"] == [0.0]
    assert len([cell for cell in cells if cell.arm == "d0"]) == 5
    both = cells_of(case_of("auto"), Changes(arms=("s2-auto", "s2"), num_seeds=1, budgets=("b63",)))
    assert [cell.key for cell in both if cell.arm == "s2-auto"] == ["s2-auto_b63_q1_r3_c63_s42000"]


def test_headrooms_are_refused_by_a_case_without_several() -> None:
    message = r"--headroom: expected a case that compares headrooms \(q6, matched, auto\), got q1"
    with pytest.raises(SettingError, match=message):
        cells_of(case_of("q1"), Changes(headrooms=(0.1,)))


def test_a_rate_given_once_stands_for_the_whole_curve() -> None:
    cells = cells_of(case_of("q5"), Changes(rate=2.0, num_seeds=1, budgets=("b63",)))
    assert {cell.rate for cell in cells} == {2.0}
    assert len({cell.key for cell in cells}) == len(cells)


def test_headrooms_replace_those_of_a_grid_that_has_several() -> None:
    cells = cells_of(case_of("auto"), Changes(arms=("s2",), num_seeds=1, budgets=("b63",), headrooms=(0.19, 0.5)))
    assert [(cell.headroom, cell.variant) for cell in cells] == [(0.19, ""), (0.5, ""), (0.0, "headroom=auto")]


def test_policies_of_this_project_are_not_asked_of_other_servers() -> None:
    cells = cells_of(case_of("q6"), Changes(arms=("s2", "stock"), num_seeds=1, budgets=("b63",)))
    assert sorted({cell.headroom for cell in cells if cell.arm == "stock"}) == [0.0]
    assert len({cell.headroom for cell in cells if cell.arm == "s2"}) == 5
    with pytest.raises(SettingError, match="expected an arm that case split can run, got s2"):
        cells_of(msg_without_plain(), Changes(arms=("s2",)))


def msg_without_plain():  # type: ignore[no-untyped-def]
    """The split case without its unchanged split, which any arm could run."""
    import msgspec

    case = case_of("split")
    return msgspec.structs.replace(
        case, grids=tuple(msgspec.structs.replace(grid, variants=grid.variants[1:]) for grid in case.grids)
    )


def test_cells_of_a_block_differ_only_in_the_arm() -> None:
    cells = cells_of(case_of("q3"), Changes(num_seeds=2))
    blocks: dict[object, list[str]] = {}
    for cell in cells:
        blocks.setdefault(cell.block, []).append(cell.arm)
    assert len(blocks) == 3 * 2
    assert {tuple(arms) for arms in blocks.values()} == {("s0", "s1", "s2", "d0", "stock-tuned")}


def test_variants_say_what_they_change() -> None:
    assert variant_of("").arrivals(3.0) == Poisson(3.0)
    assert variant_of("onoff").arrivals(1.7) == OnOff(1.7, on_s=5.0, off_s=15.0)
    assert variant_of("isolate").isolate
    assert not variant_of("share").isolate
    assert variant_of("pin=3").flags == ("--preempt-pin-k", "3")
    assert variant_of("split=0.6").flags == ("--d0-attention-fraction", "0.6")
    assert variant_of("split=0.6").fits("d0")
    assert not variant_of("split=0.6").fits("s2")
    assert not variant_of("pin=3").fits(None)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: case_of("q10"), "expected a case out of q1, .* got 'q10'; nearest: q1"),
        (lambda: Changes(arms=("s3",)), "expected an arm out of s0, .* got 's3'; nearest: s2"),
        (lambda: Changes(num_seeds=0), "--seeds: expected at least 1 seed, got 0"),
        (lambda: Changes(num_seeds=21), "--seeds: expected 1 to 20 seeds, all that an exact test .* got 21"),
        (lambda: Changes(num_requests=0), "--requests: expected at least 1 request, got 0"),
        (lambda: Changes(rate=0.0), "--rate: expected a rate above 0 requests/s, got 0"),
        (lambda: Changes(headrooms=(1.0,)), "--headroom: expected a fraction from 0 to below 1, got 1.0"),
        (lambda: Changes(shared_fractions=(1.5,)), "--q: expected a common-prefix fraction of 0 to 1, got 1.5"),
        (lambda: variant_of("pins"), "expected a variant out of .* got 'pins'; nearest"),
        (lambda: variant_of("pin="), "expected a value after pin=, got none"),
        (lambda: variant_of("split2=1"), "expected a variant with a value out of split, pin, headroom, got 'split2'"),
    ],
)
def test_mistakes_are_one_line(make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(SettingError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_the_list_has_every_case_and_arm(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [case["name"] for case in listed["cases"]] == list(CASES)
    assert {case["name"]: case["num_cells"] for case in listed["cases"]}["q6"] == 360
    assert "stock-unified" in {arm["name"] for arm in listed["arms"]}
    assert main(["list"]) == 0
    assert "Q" not in capsys.readouterr().err


def test_points_keep_their_cap_at_their_budget() -> None:
    cells = cells_of(case_of("q1-low"), Changes(budgets=("b108",)))
    assert {Point(cell.budget, cell.rate, cell.cap) for cell in cells} == {Point("b108", 0.8, 109)}


def test_the_page_on_the_suite_names_every_case_and_arm() -> None:
    page = (Path(__file__).parents[2] / "docs" / "suite.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z0-9-]+)`", page))
    assert set(CASES) - named == set()
    assert set(ARMS) - named == set()
