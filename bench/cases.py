"""Cases: the paper's experiments as registered values. How one becomes cells is in `bench.cells`.

A case is a question with one or more grids; a grid is the product of arms, operating points, common-prefix fractions,
headrooms, variants and seeds.

Source: paper Table 2, Tables B-2, B-3, C-1, sections 4.2, 5.4, B.2, E.3 to E.5.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from bench.registry import registered
from bench.variants import AUTO_HEADROOM

MAIN_SEEDS = tuple(range(42000, 42012))
"""Source: paper Table 2 (Q1, Q3, Q4), section B.5."""
CONFIRMATION_SEEDS = tuple(range(76400, 76412))
HEADROOMS = (0.0, 0.10, 0.19, 0.27, 0.35)
"""Admission headroom f. Source: paper Table 2 (Q6)."""
MOST_SEEDS = 20
"""Seeds that an exact test can enumerate: 2^20 assignments take seconds; more are refused rather than sampled."""
RIVALS = ("stock-tuned", "stock-unified", "ceiling")
"""What the arms of the paper are set beside unless `--arms` says otherwise."""
AS_SERVED = "s2-auto"
"""The organization that README recommends, with the headroom that a user gets: the paper's arms run without."""


class Point(msgspec.Struct, frozen=True):
    """An operating point: a budget, the mean offered rate [requests/s] and the most requests that run at once."""

    budget: str
    rate: float
    cap: int

    def describe(self) -> str:
        """Return the point in words."""
        return f"{self.budget}, {self.rate:g} requests/s, cap {self.cap}"


MAIN = tuple(Point(budget, 3.0, 63) for budget in ("b63", "b83", "b108"))
"""The main load at each budget. Source: paper section 4.2."""


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """A block of cells: every combination of its lists that an arm can run."""

    arms: tuple[str, ...]
    points: tuple[Point, ...]
    seeds: tuple[int, ...]
    shared_fractions: tuple[float, ...] = (1.0,)
    headrooms: tuple[float, ...] = (0.0,)
    variants: tuple[str, ...] = ("",)


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One registered experiment. `metric` is a key of `bench.metrics.METRICS`, and so are the values of `beside`: what
    the answer tells besides, by the name it has there. `source` says where the paper has it. A quick run keeps the
    first `quick_grids` of the grids. `first_look` is the number of seeds after which its tests were looked at before
    more were run, None if all seeds are one look."""

    name: str
    question: str
    source: str
    grids: tuple[Grid, ...]
    metric: str = "output_tokens_per_s"
    beside: dict[str, str] = {}
    quick_arms: tuple[str, ...] = ("s0", "s1", "s2", "d0", "stock-tuned")
    quick_grids: int = 1
    first_look: int | None = None


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
        grids=(_grid((*_SHARED, "d0", AS_SERVED, *RIVALS), MAIN, MAIN_SEEDS),),
        quick_arms=("s0", "s1", "s2", "d0", AS_SERVED, "stock-tuned"),
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
        first_look=6,
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
        first_look=6,
    ),
    Case(
        name="bursts",
        question="Do bursts (5 s on, 15 s off) change the gap of D0 and S2?",
        source="4f: section E.4, Table E-5 row 4",
        grids=(_grid(("d0", "s2"), _points("b63", 63, 1.7), tuple(range(9)), variants=("onoff", "")),),
        quick_arms=("d0", "s2"),
        first_look=6,
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
            _grid(("s2", "d0"), MAIN[:2], MAIN_SEEDS[:3], variants=(AUTO_HEADROOM,)),
        ),
        quick_arms=("s2",),
        quick_grids=2,
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
        beside={"median TTFT": "ttft_p50_ms", "TTFT p99": "ttft_p99_ms"},
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
