"""The budget of protection: units that policies keep from eviction, whoever asks for them.

Retention and pins draw on one budget per pool, so together they never hold more than its share of the pool. A cost has
one number of units for each pool: one pool in a shared organization, attention and checkpoints in a dual one.
Source: paper section B.2 (the paper names a protection budget and gives no value).
"""

from __future__ import annotations

from collections.abc import Sequence

from radix.headroom import share_of

Units = tuple[int, ...]


class ProtectionBudget:
    """Units of each pool that may be protected, and those that are."""

    def __init__(self, limits: Sequence[int]) -> None:
        if any(limit < 0 for limit in limits):
            raise ValueError(f"expected limits from 0 units on, got {tuple(limits)}")
        self.limits: Units = tuple(limits)
        self.used: Units = (0,) * len(self.limits)

    @classmethod
    def share(cls, fraction: float, pools: Sequence[int]) -> ProtectionBudget:
        """Return the budget of a share of each pool, in whole units.

        Raises:
            ValueError: the share is not between 0 and 1.
        """
        if not 0.0 <= fraction <= 1.0:
            raise ValueError(f"expected a share between 0 and 1, got {fraction}")
        return cls([share_of(fraction, units) for units in pools])

    def fits(self, cost: Units) -> bool:
        """Tell whether a cost is within what is left in every pool."""
        return all(used + more <= limit for used, more, limit in zip(self.used, cost, self.limits, strict=True))

    def take(self, cost: Units) -> bool:
        """Take a cost from every pool; take nothing and return False if one of them has too little left."""
        if not self.fits(cost):
            return False
        self.used = tuple(used + more for used, more in zip(self.used, cost, strict=True))
        return True

    def give_back(self, cost: Units) -> None:
        """Return a cost that was taken.

        Raises:
            ValueError: more than was taken.
        """
        left = tuple(used - less for used, less in zip(self.used, cost, strict=True))
        if min(left, default=0) < 0:
            raise ValueError(f"expected at most {self.used} units back, got {cost}")
        self.used = left
