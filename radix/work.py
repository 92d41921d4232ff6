"""Work of a scheduler: tokens that it submitted, tokens recorded once, and admission rounds that came to nothing.

Source: paper sections B.4, C.1, C.3 and E.1 (H = C_once + O_ctr; categories of submitted work).
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class Submitted(NamedTuple):
    """Tokens of one batch: computed for requests that were never retracted, for retracted ones, and decoded."""

    initial: int = 0
    resume: int = 0
    normal_decode: int = 0


class WorkCounts(msgspec.Struct):
    """Sums since start.

    initial, resume, normal_decode: tokens of submitted batches (`Submitted`). records: batches with tokens (K).
    input_once: prompt tokens of requests that have ended, each once (C_once). output: tokens that they made (O_ctr).
    rounds, empty_rounds: admission rounds that looked at a waiting request, and those of them that admitted none.
    """

    initial: int = 0
    resume: int = 0
    normal_decode: int = 0
    records: int = 0
    input_once: int = 0
    output: int = 0
    rounds: int = 0
    empty_rounds: int = 0

    @property
    def recorded(self) -> int:
        """All recorded tokens (H)."""
        return self.input_once + self.output

    def submit(self, work: Submitted) -> None:
        """Count one batch."""
        self.initial += work.initial
        self.resume += work.resume
        self.normal_decode += work.normal_decode
        self.records += any(work)

    def end(self, *, input_tokens: int, output_tokens: int) -> None:
        """Count a request that has ended."""
        self.input_once += input_tokens
        self.output += output_tokens


class Rounds:
    """The admission round that goes on, and how the last one stopped."""

    def __init__(self, counts: WorkCounts) -> None:
        self._counts = counts
        self._tried = False
        self.held_back = False
        """Whether the request that waits first would fit and waits for headroom alone."""

    def begin(self) -> None:
        """A round begins; no request has been looked at."""
        self._tried = self.held_back = False

    def tried(self, *, admitted: bool, held_back: bool) -> None:
        """A waiting request was admitted or left waiting; a round may try several and stops at the first that waits."""
        if not self._tried:
            self._tried = True
            self._counts.rounds += 1
            self._counts.empty_rounds += not admitted
        self.held_back = held_back and not admitted
