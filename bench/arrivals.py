"""Arrival processes: when each request of a run is planned to start, in nanoseconds after the run's start.

A process knows its offered mean rate and draws `count` non-decreasing offsets from a seed; the same seed gives the same
offsets for every arm. Offsets are plans: what was achieved is in the request records.
"""

from __future__ import annotations

import msgspec
import numpy as np

from sgl_hybrid.errors import SettingError

NS_PER_S = 1_000_000_000
_STREAM = 0x617272  # keeps the arrival stream apart from the workload streams of the same seed


class Poisson(msgspec.Struct, frozen=True, tag="poisson"):
    """Independent exponential gaps at `rate_per_s` requests per second."""

    rate_per_s: float

    def __post_init__(self) -> None:
        _require_positive("a rate", self.rate_per_s, "requests/s")

    def offsets_ns(self, count: int, seed: int) -> list[int]:
        """Return `count` offsets [ns]; the first gap is drawn like the others."""
        return _to_ns(_exponential_sums(count, seed, self.rate_per_s))


class OnOff(msgspec.Struct, frozen=True, tag="onoff"):
    """Bursts: Poisson arrivals for `on_s` seconds, silence for `off_s`, over and over, `rate_per_s` on average.

    The paper's 5 s on, 15 s off at 1.7 req/s is 6.8 req/s within a burst. Source: paper appendix E.4.
    """

    rate_per_s: float
    on_s: float = 5.0
    off_s: float = 15.0

    def __post_init__(self) -> None:
        _require_positive("a mean rate", self.rate_per_s, "requests/s")
        _require_positive("a burst length", self.on_s, "s")
        if not self.off_s >= 0:
            raise SettingError(f"expected a pause of at least 0 s, got {self.off_s} s")

    def offsets_ns(self, count: int, seed: int) -> list[int]:
        """Return `count` offsets [ns], none of them inside a pause."""
        period = self.on_s + self.off_s
        busy = _exponential_sums(count, seed, self.rate_per_s * period / self.on_s)  # time with the pauses cut out
        return _to_ns(np.floor(busy / self.on_s) * period + busy % self.on_s)


class AtOnce(msgspec.Struct, frozen=True, tag="at-once"):
    """Every request at the run's start."""

    def offsets_ns(self, count: int, seed: int) -> list[int]:
        """Return `count` zeros."""
        return [0] * count


ArrivalProcess = Poisson | OnOff | AtOnce


def make_arrivals(name: str, *, rate_per_s: float, on_s: float = 5.0, off_s: float = 15.0) -> ArrivalProcess:
    """Return the process called `name`: poisson, onoff or at-once. Raises: SettingError."""
    match name:
        case "poisson":
            return Poisson(rate_per_s)
        case "onoff":
            return OnOff(rate_per_s, on_s, off_s)
        case "at-once":
            return AtOnce()
    raise SettingError(f"expected arrivals of poisson, onoff or at-once, got {name!r}")


def _exponential_sums(count: int, seed: int, rate_per_s: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    rng = np.random.default_rng(np.random.SeedSequence([seed, _STREAM]))
    return np.cumsum(rng.exponential(1.0, size=count)) / rate_per_s


def _to_ns(offsets_s: np.ndarray[tuple[int], np.dtype[np.float64]]) -> list[int]:
    return [round(offset * NS_PER_S) for offset in offsets_s.tolist()]


def _require_positive(what: str, value: float, unit: str) -> None:
    if not 0 < value < float("inf"):
        raise SettingError(f"expected {what} above 0 {unit}, got {value} {unit}")
