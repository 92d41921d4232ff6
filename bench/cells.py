"""Cells: what a case multiplies out to, with what the command line changes of it.

`Changes` are applied to a case's grids before they are multiplied out, so the defaults stay the paper's.

Source: paper section B.5, Table C-1.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import msgspec

from bench.arms import arm_of
from bench.cases import HEADROOMS, Case, Grid, Point
from bench.variants import variant_of
from sgl_hybrid.errors import SettingError

NUM_REQUESTS = 300
"""Requests of one run. Source: paper section B.5."""
QUICK_REQUESTS = 40
"""Requests of a short probe. Source: paper Table C-1 (5c to 5e)."""


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement to make: one arm at one condition with one seed. Fields as in `bench.outcome.CellOutcome`."""

    case: str
    arm: str
    budget: str
    seed: int
    q: float
    rate: float
    cap: int
    headroom: float = 0.0
    variant: str = ""
    num_requests: int = NUM_REQUESTS

    @property
    def point(self) -> Point:
        """Return the operating point that the cell runs at."""
        return Point(self.budget, self.rate, self.cap)

    @property
    def block(self) -> tuple[Any, ...]:
        """Return what cells that differ only in the arm have in common: they are run next to each other."""
        return (self.budget, self.seed, self.q, self.rate, self.cap, self.headroom, self.variant)

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

    Raises: SettingError if nothing is left to run.
    """
    num_requests = changes.num_requests or (QUICK_REQUESTS if changes.quick else NUM_REQUESTS)
    cells: dict[str, Cell] = {}
    for grid in case.grids[: case.quick_grids] if changes.quick else case.grids:
        for cell in _cells(case, _changed(case, grid, changes), num_requests):
            cells.setdefault(cell.key, cell)
    if not cells:
        asked = ", ".join(changes.arms or ())
        raise SettingError(f"expected an arm that case {case.name} can run, got {asked}: its variants are for others")
    return list(cells.values())


def _changed(case: Case, grid: Grid, changes: Changes) -> Grid:
    """Return the grid as the command line wants it; a quick one keeps one point, one seed and two of every list."""
    arms, points, seeds = grid.arms, grid.points, grid.seeds
    fractions, headrooms, variants = grid.shared_fractions, grid.headrooms, grid.variants
    if changes.quick:
        arms, points, seeds = case.quick_arms, points[:1], seeds[:1]
        fractions, headrooms, variants = _ends(fractions), headrooms[:: len(HEADROOMS) // 2][:2], _ends(variants)
    if changes.headrooms is not None and len(grid.headrooms) > 1:
        headrooms = changes.headrooms
    if changes.budgets is not None:
        points = tuple(point for budget in changes.budgets for point in _at_budget(points, budget))
    if changes.rate is not None:
        points = tuple(dict.fromkeys(Point(point.budget, changes.rate, point.cap) for point in points))
    if changes.num_seeds is not None:
        seeds = tuple(range(seeds[0], seeds[0] + changes.num_seeds))
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


def _at_budget(points: tuple[Point, ...], budget: str) -> list[Point]:
    """Return the points of this budget, or for a budget of the user's the first budget's rates and caps with it."""
    own = [point for point in points if point.budget == budget]
    first = points[0].budget
    return own or [msgspec.structs.replace(point, budget=budget) for point in points if point.budget == first]


def _cells(case: Case, grid: Grid, num_requests: int) -> Iterator[Cell]:
    lists = (grid.points, grid.shared_fractions, grid.headrooms, grid.variants, grid.seeds, grid.arms)
    for point, fraction, headroom, variant, seed, arm in itertools.product(*lists):
        if _applies(arm, headroom, variant):
            yield Cell(
                case=case.name,
                arm=arm,
                budget=point.budget,
                seed=seed,
                q=fraction,
                rate=point.rate,
                cap=point.cap,
                headroom=headroom,
                variant=variant,
                num_requests=num_requests,
            )


def _applies(arm_name: str, headroom: float, variant: str) -> bool:
    """Return whether the arm knows the policy: headroom and server variants are flags of this project's arms."""
    arm = arm_of(arm_name)
    return variant_of(variant).fits(arm.organization) and (headroom == 0 or arm.organization is not None)
