"""Variants: what sets two cells of one case apart besides arm, budget, load and headroom.

A variant changes the load (`onoff`, `isolate`, `share`) or the server (`split=FRACTION`, `pin=K`, `headroom=f`). It is
written as the text that `CellOutcome.variant` keeps; the empty text is no variant.

Source: paper sections 4.5 (SHARE, ISOLATE), B.2 (pinning K), E.4 (bursts), E.5 (split).
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from bench.arrivals import ArrivalProcess, OnOff, Poisson
from bench.registry import registered
from sgl_hybrid.errors import SettingError

BURST_S, PAUSE_S = 5.0, 15.0
"""Source: paper section E.4."""
AUTO_HEADROOM = "headroom=auto"
"""The automatic admission headroom in the place of the condition's f, which is then 0."""


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """What a variant changes. `organizations`: those whose servers have its flags, None if any server will do."""

    flags: tuple[str, ...] = ()
    organizations: tuple[str, ...] | None = None
    bursts: bool = False
    isolate: bool = False

    def fits(self, organization: str | None) -> bool:
        """Return whether an arm of this organization (None: not one of this project's) can run the variant."""
        return self.organizations is None or organization in self.organizations

    def arrivals(self, rate_per_s: float, *, pace: float = 1.0) -> ArrivalProcess:
        """Return when requests arrive, at this mean rate; a pace below 1 stretches all times by its inverse."""
        if self.bursts:
            return OnOff(pace * rate_per_s, on_s=BURST_S / pace, off_s=PAUSE_S / pace)
        return Poisson(pace * rate_per_s)


def _split(value: str) -> Variant:
    return Variant(flags=("--d0-attention-fraction", value), organizations=("d0",))


def _pin(value: str) -> Variant:
    return Variant(flags=("--preempt-pin-k", value), organizations=("s0", "s1", "s2", "d0"))


def _headroom(value: str) -> Variant:
    return Variant(flags=("--admission-headroom", value), organizations=("s0", "s1", "s2", "d0"))


_PLAIN: dict[str, Variant] = {
    "": Variant(),
    "share": Variant(),
    "isolate": Variant(isolate=True),
    "onoff": Variant(bursts=True),
}
_WITH_VALUE: dict[str, Callable[[str], Variant]] = {"split": _split, "pin": _pin, "headroom": _headroom}


def variant_of(text: str) -> Variant:
    """Return the variant that `text` names. Raises: SettingError."""
    name, separator, value = text.partition("=")
    if not separator:
        return registered(_PLAIN, name, "a variant")
    if not value:
        raise SettingError(f"expected a value after {name}=, got none")
    return registered(_WITH_VALUE, name, "a variant with a value")(value)
