"""Cells: what a case multiplies out to, with what the command line changes of it.

`Changes` are applied to a case's grids before they are multiplied out, so the defaults stay the paper's.

Source: paper section B.5, Table C-1.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import msgspec

from bench.arms import arm_of
from bench.cases import CASES, HEADROOMS, MOST_SEEDS, Case, Grid, Point
from bench.outcome import CellIdentity, Condition
from bench.variants import variant_of
from sgl_hybrid.errors import SettingError

NUM_REQUESTS = 300
"""Requests of one run. Source: paper section B.5."""
QUICK_REQUESTS = 40
"""Requests of a short probe. Source: paper Table C-1 (5c to 5e)."""


class Cell(CellIdentity, frozen=True, kw_only=True):
    """One measurement to make. Its cap is always given."""

    cap: int
    num_requests: int = NUM_REQUESTS

    @property
    def point(self) -> Point:
        """Return the operating point that the cell runs at."""
        return Point(self.budget, self.rate, self.cap)

    @property
    def block(self) -> tuple[int, Condition]:
        """Return what cells that differ only in the arm have in common: they are run next to each other."""
        return (self.seed, self.condition)

    @property
    def key(self) -> str:
        """Return the cell's name, which is the name of its folder: different conditions have different names."""
        parts = [self.arm, self.budget, f"q{self.q:g}", f"r{self.rate:g}", f"c{self.cap}"]
        parts += [f"f{self.headroom:g}"] if self.headroom else []
        parts += [self.variant.replace("=", "-")] if self.variant else []
        return "_".join([*parts, f"s{self.seed}"])


