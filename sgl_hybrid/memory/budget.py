"""From one number of bytes to whole units of each organization.

A budget is the state memory of the whole model on one rank. It is written as a size ("4GiB", a total), as a size per
plane ("100MiB/layer") or as one of the paper's names ("b63": 63 budget units per plane). Shared pools turn a named
budget into the nearest whole number of pages, as the paper's planner does, and a size into the number that fits; D0
always rounds each pool down. `Units` gives the counts and the bytes in both scopes.

Source: paper section B.3 and Tables B-2 and B-3; the rounding rule is derived from those tables.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

import msgspec

from sgl_hybrid.errors import SettingError
from sgl_hybrid.memory.geometry import StateGeometry
from sgl_hybrid.memory.organization import ConvPlacement, Layout
from sgl_hybrid.memory.split import resolve_fraction

SIZE_BYTES = {
    "": 1,
    "b": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
NAMED = re.compile(r"b(\d+)", re.ASCII)
"""A planner label: budget units per plane."""
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)(/layer)?", re.ASCII | re.IGNORECASE)
"""A size: number, unit (`SIZE_BYTES`), and whether it is per plane."""
_EXPECTED = "expected a budget like 4GiB, 512MiB, 100MiB/layer, a number of bytes or b63"


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """State memory of one rank. `total_bytes` is over all planes; `planes` is the plane count it was stated for.

    `nearest` says that shared pools round to the nearest page (named budgets) and may exceed the total by half a
    page per plane; otherwise they round down.
    """

    text: str
    total_bytes: int
    planes: int
    nearest: bool = False

    @property
    def plane_bytes(self) -> int:
        """Bytes per plane, rounded down; the paper's nominal bytes, which are per layer."""
        return self.total_bytes // self.planes


class Units(msgspec.Struct, frozen=True, kw_only=True):
    """What a budget buys in one organization. Shared pools have `num_pages`, D0 the other two; the rest are 0.

    No unit is set aside here: a pool that keeps page 0 as a padding sink takes it out of these counts.
    """

    layout: Layout
    budget: Budget
    num_pages: int = 0
    num_attention_pages: int = 0
    num_checkpoints: int = 0
    attention_fraction: float | None = None

    @property
    def attention_layer_bytes(self) -> int:
        """D0: bytes of the attention pool in one attention layer."""
        return self.num_attention_pages * self.layout.attention_page_bytes if not self.layout.shared else 0

    @property
    def recurrent_layer_bytes(self) -> int:
        """D0: bytes of the recurrent pool in one recurrent layer."""
        return self.num_checkpoints * self.layout.recurrent_page_bytes if not self.layout.shared else 0

    @property
    def total_bytes(self) -> int:
        """Bytes over all planes of all pools."""
        if self.layout.shared:
            return self.num_pages * self.layout.page_bytes * self.layout.planes
        return (
            self.attention_layer_bytes * self.layout.attention_planes
            + self.recurrent_layer_bytes * self.layout.recurrent_planes
        )

    @property
    def plane_bytes(self) -> int:
        """Total bytes per plane of the budget (the paper's layer scope), rounded down to a whole byte."""
        return self.total_bytes // self.budget.planes


def parse_budget(text: str, geometry: StateGeometry) -> Budget:
    """Read a budget for one model.

    "4GiB", "512MiB", "1.5GB", "4294967296": total over all planes. "100MiB/layer": per plane. "b63": 63 budget
    units per plane (`StateGeometry.budget_unit_bytes`), rounded to nearest in shared pools.

    Raises:
        SettingError: negative, zero or not a size.
    """
    planes = geometry.planes
    named = NAMED.fullmatch(text.strip())
    if named:
        plane_bytes = int(named[1]) * geometry.budget_unit_bytes
        if plane_bytes == 0:
            raise SettingError(f"{_EXPECTED}, got {text!r}; nearest: b1")
        return Budget(text=text.strip(), total_bytes=plane_bytes * planes, planes=planes, nearest=True)
    size = SIZE.fullmatch(text.strip())
    if not size or size[2].lower() not in SIZE_BYTES:
        raise SettingError(f"{_EXPECTED}, got {text!r}")
    total_bytes = math.floor(Fraction(size[1]) * SIZE_BYTES[size[2].lower()]) * (planes if size[3] else 1)
    if total_bytes == 0:
        raise SettingError(f"{_EXPECTED} (more than 0 bytes), got {text!r}")
    return Budget(text=text.strip(), total_bytes=total_bytes, planes=planes)


