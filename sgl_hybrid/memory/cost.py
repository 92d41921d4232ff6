"""What a set of state costs in a layout, and how many copies of it a budget holds.

Every allocated unit is counted once with its unused bytes: a block takes whole pages, a checkpoint all its member
pages, the convolution states of one slab that slab once. Costs are over all planes; divided by the planes they are
the paper's per-layer formulas. They describe storage only: no residency, concurrency or hit rate follows from them.

Source: paper sections 3.1 to 3.5, equations (1) to (4); Appendix A, equations (A8) and (D2); section E.1.
"""

from __future__ import annotations

import math
import re

import msgspec

from sgl_hybrid.errors import SettingError
from sgl_hybrid.memory.budget import (
    Units,
    attention_unit_total_bytes,
    checkpoint_unit_total_bytes,
    conv_pages_for,
    pages_for,
)
from sgl_hybrid.memory.organization import ConvPlacement, Layout

OBJECT_TOKENS = 512
_MIX_FIELDS = ("attention", "checkpoints", "requests")
_EXPECTED_MIX = "expected a mix like attention=120,checkpoints=16 (optional: requests=8)"


class Mix(msgspec.Struct, frozen=True, kw_only=True):
    """A logical set of state: attention objects of 512 tokens and recurrent checkpoints.

    `requests` sequences each leave their last block half empty on average: they add (page_tokens - 1) / 2 tokens of
    unused KV each. 0 counts full blocks only, as the paper's tables do.
    """

    attention: int
    checkpoints: int
    requests: int = 0

    def __post_init__(self) -> None:
        if min(self.attention, self.checkpoints, self.requests) < 0:
            raise SettingError(
                f"{_EXPECTED_MIX} with counts >= 0, got attention={self.attention},"
                f"checkpoints={self.checkpoints},requests={self.requests}"
            )

    @property
    def tokens(self) -> int:
        """Tokens with attention KV."""
        return self.attention * OBJECT_TOKENS

    def times(self, copies: int) -> Mix:
        """Return `copies` of this set."""
        return Mix(
            attention=self.attention * copies, checkpoints=self.checkpoints * copies, requests=self.requests * copies
        )

    def blocks(self, page_tokens: int) -> int:
        """Return the attention blocks of `page_tokens` tokens, the half-empty last ones included."""
        return math.ceil((2 * self.tokens + self.requests * (page_tokens - 1)) / (2 * page_tokens))


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Allocated bytes of a mix over all planes. `recurrent_bytes` contains conv that lies inside the composite."""

    attention_bytes: int
    recurrent_bytes: int
    conv_bytes: int
    payload_bytes: int
    planes: int

    @property
    def total_bytes(self) -> int:
        return self.attention_bytes + self.recurrent_bytes + self.conv_bytes

    @property
    def plane_bytes(self) -> int:
        """Bytes per plane: the paper's per-layer cost."""
        return self.total_bytes // self.planes

    @property
    def efficiency(self) -> float:
        """Payload bytes / allocated bytes; 1.0 for the empty set."""
        return self.payload_bytes / self.total_bytes if self.total_bytes else 1.0


class PoolFit(msgspec.Struct, frozen=True, kw_only=True):
    """Need and capacity of one pool, in bytes per plane of that pool."""

    pool: str
    needed_bytes: int
    available_bytes: int

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.available_bytes


def parse_mix(text: str) -> Mix:
    """Read "attention=120,checkpoints=16,requests=8"; a missing count is 0.

    Raises:
        SettingError: an unknown name, a repeated one, or a count that is no integer >= 0.
    """
    counts: dict[str, int] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\w+)\s*=\s*(\d+)\s*", part, re.ASCII)
        if not match or match[1] not in _MIX_FIELDS or match[1] in counts:
            raise SettingError(f"{_EXPECTED_MIX}, got {text!r}")
        counts[match[1]] = int(match[2])
    return Mix(
        attention=counts.get("attention", 0),
        checkpoints=counts.get("checkpoints", 0),
        requests=counts.get("requests", 0),
    )


