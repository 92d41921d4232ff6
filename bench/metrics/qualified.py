"""Two runs compared by the output that keeps latency limits taken from the runs themselves.

It shows how far a difference depends on what counts as good service; it is no test of a service objective. The paper
keeps both limits side by side and does not pick the more favourable one. Source: paper appendices B.4, E.8, Table E-13.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from bench.metrics.latency import Limits, e2e_ms, empirical_limits, goodput, spread, tpot_ms
from bench.records import RequestRecord


class Qualified(msgspec.Struct, frozen=True, kw_only=True):
    """One seed: ratios of p99 and changes of goodput [%]; None where the other side has nothing to divide by."""

    e2e_p99_ratio: float | None
    tpot_p99_ratio: float | None
    comparator_pct: float | None
    union_pct: float | None


def qualified(ours: Sequence[RequestRecord], comparator: Sequence[RequestRecord]) -> Qualified | None:
    """Compare two runs of one seed under limits of the comparator, and of both; None if either answered nothing."""
    sides = [[record for record in records if record.status == "ok"] for records in (ours, comparator)]
    if not all(sides):
        return None
    return Qualified(
        e2e_p99_ratio=_ratio(*(_p99(map(e2e_ms, side)) for side in sides)),
        tpot_p99_ratio=_ratio(*(_p99(map(tpot_ms, side)) for side in sides)),
        comparator_pct=_change(ours, comparator, empirical_limits(comparator)),
        union_pct=_change(ours, comparator, empirical_limits([*ours, *comparator])),
    )


def _p99(values: Iterable[float | None]) -> float | None:
    found = spread(values)
    return None if found is None else found.p99


def _ratio(ours: float | None, other: float | None) -> float | None:
    return ours / other if ours is not None and other else None


def _change(ours: Sequence[RequestRecord], comparator: Sequence[RequestRecord], limits: Limits) -> float | None:
    good, other = goodput(ours, limits), goodput(comparator, limits)
    ratio = _ratio(good.output_tokens_per_s, other.output_tokens_per_s) if good and other else None
    return None if ratio is None else 100 * (ratio - 1)