class Changes(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line changes of a case; None keeps its own. `headrooms` stand where a grid has several."""

    arms: tuple[str, ...] | None = None
    budgets: tuple[str, ...] | None = None
    num_seeds: int | None = None
    num_requests: int | None = None
    rate: float | None = None
    shared_fractions: tuple[float, ...] | None = None
    headrooms: tuple[float, ...] | None = None
    quick: bool = False

    def __post_init__(self) -> None:
        for count, option in ((self.num_seeds, "seed"), (self.num_requests, "request")):
            if count is not None and count < 1:
                raise SettingError(f"--{option}s: expected at least 1 {option}, got {count}")
        if self.num_seeds is not None and self.num_seeds > MOST_SEEDS:
            raise SettingError(
                f"--seeds: expected 1 to {MOST_SEEDS} seeds, all that an exact test can enumerate, got {self.num_seeds}"
            )
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise SettingError(f"--rate: expected a rate above 0 requests/s, got {self.rate}")
        for fraction in self.shared_fractions or ():
            if not 0 <= fraction <= 1:
                raise SettingError(f"--q: expected a common-prefix fraction of 0 to 1, got {fraction}")
        for headroom in self.headrooms or ():
            if not 0 <= headroom < 1:
                raise SettingError(f"--headroom: expected a fraction from 0 to below 1, got {headroom}")
        for name in self.arms or ():
            arm_of(name)


def cells_of(case: Case, changes: Changes) -> list[Cell]:
    """Return the cells of a case with the changes applied, without repeats, in the order of its grids.

    Raises: SettingError if nothing is left to run, or headrooms are asked of a case that does not compare any.
    """
    if changes.headrooms is not None and not _compares_headrooms(case):
        able = ", ".join(other.name for other in CASES.values() if _compares_headrooms(other))
        raise SettingError(f"--headroom: expected a case that compares headrooms ({able}), got {case.name}")
    grids = case.grids[: case.quick_grids] if changes.quick else case.grids
    budgets = {point.budget for grid in grids for point in grid.points}
    grids = tuple(_changed(case, grid, budgets, changes) for grid in grids)
    num_requests = changes.num_requests or (QUICK_REQUESTS if changes.quick else NUM_REQUESTS)
    cells: dict[str, Cell] = {}
    for arm, seed, condition in _combinations(case, grids, changes.num_seeds):
        if _applies(arm, condition.headroom, condition.variant):
            cell = Cell(arm=arm, seed=seed, num_requests=num_requests, **condition._asdict())
            cells.setdefault(cell.key, cell)
    if not cells:
        asked = ", ".join(changes.arms or ())
        raise SettingError(
            f"expected an arm that case {case.name} can run, got {asked}: its headrooms and variants are for others"
        )
    return list(cells.values())


def _combinations(case: Case, grids: Sequence[Grid], num_seeds: int | None) -> Iterator[tuple[str, int, Condition]]:
    """Yield arm, seed and condition of every cell. num_seeds: so many of a condition's seeds, which grids may share."""
    seeds: dict[Condition, set[int]] = {}
    for grid in grids:
        for condition in _conditions(case, grid):
            seeds.setdefault(condition, set()).update(grid.seeds)
    for grid in grids:
        for condition in _conditions(case, grid):
            chosen = grid.seeds if num_seeds is None else _first(sorted(seeds[condition]), num_seeds)
            for seed, arm in itertools.product(chosen, grid.arms):
                yield arm, seed, condition


def _first(seeds: list[int], count: int) -> list[int]:
    """Return the first seeds; where there are too few, those that follow the last too."""
    return [*seeds, *range(seeds[-1] + 1, seeds[-1] + 1 + count)][:count]


def _conditions(case: Case, grid: Grid) -> Iterator[Condition]:
    lists = (grid.points, grid.shared_fractions, grid.headrooms, grid.variants)
    for point, fraction, headroom, variant in itertools.product(*lists):
        yield Condition(case.name, point.budget, fraction, point.rate, point.cap, headroom, variant)


def _changed(case: Case, grid: Grid, budgets: Collection[str], changes: Changes) -> Grid:
    """Return the grid as the command line wants it; a quick one keeps one point a budget, one seed, two of every list.

    budgets: those of the whole case, so that a grid which has not one of them adds nothing to it.
    """
    arms, points, seeds = grid.arms, grid.points, grid.seeds
    fractions, headrooms, variants = grid.shared_fractions, grid.headrooms, grid.variants
    most = 1 if changes.quick else None
    if changes.budgets is None:
        points = points[:most]
    else:
        points = tuple(point for budget in changes.budgets for point in _at_budget(points, budget, budgets)[:most])
    if changes.quick:
        arms, seeds = case.quick_arms, seeds if changes.num_seeds else seeds[:1]
        fractions, headrooms, variants = _ends(fractions), headrooms[:: len(HEADROOMS) // 2][:2], _ends(variants)
    if changes.headrooms is not None and len(grid.headrooms) > 1:
        headrooms = changes.headrooms
    if changes.rate is not None:
        points = tuple(dict.fromkeys(Point(point.budget, changes.rate, point.cap) for point in points))
    return Grid(
        arms=changes.arms or arms,
        points=points,
        seeds=seeds,
        shared_fractions=changes.shared_fractions or fractions,
        headrooms=headrooms,
        variants=variants,
    )


def _ends(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return values if len(values) < 2 else (values[0], values[-1])


def _at_budget(points: tuple[Point, ...], budget: str, budgets: Collection[str]) -> list[Point]:
    """Return the points of this budget, or for one that is not among `budgets` those of the first one with it."""
    if budget in budgets:
        return [point for point in points if point.budget == budget]
    return [msgspec.structs.replace(point, budget=budget) for point in points if point.budget == points[0].budget]


def _compares_headrooms(case: Case) -> bool:
    return any(len(grid.headrooms) > 1 for grid in case.grids)


def _applies(arm_name: str, headroom: float, variant_text: str) -> bool:
    """Return whether the arm can be given the policy.

    Headroom and server variants are flags of this project's arms, and an arm keeps those that it sets itself.
    """
    arm, variant = arm_of(arm_name), variant_of(variant_text)
    own = {flag for flag in arm.flags if flag.startswith("--")}
    if headroom and (arm.organization is None or "--admission-headroom" in own):
        return False
    return variant.fits(arm.organization) and not own.intersection(variant.flags)