def payload_bytes(layout: Layout, mix: Mix) -> int:
    """Return the bytes of state itself over all layers, without padding; the same in every organization."""
    geometry = layout.geometry
    attention = mix.tokens * geometry.kv_token_bytes * len(geometry.attention_layers)
    return attention + mix.checkpoints * geometry.composite_bytes * len(geometry.recurrent_layers)


def cost(layout: Layout, mix: Mix, *, slabs: int | None = None) -> Cost:
    """Return the allocated bytes of a mix. `slabs` defaults to the fewest possible (ideal packing).

    Raises:
        SettingError: fewer slabs than the checkpoints need.
    Source: paper equations (1) S0, (2) S1, (3) S2 and section 3.5 for D0, times the planes.
    """
    conv_pages = conv_pages_for(layout, mix.checkpoints, slabs=slabs)
    return Cost(
        attention_bytes=mix.blocks(layout.page_tokens) * attention_unit_total_bytes(layout),
        recurrent_bytes=mix.checkpoints * checkpoint_unit_total_bytes(layout),
        conv_bytes=conv_pages * layout.recurrent_page_bytes * layout.recurrent_planes,
        payload_bytes=payload_bytes(layout, mix),
        planes=layout.geometry.planes,
    )


def saving_bytes(before: Layout, after: Layout, mix: Mix, *, slabs: int | None = None) -> int:
    """Return the bytes per plane that `after` saves on the same set; negative when it costs more.

    `slabs` counts those of `after`. Source: paper equations (2) and (4).
    """
    return cost(before, mix).plane_bytes - cost(after, mix, slabs=slabs).plane_bytes


def conv_saving_bytes(layout: Layout, *, live: int, slabs: int) -> int:
    """Return the bytes per plane that `slabs` slabs save over one page for each of `live` convolution states.

    Raises:
        SettingError: the layout has no slabs, or `live` states do not fit them.
    Source: paper section E.1 (same-dump comparison).
    """
    if layout.conv_placement is not ConvPlacement.SLAB:
        raise SettingError(f"expected an organization with conv slabs, got {layout.organization}; nearest: s2")
    return (live - conv_pages_for(layout, live, slabs=slabs)) * layout.page_bytes


def pool_fits(units: Units, mix: Mix) -> tuple[PoolFit, ...]:
    """Return need and capacity of every pool; the mix is feasible when all fit.

    In D0 both limits must hold even when their sum fits. Source: paper section 3.5.
    """
    layout = units.layout
    blocks = mix.blocks(layout.page_tokens)
    if layout.shared:
        return (
            PoolFit(
                pool="shared",
                needed_bytes=pages_for(layout, blocks, mix.checkpoints) * layout.page_bytes,
                available_bytes=units.num_pages * layout.page_bytes,
            ),
        )
    return (
        PoolFit(
            pool="attention",
            needed_bytes=blocks * layout.attention_page_bytes,
            available_bytes=units.attention_layer_bytes,
        ),
        PoolFit(
            pool="recurrent",
            needed_bytes=mix.checkpoints * layout.recurrent_page_bytes,
            available_bytes=units.recurrent_layer_bytes,
        ),
    )


def fits(units: Units, mix: Mix) -> bool:
    """Say whether every pool holds the mix under ideal packing."""
    return all(pool.fits for pool in pool_fits(units, mix))


def capacity(units: Units, mix: Mix) -> int:
    """Return the largest number of copies of a mix that the units hold under ideal packing; an upper bound only.

    Raises:
        SettingError: the mix is empty, so no number is the largest.
    Source: paper equations (D2) for D0 and (A8) for shared pools.
    """
    if mix.attention == 0 and mix.checkpoints == 0:
        raise SettingError(f"{_EXPECTED_MIX} with at least one object, got an empty mix")
    low, high = 0, 1
    while fits(units, mix.times(high)):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if fits(units, mix.times(middle)):
            low = middle
        else:
            high = middle
    return low
