"""Cases: the paper's experiments as registered values, and the cells each of them consists of.

A case is a question with one or more grids; a grid is the product of arms, operating points, common-prefix fractions,
headrooms, variants and seeds. What the command line changes (`Changes`) is applied to the grids before they are
multiplied out, so the defaults stay the paper's.

Source: paper Table 2, Tables B-2, B-3, C-1, sections 4.2, 5.4, B.2, E.3 to E.5.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from bench.arms import arm_of
from bench.registry import registered
from bench.variants import variant_of
from sgl_hybrid.errors import SettingError

MAIN_SEEDS = tuple(range(42000, 42012))
"""Source: paper Table 2 (Q1, Q3, Q4), section B.5."""
CONFIRMATION_SEEDS = tuple(range(76400, 76412))
HEADROOMS = (0.0, 0.10, 0.19, 0.27, 0.35)
"""Admission headroom f. Source: paper Table 2 (Q6)."""
NUM_REQUESTS = 300
"""Requests of one run. Source: paper section B.5."""
QUICK_REQUESTS = 40
"""Requests of a short probe. Source: paper Table C-1 (5c to 5e)."""

RIVALS = ("stock-tuned", "stock-unified", "ceiling")
"""What the arms of the paper are set beside unless `--arms` says otherwise."""


class Point(msgspec.Struct, frozen=True):
    """An operating point: a budget, the mean offered rate [requests/s] and the most requests that run at once."""

    budget: str
    rate: float
    cap: int


MAIN = tuple(Point(budget, 3.0, 63) for budget in ("b63", "b83", "b108"))
"""The main load at each budget. Source: paper section 4.2."""


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


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """A block of cells: every combination of its lists that makes sense (`_applies`)."""

    arms: tuple[str, ...]
    points: tuple[Point, ...]
    seeds: tuple[int, ...]
    shared_fractions: tuple[float, ...] = (1.0,)
    headrooms: tuple[float, ...] = (0.0,)
    variants: tuple[str, ...] = ("",)


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One registered experiment. `metric` is a key of `bench.metrics.METRICS`, and so are the values of `beside`: what
    the answer tells besides, by the name it has there. `source` says where the paper has it."""

    name: str
    question: str
    source: str
    grids: tuple[Grid, ...]
    metric: str = "output_tokens_per_s"
    beside: dict[str, str] = {}
    quick_arms: tuple[str, ...] = ("s0", "s1", "s2", "d0", "stock-tuned")


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


def _grid(arms: Sequence[str], points: Sequence[Point], seeds: Sequence[int], **lists: Any) -> Grid:
    return Grid(arms=tuple(arms), points=tuple(points), seeds=tuple(seeds), **lists)


def _points(budget: str, cap: int, *rates: float) -> tuple[Point, ...]:
    return tuple(Point(budget, rate, cap) for rate in rates)


_SHARED = ("s0", "s1", "s2")
_CURVE = (0.8, 1.3, 1.7, 2.2, 3.0)
_SPLITS = ("", "split=0.427383", "split=0.477383", "split=0.577383", "split=0.627383")
_PINS = ("pin=off", "pin=3", "pin=2", "pin=1")

