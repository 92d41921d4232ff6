"""The windows over which a run is looked at, and what is said about each.

Three views answer different questions and are never substituted for each other. *Full run*: the request span, growth
and drain included. *Central arrival*: between the 20th and the 80th percentile of the arrival sequence that all arms
share, not the middle of each arm's own duration. *Full poller*: from the first sample to the last, which may begin
before and end after either. The ledger episode is a fourth timebase: wall clock of the whole load, orchestration in.
Source: paper section 4.1, appendices B.4, E.9 and G.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bench.records import RequestRecord
from bench.samples import GaugeSample

NS_PER_S = 1_000_000_000
CENTRAL_PERCENTILES = (20.0, 80.0)
DRIFT_TOLERANCE = 0.1


class Window(NamedTuple):
    """A span of the run's clock [ns], both ends in."""

    begin_ns: int
    end_ns: int

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.begin_ns) / NS_PER_S

    def holds(self, at_ns: int) -> bool:
        """Return whether a moment is in the window."""
        return self.begin_ns <= at_ns <= self.end_ns


def request_span(records: Sequence[RequestRecord]) -> Window | None:
    """Return first request sent to last token of the last request answered in full, or None if none was."""
    ends = [known(record.last_token_ns) for record in records if record.status == "ok"]
    sent = [record.sent_ns for record in records if record.sent_ns is not None]
    return Window(min(sent), max(ends)) if ends else None


def central_arrival(arrivals_ns: Sequence[int]) -> Window | None:
    """Return the 20th to 80th percentile of the arrivals (linear interpolation), or None for fewer than two.

    Given the planned arrivals, the window is the same for every arm of a seed. Given the times at which one run sent
    its requests, it is the realized window of that run, which is another view (appendix B.8).
    """
    if len(arrivals_ns) < 2:
        return None
    begin, end = np.percentile(np.asarray(arrivals_ns, dtype=np.float64), CENTRAL_PERCENTILES)
    return Window(round(begin), round(end))


def full_poller(samples: Sequence[GaugeSample]) -> Window | None:
    """Return first to last sample, or None for fewer than two."""
    return Window(samples[0].at_ns, samples[-1].at_ns) if len(samples) > 1 else None


def output_tokens_in(records: Sequence[RequestRecord], window: Window) -> float:
    """Return the output tokens of requests answered in full that came within the window.

    Exact where the times of all tokens were kept. Otherwise the first token counts at its time and the rest is spread
    evenly from there to the last, so the sum is a fraction.
    """
    return sum(_tokens_in(record, window) for record in records if record.status == "ok")


def _tokens_in(record: RequestRecord, window: Window) -> float:
    if record.token_times_ns is not None:
        return sum(window.holds(at_ns) for at_ns in record.token_times_ns)
    first_ns, last_ns = known(record.first_token_ns), known(record.last_token_ns)
    first = float(window.holds(first_ns))
    if last_ns == first_ns:
        return first * record.output_tokens
    overlap_ns = min(last_ns, window.end_ns) - max(first_ns, window.begin_ns)
    return first + (record.output_tokens - 1) * max(0, overlap_ns) / (last_ns - first_ns)


class Drift(NamedTuple):
    """Mean of one gauge in the first and in the second half of a window, and whether they differ by more than allowed.

    A screen: no drift is no proof of a steady state.
    """

    early: float
    late: float
    drifts: bool


def drift(
    samples: Sequence[GaugeSample], gauge: str, window: Window, *, tolerance: float = DRIFT_TOLERANCE
) -> Drift | None:
    """Compare early and late means of `running` or `waiting`; None where a half of the window has no value.

    tolerance: largest difference allowed, as a share of the larger mean. The paper compares the two means and does not
    print its limit; the default is ours.
    """
    middle_ns = (window.begin_ns + window.end_ns) // 2
    early = gauge_values(samples, gauge, Window(window.begin_ns, middle_ns))
    late = gauge_values(samples, gauge, Window(middle_ns + 1, window.end_ns))
    if not early.size or not late.size:
        return None
    means = float(early.mean()), float(late.mean())
    return Drift(*means, drifts=abs(means[1] - means[0]) > tolerance * max(means))


def gauge_values(samples: Sequence[GaugeSample], gauge: str, window: Window | None = None) -> np.ndarray:
    """Return the reported values of a gauge, those in the window if one is given: [n] float64."""
    inside = [sample for sample in samples if window is None or window.holds(sample.at_ns)]
    values = [getattr(sample, gauge) for sample in inside]
    return np.asarray([value for value in values if value is not None], dtype=np.float64)


def known(time_ns: int | None) -> int:
    """Return the time. Raises: ValueError if a record that was answered in full lacks it."""
    if time_ns is None:
        raise ValueError("expected a record with its times, got one without: the requests file was changed")
    return time_ns