def plan_units(layout: Layout, budget: Budget, *, attention_fraction: float | str | None = None) -> Units:
    """Turn a budget into whole units.

    `attention_fraction` is D0's share of bytes for attention: a number in (0, 1), "auto" (minimax of stranded bytes),
    "paper" (the paper's fraction of this model family) or None (the paper's where it gives one, else auto). Shared
    pools have no split and ignore it.

    Raises:
        SettingError: the budget does not buy one unit of each pool, or the fraction is not usable.
    """
    if layout.shared:
        pages = Fraction(budget.total_bytes, layout.planes * layout.page_bytes)
        units = Units(
            layout=layout, budget=budget, num_pages=math.floor(pages + Fraction(1, 2) if budget.nearest else pages)
        )
        short = units.num_pages < 1
    else:
        fraction = resolve_fraction(layout.geometry, attention_fraction)
        attention_bytes = fraction * budget.total_bytes
        units = Units(
            layout=layout,
            budget=budget,
            num_attention_pages=math.floor(attention_bytes / attention_unit_total_bytes(layout)),
            num_checkpoints=math.floor((budget.total_bytes - attention_bytes) / checkpoint_unit_total_bytes(layout)),
            attention_fraction=float(fraction),
        )
        short = units.num_attention_pages < 1 or units.num_checkpoints < 1
    if short:
        raise SettingError(
            f"expected a budget that buys one unit of each pool of {layout.organization}, got {budget.text} "
            f"({budget.total_bytes} B); smallest: {_least_total_bytes(layout, attention_fraction)} B"
        )
    return units


def minimum_budget(
    layout: Layout,
    *,
    context_tokens: int,
    checkpoints_per_request: int = 2,
    attention_fraction: float | str | None = None,
) -> Units:
    """Return the units, and in `.budget` the bytes, of the smallest budget that holds one request.

    The request has `context_tokens` tokens of attention KV and `checkpoints_per_request` checkpoints at a time (the
    one it writes and the one it continues from). Their conv slots may lie in as many slabs: one is priced for each, as
    admission does.

    Raises:
        SettingError: a count below 1.
    """
    if context_tokens < 1 or checkpoints_per_request < 1:
        raise SettingError(
            f"expected context_tokens and checkpoints_per_request >= 1, got {context_tokens}, {checkpoints_per_request}"
        )
    blocks = math.ceil(context_tokens / layout.page_tokens)
    if layout.shared:
        pages = pages_for(layout, blocks, checkpoints_per_request, slabs=checkpoints_per_request)
        total = pages * layout.page_bytes * layout.planes
    else:
        fraction = resolve_fraction(layout.geometry, attention_fraction)
        total = max(
            math.ceil(blocks * attention_unit_total_bytes(layout) / fraction),
            math.ceil(checkpoints_per_request * checkpoint_unit_total_bytes(layout) / (1 - fraction)),
        )
    budget = Budget(text=f"{total}", total_bytes=total, planes=layout.geometry.planes)
    return plan_units(layout, budget, attention_fraction=attention_fraction)


def admission_budget(layout: Layout, *, context_tokens: int, attention_fraction: float | str | None = None) -> Units:
    """Return the smallest budget with which a server admits one request of `context_tokens` tokens, alone.

    Beside its tokens admission asks for its state, the cached checkpoint it continues from, a page for rounding and a
    token to spare. The planner shows this budget, and a server refuses a smaller one.

    Raises:
        SettingError: a count below 1.
    """
    spare_tokens = layout.page_tokens + 1 if context_tokens >= 1 else 0
    return minimum_budget(layout, context_tokens=context_tokens + spare_tokens, attention_fraction=attention_fraction)


def pages_for(layout: Layout, attention_blocks: int, checkpoints: int, *, slabs: int | None = None) -> int:
    """Return the shared pages of a set of state; `slabs` defaults to the fewest that hold the conv slots."""
    members = layout.member_pages * checkpoints
    return layout.attention_groups * attention_blocks + members + conv_pages_for(layout, checkpoints, slabs=slabs)


def conv_pages_for(layout: Layout, checkpoints: int, *, slabs: int | None = None) -> int:
    """Return the pages that hold only convolution states: none inside a composite, one each, or slabs.

    Raises:
        SettingError: `slabs` is below the least count that holds the slots.
    """
    if layout.conv_placement is ConvPlacement.INSIDE:
        return 0
    least = math.ceil(checkpoints / layout.slots_per_slab)
    if slabs is None or layout.conv_placement is ConvPlacement.PAGE:
        return least
    if slabs < least:
        raise SettingError(f"expected at least {least} slabs for {checkpoints} checkpoints, got {slabs}")
    return slabs


def checkpoints_in(layout: Layout, num_pages: int, *, open_slots: int = 0) -> int:
    """Return the checkpoints that so many free pages hold: in the open conv slots, then whole slabs, then a part."""
    members = layout.member_pages
    if layout.conv_placement is not ConvPlacement.SLAB:
        return num_pages // pages_for(layout, 0, 1)
    in_open = min(open_slots, num_pages // members)
    slabs, rest = divmod(num_pages - in_open * members, layout.slots_per_slab * members + 1)
    return in_open + slabs * layout.slots_per_slab + max(0, rest - 1) // members


def attention_unit_total_bytes(layout: Layout) -> int:
    """Return the bytes of one attention block over all planes."""
    return layout.attention_groups * layout.attention_page_bytes * layout.attention_planes


def checkpoint_unit_total_bytes(layout: Layout) -> int:
    """Return the bytes of one checkpoint's member pages over all planes (D0: the whole composite)."""
    return layout.member_pages * layout.recurrent_page_bytes * layout.recurrent_planes


def _least_total_bytes(layout: Layout, attention_fraction: float | str | None) -> int:
    if layout.shared:
        return layout.page_bytes * layout.planes
    return minimum_budget(
        layout, context_tokens=1, checkpoints_per_request=1, attention_fraction=attention_fraction
    ).budget.total_bytes
