"""The paper's effects, to stand beside ours: copied values with their table, found by case, name and place.

Effects are means of paired relative changes in percent, interactions in percentage points. `p` is the paper's corrected
p where it tests the contrast. Throughputs are not copied: an A100 and a nano model on a CPU have none in common.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from bench.stats.rows import Row


class PaperValue(msgspec.Struct, frozen=True, kw_only=True):
    """One printed effect. `place`: everything that says where, in the words of `bench.stats.contrasts.labels`."""

    case: str
    name: str
    place: frozenset[str]
    effect: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    source: str


def paper_value(row: Row) -> PaperValue | None:
    """Return what the paper prints for the contrast of a row, or None. A row names of its place only what varies."""
    parts = frozenset(row.where.split(", "))
    found = [v for v in PAPER_VALUES if (v.case, v.name) == (row.case, row.name) and parts <= v.place]
    return found[0] if len(found) == 1 else None


def _at(budget: str, rate: float = 3.0, cap: int = 63, *, q: float = 1.0, f: float = 0.0, variant: str = "plain"):  # type: ignore[no-untyped-def]
    return frozenset((budget, f"q {q:g}", f"{rate:g} req/s", f"cap {cap}", f"f {f:g}", variant))


def _value(case: str, name: str, place: frozenset[str], source: str, effect: float, *bounds_and_p: float) -> PaperValue:
    """Make a value from effect, and p, or low, high and p."""
    low, high, p = (None, None, None)
    if len(bounds_and_p) == 1:
        (p,) = bounds_and_p
    elif len(bounds_and_p) == 3:
        low, high, p = bounds_and_p
    return PaperValue(case=case, name=name, place=place, source=source, effect=effect, low=low, high=high, p=p)


def _steps() -> Iterator[PaperValue]:
    table = "Table B-5"
    for budget, s1, s2, p in (
        ("b63", 51.784, 8.929, 0.01074),
        ("b83", 47.568, 12.628, 0.01074),
        ("b108", 56.235, 9.972, 0.03662),
    ):
        yield _value("q1", "S1/S0", _at(budget), table, s1, 0.01074)
        yield _value("q1", "S2/S1", _at(budget), table, s2, p)
    for budget, gap in (("b63", 4.978), ("b83", -1.728), ("b108", -12.556)):
        yield _value("q1", "D0/S2", _at(budget), "section 5.3", gap)
        yield _value("q4", "D0/S2", _at(budget), "section 5.3", gap)
    for budget, rate, cap, s1, s2 in (("b63", 3.0, 63, 51.4997, 9.4512), ("b108", 4.5, 109, 46.6513, 9.2296)):
        yield _value("q2", "S1/S0", _at(budget, rate, cap), "Table E-2", s1)
        yield _value("q2", "S2/S1", _at(budget, rate, cap), "Table E-2", s2)
    yield _value("q2", "S1/S0", _at("b83", q=0.0), "Table G-2", 37.945)
    yield _value("q2", "S2/S1", _at("b83", q=0.0), "Table G-2", 2.586)


def _sharing() -> Iterator[PaperValue]:
    table = "Table G-2"
    for q, s1, s2, d0 in ((0.0, 37.945, 2.586, -3.294), (0.5, 38.797, 4.150, 3.291), (1.0, 47.568, 12.628, -1.728)):
        for name, effect in (("S1/S0", s1), ("S2/S1", s2), ("D0/S2", d0)):
            yield _value("q3", name, _at("b83", q=q), table, effect)
    for pair, effect, p in (("S1/S0", 9.623, 0.01074), ("S2/S1", 10.043, 0.01074), ("D0/S2", 1.566, 0.41113)):
        yield _value("q3", f"{pair}, q 1 instead of 0", _at("b83"), "Figure 4, section E.6", effect, p)


def _load() -> Iterator[PaperValue]:
    table = "Table E-5"
    yield _value("q5", "D0/S2", _at("b63", 3.0), table, 3.64, 0.3750)
    yield _value("q5", "D0/S2", _at("b108", 4.5, 109), table, -5.97, 0.0391)
    yield _value("q5", "D0/S2", _at("b108", 3.0, 109), "section 5.3 (six seeds)", -13.17)
    yield _value("caps", "D0/S2", _at("b63", 1.7, 8), table, -8.34, 0.0391)
    yield _value("bursts", "D0/S2", _at("b63", 1.7, variant="onoff"), table, -0.37, 0.5469)
    for budget, gaps in (
        ("b63", {63: -0.98, 3: -3.48, 5: -5.88, 6: -9.06}),
        ("b108", {109: -0.43, 5: -8.59, 8: -7.82, 10: -4.22, 13: -2.66}),
    ):
        for cap, gap in gaps.items():
            yield _value("caps", "D0/S2", _at(budget, 1.7, cap), "Table E-11", gap)


def _headroom() -> Iterator[PaperValue]:
    table = "Table B-7"
    p = 0.00830
    for budget, zero, common in (
        ("b63", (4.431, 2.911, 5.944, p), (-8.420, -9.836, -6.756, p)),
        ("b83", (-3.269, -7.084, -0.023, 0.30762), (-16.348, -17.783, -14.731, p)),
        ("b108", (-14.070, -16.428, -11.842, p), (-11.993, -14.429, -9.644, p)),
    ):
        yield _value("q6", "D0/S2", _at(budget), table, *zero)
        yield _value("q6", "D0/S2", _at(budget, f=0.19), table, *common)
    for budget, name, found in (
        ("b63", "D0/S2, headroom 0 and 0.27", (-8.013, -9.863, -6.147, p)),
        ("b83", "D0/S2, headroom 0.1 and 0.35", (-16.218, -17.395, -15.095, p)),
        ("b108", "D0/S2, headroom 0.1 and 0", (-11.936, -14.211, -9.697, p)),
        ("b63", "S2, headroom 0.27 instead of 0", (13.613, 11.658, 15.393, p)),
        ("b83", "S2, headroom 0.35 instead of 0", (18.808, 14.047, 23.214, p)),
        ("b83", "D0, headroom 0.1 instead of 0", (2.857, 2.559, 3.139, p)),
        ("b108", "D0, headroom 0.1 instead of 0", (2.501, 1.789, 3.231, p)),
    ):
        yield _value("q6", name, _at(budget), table, *found)


def _policies() -> Iterator[PaperValue]:
    for budget, effects in (
        ("b63", {"0.427383": (-2.480, 0.01074), "0.477383": (0.850, 0.03955), "0.577383": (-4.311, 0.01074)}),
        ("b108", {"0.427383": (0.867, 0.03662), "0.477383": (1.854, 0.01074), "0.577383": (-6.150, 0.01074)}),
        ("b63", {"0.627383": (-10.959, 0.01074)}),
        ("b108", {"0.627383": (-13.779, 0.01074)}),
    ):
        for split, (effect, p) in effects.items():
            yield _value("split", f"D0, split={split} instead of the default", _at(budget), "Table E-12", effect, p)
    for budget, rate, cap, gaps, change in (
        ("b108", 4.5, 109, {"off": -4.74, "3": -4.46, "2": -4.74, "1": -4.87}, -0.4097),
        ("b63", 3.0, 63, {"off": 3.62, "3": 3.24, "2": 3.64, "1": 3.68}, 0.4425),
    ):
        for k, gap in gaps.items():
            yield _value("pinning", "D0/S2", _at(budget, rate, cap, variant=f"pin={k}"), "Table E-15", gap)
        yield _value("pinning", "D0/S2, pin K 1 instead of 3", _at(budget, rate, cap), "Table E-16", change, 0.875)
    for name, variant, found in (
        ("S2-retained/S2", "share", (15.2563, 0.7993, 31.7867)),
        ("S2-retained/S2", "isolate", (0.8328, -1.3181, 3.0306)),
        ("S2-retained/S2, share instead of isolate", "share", (14.3043, -0.1057, 30.7930)),
    ):
        effect, low, high = found
        place = _at("b83", variant=variant)
        yield PaperValue(case="q9", name=name, place=place, effect=effect, low=low, high=high, source="Table G-7")


PAPER_VALUES: tuple[PaperValue, ...] = (*_steps(), *_sharing(), *_load(), *_headroom(), *_policies())