_ALL = (
    Case(
        name="q1",
        question="What do recurrent paging (S1) and conv packing (S2) gain over coarse pages (S0) at the main load?",
        source="1a: section 5.1, Table B-5",
        grids=(_grid((*_SHARED, "d0", *RIVALS), MAIN, MAIN_SEEDS),),
    ),
    Case(
        name="q1-low",
        question="Do the organizations differ when the load is low?",
        source="1b: section 5.1, Table E-3",
        grids=(_grid((*_SHARED, "d0", *RIVALS), (Point("b63", 0.8, 63), Point("b108", 0.8, 109)), (0, 1, 2)),),
    ),
    Case(
        name="q2",
        question="Which work and waiting go with the gain, and does it need less input work?",
        source="2a to 2c: section 5.2, Tables E-1, E-2, G-1",
        grids=(
            _grid(_SHARED, (Point("b63", 3.0, 63), Point("b108", 4.5, 109)), (0, 1, 2)),
            _grid(_SHARED, _points("b83", 63, 3.0), MAIN_SEEDS, shared_fractions=(0.0,)),
        ),
        beside={"recorded input (C_once)": "c_once_tokens"},
        quick_arms=("s0", "s1", "s2"),
    ),
    Case(
        name="q3",
        question="Does sharing a prefix change what an organization gains?",
        source="3a: section 5.2, Table G-2",
        grids=(
            _grid(
                (*_SHARED, "d0", "stock-tuned"),
                _points("b83", 63, 3.0),
                MAIN_SEEDS,
                shared_fractions=(0.0, 0.5, 1.0),
            ),
        ),
        quick_arms=("s0", "s1", "s2"),
    ),
    Case(
        name="q4",
        question="How do the four organizations rank as the budget grows?",
        source="4a: section 5.3, Table E-4",
        grids=(_grid((*_SHARED, "d0"), MAIN, MAIN_SEEDS),),
        quick_arms=("s0", "s1", "s2", "d0"),
    ),
    Case(
        name="q5",
        question="Does the ranking of D0 and S2 depend on the offered load?",
        source="4b, 4c: section 5.3, Table E-5 rows 1 and 2",
        grids=(
            _grid(("d0", "s2"), _points("b63", 63, *_CURVE), (0, 1, 2)),
            _grid(("d0", "s2"), _points("b108", 109, *_CURVE, 4.5), (0, 1, 2)),
            _grid(("d0", "s2"), _points("b63", 63, 3.0), tuple(range(3, 6))),
            _grid(("d0", "s2"), _points("b108", 109, 3.0, 4.5), tuple(range(3, 9))),
        ),
        quick_arms=("d0", "s2"),
    ),
    Case(
        name="q6",
        question="Does admission headroom change which of D0 and S2 is ahead?",
        source="4m to 4o: section 5.4, Tables B-7, B-8",
        grids=(_grid(("d0", "s2"), MAIN, CONFIRMATION_SEEDS, headrooms=HEADROOMS),),
        quick_arms=("d0", "s2"),
    ),
    Case(
        name="q8",
        question="Does keeping checkpoints while their producer runs restore the depth that can be reused?",
        source="RR-1: section 5.5, Tables G-3, G-4",
        grids=(_grid(("s2", "s2-retained"), _points("b83", 63, 3.0), (79010, 79011, 79012), variants=("share",)),),
        metric="cached_share",
        quick_arms=("s2", "s2-retained"),
    ),
    Case(
        name="q9",
        question="Does the gain of retention depend on reuse between requests?",
        source="P1: section 5.5, Tables G-5 to G-7",
        grids=(
            _grid(
                ("s2", "s2-retained"),
                _points("b83", 63, 3.0),
                tuple(range(88001, 88007)),
                variants=("share", "isolate"),
            ),
        ),
        metric="ledger_output_tokens_per_s",
        quick_arms=("s2", "s2-retained"),
    ),
    Case(
        name="caps",
        question="How does the limit on running requests move the gap of D0 and S2?",
        source="4d, 4e: Table E-11, Table E-5 row 3",
        grids=(
            _grid(("d0", "s2"), [Point("b63", 1.7, cap) for cap in (3, 5, 6, 8, 63)], (0, 1, 2)),
            _grid(("d0", "s2"), [Point("b63", 1.7, 8)], tuple(range(3, 9))),
            _grid(("d0", "s2"), [Point("b108", 1.7, cap) for cap in (5, 8, 10, 13, 109)], (0, 1, 2)),
        ),
        quick_arms=("d0", "s2"),
    ),
    Case(
        name="bursts",
        question="Do bursts (5 s on, 15 s off) change the gap of D0 and S2?",
        source="4f: section E.4, Table E-5 row 4",
        grids=(_grid(("d0", "s2"), _points("b63", 63, 1.7), tuple(range(9)), variants=("onoff", "")),),
        quick_arms=("d0", "s2"),
    ),
    Case(
        name="split",
        question="How much does D0 depend on the fixed split of its two pools?",
        source="4g: Table E-12",
        grids=(_grid(("d0",), (Point("b63", 3.0, 63), Point("b108", 3.0, 63)), MAIN_SEEDS, variants=_SPLITS),),
        quick_arms=("d0",),
    ),
    Case(
        name="pinning",
        question="Does pinning a preempted request's checkpoint change the gap of D0 and S2?",
        source="4h: section B.2, Tables E-15, E-16",
        grids=(_grid(("d0", "s2"), (Point("b108", 4.5, 109), Point("b63", 3.0, 63)), tuple(range(6)), variants=_PINS),),
        quick_arms=("d0", "s2"),
    ),
    Case(
        name="matched",
        question="What is left of the difference when D0 gets the 512-token boundaries of S2?",
        source="6a, 6b: Table C-4",
        grids=(
            _grid(
                ("d0-m512", "s2"),
                (Point("b63", 3.0, 63), Point("b108", 3.0, 63)),
                tuple(range(70000, 70006)),
                headrooms=(0.0, 0.19),
            ),
        ),
        metric="cached_share",
        quick_arms=("d0-m512", "s2"),
    ),
    Case(
        name="auto",
        question="Is the automatic headroom as good as the best fixed one?",
        source="not in the paper, which chooses a fixed one on seeds of its own: section C.1",
        grids=(
            _grid(("s2", "d0"), MAIN[:2], MAIN_SEEDS[:3], headrooms=HEADROOMS),
            _grid(("s2", "d0"), MAIN[:2], MAIN_SEEDS[:3], variants=("headroom=auto",)),
        ),
        quick_arms=("s2",),
    ),
    Case(
        name="lifetimes",
        question="Which checkpoints should stay: none, the recent, the wanted, or the dear?",
        source="RR-1 for s2 and s2-retained: section 5.5; the others are not in the paper",
        grids=(
            _grid(
                ("s2-transient", "s2", "s2-retained", "s2-value"),
                _points("b83", 63, 3.0),
                (79010, 79011, 79012),
                variants=("share",),
            ),
        ),
        metric="cached_share",
        quick_arms=("s2-transient", "s2", "s2-retained", "s2-value"),
    ),
    Case(
        name="exact",
        question="What does it cost that a cached prefix gives the same bits as a recomputed one?",
        source="not in the paper; its section D.5 leaves the question open",
        grids=(_grid(("s2", "s2-inexact"), _points("b83", 63, 3.0), MAIN_SEEDS[:6], shared_fractions=(0.0, 1.0)),),
        beside={"median TTFT": "ttft_p50_ms", "the slowest of 100 TTFTs": "ttft_p99_ms"},
        quick_arms=("s2", "s2-inexact"),
    ),
    Case(
        name="low",
        question="What does each organization reuse when nothing has to wait?",
        source="low load of the extension: section B.5",
        grids=(_grid((*_SHARED, "d0"), _points("b83", 63, 0.8), (42000, 42001, 42002)),),
        metric="cached_share",
        quick_arms=("s0", "s2", "d0"),
    ),
)

CASES: dict[str, Case] = {case.name: case for case in _ALL}


def case_of(name: str) -> Case:
    """Return the case called `name`. Raises: SettingError."""
    return registered(CASES, name, "a case")


def cells_of(case: Case, changes: Changes) -> list[Cell]:
    """Return the cells of a case with the changes applied, without repeats, in the order of its grids.

    Raises: SettingError if nothing is left to run.
    """
    num_requests = changes.num_requests or (QUICK_REQUESTS if changes.quick else NUM_REQUESTS)
    cells: dict[str, Cell] = {}
    for grid in case.grids[:1] if changes.quick else case.grids:
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
