"""Admission headroom: blocks that must stay free beyond the need when a waiting or retracted request is admitted.

Headroom is a condition, not memory: nothing is set aside or handed out. `available` counts what could be handed out,
so it includes cached blocks that no request references. A pool has its own number of blocks B and its own
H = floor(f*B); with two pools a request needs both to agree. When nothing runs, H does not count: whatever fits is
admitted, so a request can wait for others but never for headroom alone.

Source: paper sections 4.4 and C.3; the paper leaves open what B is in D0.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

LOWEST, HIGHEST = 0.0, 0.35
"""Bounds of the automatic fraction; the upper one is the largest that the paper measures in every organization."""


class Verdict(enum.StrEnum):
    """What admission says: yes, not without the headroom, or not at all now."""

    ADMIT = "admit"
    HEADROOM = "headroom"
    SHORT = "short"


class PoolCheck(NamedTuple):
    """One pool at an admission, all in one unit of the caller's: what the request needs, what could be handed out, and
    the headroom that has to stay."""

    need: int
    available: int
    headroom: int


def share_of(fraction: float, units: int) -> int:
    """Return floor(fraction * units). The fraction is read as the decimal that it was written as: 0.29 of 100 is 29."""
    return math.floor(Fraction(repr(fraction)) * units)


def headroom_blocks(fraction: float, num_blocks: int) -> int:
    """Return H = floor(f*B) in blocks.

    Raises:
        ValueError: the fraction is not in [0, 1), or the number of blocks is negative.
    """
    if not 0.0 <= fraction < 1.0 or num_blocks < 0:
        raise ValueError(f"expected 0 <= f < 1 of 0 or more blocks, got f={fraction} of {num_blocks}")
    return share_of(fraction, num_blocks)


def judge(checks: Sequence[PoolCheck], *, idle: bool) -> Verdict:
    """Judge one candidate. idle: no request runs and none was admitted in this round; then only the need counts."""
    if any(check.need > check.available for check in checks):
        return Verdict.SHORT
    if idle or all(check.need + check.headroom <= check.available for check in checks):
        return Verdict.ADMIT
    return Verdict.HEADROOM


class FixedHeadroom:
    """A fraction that was given."""

    def __init__(self, fraction: float) -> None:
        self.fraction = fraction

    def retracted(self, lost_tokens: int) -> None:
        """Ignored: the fraction is fixed."""

    def missed(self, lost_tokens: int) -> None:
        """Ignored: the fraction is fixed."""

    def deferred(self) -> None:
        """Ignored: the fraction is fixed."""


class AutoHeadroom:
    """A fraction that follows what is observed, between `LOWEST` and `HIGHEST`.

    Both errors of a fraction are counted in tokens. One that is too small costs recomputation, of what a retracted
    request had computed and of prefixes whose checkpoint was published once and evicted since. One that is too large
    costs the token that a request would have made in each step in which it waits for headroom alone. A token that is
    computed again counts `replay_weight` of that: prefill makes it cheaper, but its request holds pages of its own for
    it while it runs, where it would have shared them. The fraction rises with the first and falls with the second, by
    `gain` times their share of the tokens of the pool, so it rests where both cost the same.

    pool_tokens: tokens that the pool would hold with attention only.
    """

    def __init__(self, pool_tokens: int, *, start: float = 0.1, gain: float = 3.0, replay_weight: float = 0.5) -> None:
        if pool_tokens < 1 or not LOWEST <= start <= HIGHEST:
            raise ValueError(
                f"expected a pool of at least 1 token and a start from {LOWEST} to {HIGHEST}, "
                f"got {pool_tokens} tokens and {start}"
            )
        self.fraction = start
        self._step = gain / pool_tokens
        self._replay_weight = replay_weight

    def retracted(self, lost_tokens: int) -> None:
        """Note a retraction after which `lost_tokens` have to be computed again."""
        self._move(self._replay_weight * lost_tokens)

    def missed(self, lost_tokens: int) -> None:
        """Note an admission that computes `lost_tokens` of a prefix again, because its checkpoint is cached no more."""
        self._move(self._replay_weight * lost_tokens)

    def deferred(self) -> None:
        """Note a scheduler round in which a request waited for headroom alone."""
        self._move(-1.0)

    def _move(self, tokens: float) -> None:
        self.fraction = min(HIGHEST, max(LOWEST, self.fraction + self._step * tokens))


Headroom = FixedHeadroom | AutoHeadroom
