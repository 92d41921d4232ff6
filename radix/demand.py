"""Who wants which boundary: distinct requests for each prefix that ends on the checkpoint grid.

A boundary is named by a digest of its namespace and of all tokens before it, so it has a name whether or not a
checkpoint exists there. Every part of a namespace goes into the digest with its presence and its length: no two
namespaces meet by concatenation.

A repeat by the same request does not count, however often it is looked up, retracted or resumed. What is remembered is
bounded: the boundaries wanted last, and for each the last few of its requests. Requests older than the horizon no
longer count, so a context that nobody asks for loses its weight.
Source: paper sections 4.5 and B.2; the paper does not say how long a requester is remembered.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

DIGEST_BYTES = 16


class Namespace(NamedTuple):
    """What a request shares its prefix with: only requests of the same parts. `extra_key` includes the adapter."""

    extra_key: str | None = None
    cache_salt: str | None = None

    def seed(self) -> bytes:
        """Return a digest that differs for any two namespaces."""
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for part in self:
            encoded = None if part is None else part.encode("utf-8", "surrogatepass")
            digest.update(b"\0" if encoded is None else b"\1" + len(encoded).to_bytes(8, "little") + encoded)
        return digest.digest()


class BoundaryNames:
    """Names of the boundaries of one request, made once each. A name depends on the namespace and on every token before
    the boundary; grid: tokens between two boundaries."""

    def __init__(self, namespace: Namespace, grid: int) -> None:
        self.grid = grid
        self._names: list[bytes] = []
        self._last = namespace.seed()

    @property
    def named(self) -> list[bytes]:
        """Names made so far, in order."""
        return self._names

    def up_to(self, tokens: Sequence[int]) -> list[bytes]:
        """Return the names of all boundaries of a prefix, in order. The prefix must go on from the one of the last call
        or be a part of it; tokens are read as 64-bit integers, those of named boundaries not again."""
        named = len(self._names) * self.grid
        wanted = len(tokens) // self.grid
        content = array("q", tokens[named : wanted * self.grid]).tobytes()
        width = 8 * self.grid
        for start in range(0, len(content), width):
            block = content[start : start + width]
            self._last = hashlib.blake2b(self._last + block, digest_size=DIGEST_BYTES).digest()
            self._names.append(self._last)
        return self._names[:wanted]


class Demand:
    """Distinct requests per boundary, in bounded memory.

    Args:
        horizon: how many of the last distinct requests count.
        max_boundaries: boundaries remembered; the one wanted least recently is forgotten first.
        max_requesters: requests remembered per boundary, so no count is larger.
    """

    def __init__(self, *, horizon: int = 1024, max_boundaries: int = 16_384, max_requesters: int = 8) -> None:
        if min(horizon, max_boundaries, max_requesters) < 1:
            raise ValueError(f"expected limits from 1 on, got {horizon}, {max_boundaries}, {max_requesters}")
        self.horizon = horizon
        self.max_boundaries = max_boundaries
        self.max_requesters = max_requesters
        self._arrivals: OrderedDict[str, int] = OrderedDict()
        self._num_arrived = 0
        self._wanted: OrderedDict[bytes, OrderedDict[str, int]] = OrderedDict()

    def register(self, requester: str, boundaries: Iterable[bytes]) -> list[bytes]:
        """Note that a request wants boundaries; return those for which it is a new requester."""
        arrival = self._arrivals.get(requester)
        if arrival is None:
            self._num_arrived += 1
            arrival = self._arrivals[requester] = self._num_arrived
            while len(self._arrivals) > self.horizon:
                self._arrivals.popitem(last=False)
        new = []
        for boundary in boundaries:
            requesters = self._wanted.setdefault(boundary, OrderedDict())
            self._wanted.move_to_end(boundary)
            if requester not in requesters:
                new.append(boundary)
            requesters[requester] = arrival
            while len(requesters) > self.max_requesters:
                requesters.popitem(last=False)
        while len(self._wanted) > self.max_boundaries:
            self._wanted.popitem(last=False)
        return new

    def count(self, boundary: bytes) -> int:
        """Return the distinct requests, among the last `horizon`, that wanted a boundary (at most `max_requesters`)."""
        oldest = self._num_arrived - self.horizon
        return sum(arrival > oldest for arrival in self._wanted.get(boundary, {}).values())

    def __len__(self) -> int:
        return len(self._wanted)

    def clear(self) -> None:
        """Forget every boundary and request."""
        self._arrivals.clear()
        self._wanted.clear()
