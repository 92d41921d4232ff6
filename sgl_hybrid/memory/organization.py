"""The memory organizations as data, and the layout each gives to one model.

An `Organization` says where the three kinds of state live (which pool, which page, where the convolution state sits);
`layout_for` turns it and a `StateGeometry` into a `Layout` of byte counts and strides. Adding an organization is one
entry in `ORGANIZATIONS`; nothing else asks for a name.

Invariants of a layout: members divide the recurrent heads exactly and fit their page; slots x stride is exactly one
page; the page holds a whole number of KV token rows; the checkpoint grid is a whole number of blocks.
Source: paper sections 3.2 to 3.5 and Table 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from enum import StrEnum

import msgspec

from sgl_hybrid.errors import SettingError
from sgl_hybrid.memory.geometry import StateGeometry, slots_per_page

MAX_PAGE_TOKENS = 65_536


class PageRule(StrEnum):
    """What sizes the page that holds recurrent state."""

    BLOCK = "block"
    COMPOSITE = "composite"


class ConvPlacement(StrEnum):
    """Where the convolution state of a checkpoint lives."""

    INSIDE = "inside"
    PAGE = "page"
    SLAB = "slab"


class Organization(msgspec.Struct, frozen=True, kw_only=True):
    """One way to place attention KV, recurrent state and convolution state in pools."""

    name: str
    shared: bool
    page: PageRule
    conv: ConvPlacement
    page_tokens: int
    checkpoint_interval: int


ORGANIZATIONS: dict[str, Organization] = {
    org.name: org
    for org in (
        Organization(
            name="s0",
            shared=True,
            page=PageRule.COMPOSITE,
            conv=ConvPlacement.INSIDE,
            page_tokens=512,
            checkpoint_interval=512,
        ),
        Organization(
            name="s1",
            shared=True,
            page=PageRule.BLOCK,
            conv=ConvPlacement.PAGE,
            page_tokens=512,
            checkpoint_interval=512,
        ),
        Organization(
            name="s2",
            shared=True,
            page=PageRule.BLOCK,
            conv=ConvPlacement.SLAB,
            page_tokens=512,
            checkpoint_interval=512,
        ),
        Organization(
            name="d0",
            shared=False,
            page=PageRule.COMPOSITE,
            conv=ConvPlacement.INSIDE,
            page_tokens=16,
            checkpoint_interval=1792,
        ),
    )
}


class RecurrentAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where one recurrent layer finds its state, given the tables of a checkpoint.

    Head h: plane[member_table[v, first_member + h // heads_per_member] * recurrent_page_bytes
    + (h % heads_per_member) * head_bytes]. Convolution: plane[conv_line[v, conv_column] * conv_stride_bytes
    + conv_offset_bytes]. All offsets in bytes.
    """

    plane: int
    group: int
    first_member: int
    conv_column: int
    conv_offset_bytes: int


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """An organization applied to one geometry. Byte sizes are per plane; counts are per checkpoint or per block.

    In a shared pool both kinds of layer use the same `attention_planes == recurrent_planes` tensors and the same
    pages. In a dual pool (D0) every attention layer and every recurrent layer has a plane of its own.
    """

    organization: str
    geometry: StateGeometry
    shared: bool
    conv_placement: ConvPlacement
    page_tokens: int
    checkpoint_interval: int
    attention_planes: int
    recurrent_planes: int
    attention_page_bytes: int
    recurrent_page_bytes: int
    members: int
    heads_per_member: int
    slots_per_slab: int
    conv_stride_bytes: int
    conv_base_bytes: int

    @property
    def planes(self) -> int:
        """Planes T of a shared pool; of a dual pool, the planes a shared pool of this model would have."""
        return self.attention_planes if self.shared else self.geometry.planes

    @property
    def page_bytes(self) -> int:
        """Bytes per plane of a shared page.

        Raises:
            SettingError: the organization has two pools and so two page sizes.
        """
        if not self.shared:
            raise SettingError(
                f"expected an organization with one shared pool, got {self.organization}; "
                "it has attention_page_bytes and recurrent_page_bytes"
            )
        return self.attention_page_bytes

    @property
    def attention_groups(self) -> int:
        """Pages that one block of tokens takes: one for each group of attention layers."""
        return math.ceil(len(self.geometry.attention_layers) / self.attention_planes)

    @property
    def groups(self) -> int:
        """Groups G of recurrent layers; each has its own member pages in the same planes."""
        return math.ceil(len(self.geometry.recurrent_layers) / self.recurrent_planes)

    @property
    def member_pages(self) -> int:
        """Columns of the member table, G x M: pages with recurrent state per checkpoint."""
        return self.groups * self.members

    @property
    def conv_columns(self) -> int:
        """Columns of the conv line table: one line per page when conv is inside it, else one per checkpoint."""
        return self.groups if self.conv_placement is ConvPlacement.INSIDE else 1

    @property
    def conv_slot_bytes(self) -> int:
        """Payload of one conv line: the convolution states of the groups that share it."""
        return self.geometry.conv_bytes * (self.groups // self.conv_columns)

    @property
    def tokens_per_page_pitch(self) -> int:
        """Distance between two attention pages, in KV token rows of one layer."""
        return self.attention_page_bytes // self.geometry.kv_token_bytes

    @property
    def block_bytes(self) -> int:
        """KV payload of a full block in one attention layer; the rest of its page is unused."""
        return self.page_tokens * self.geometry.kv_token_bytes

    @property
    def attention_unused_bytes(self) -> int:
        """Unused bytes of a full attention page, per plane."""
        return self.attention_page_bytes - self.block_bytes

    def attention_slot(self, layer: int) -> tuple[int, int]:
        """Return (group, plane) of attention layer `layer` (a model layer id).

        Raises:
            SettingError: the layer has no attention KV.
        """
        return divmod(_position(self.geometry.attention_layers, layer, "attention"), self.attention_planes)

    def recurrent_slot(self, layer: int) -> RecurrentAddress:
        """Return where recurrent layer `layer` (a model layer id) finds its state.

        Raises:
            SettingError: the layer has no recurrent state.
        """
        position = _position(self.geometry.recurrent_layers, layer, "recurrent")
        group, plane = divmod(position, self.recurrent_planes)
        inside = self.conv_placement is ConvPlacement.INSIDE
        return RecurrentAddress(
            plane=plane,
            group=group,
            first_member=group * self.members,
            conv_column=group if inside else 0,
            conv_offset_bytes=self.conv_base_bytes + (0 if inside else group * self.geometry.conv_bytes),
        )


def organization_of(name: str) -> Organization:
    """Return the organization of this name.

    Raises:
        SettingError: no such organization.
    """
    if name not in ORGANIZATIONS:
        raise SettingError(f"expected a memory organization of {', '.join(ORGANIZATIONS)}, got {name!r}")
    return ORGANIZATIONS[name]


def layout_for(
    org: str | Organization,
    geometry: StateGeometry,
    *,
    page_tokens: int | None = None,
    checkpoint_interval: int | None = None,
    planes: int | None = None,
) -> Layout:
    """Apply an organization to a model.

    `page_tokens` (tokens per attention block), `checkpoint_interval` (tokens) and `planes` (shared pools only)
    override the organization's own; an overridden block without an interval gets the multiple nearest to the
    organization's.

    Raises:
        SettingError: the page, the heads, the slab or the grid do not divide; names the nearest page that does.
    """
    organization = org if isinstance(org, Organization) else organization_of(org)
    tokens = organization.page_tokens if page_tokens is None else page_tokens
    planes = geometry.planes if planes is None else planes
    if planes < 1:
        raise SettingError(f"expected planes >= 1, got {planes}; nearest: 1")
    layout: Layout | None = None
    problem: str | None = "page_tokens >= 1"
    if tokens >= 1:
        interval = _interval(organization, tokens, checkpoint_interval)
        layout, problem = _try_layout(organization, geometry, tokens, interval, planes)
    if layout is None:
        near = nearest_page_tokens(organization, geometry, tokens, planes=planes)
        hint = f"nearest that fit: {', '.join(map(str, near))}" if near else "no page of this model fits"
        raise SettingError(
            f"expected {problem}, got page_tokens={tokens} for {geometry.name} {organization.name}; {hint}"
        )
    return layout


def nearest_page_tokens(
    org: Organization, geometry: StateGeometry, page_tokens: int, *, planes: int
) -> tuple[int, ...]:
    """Return the nearest valid page below and above `page_tokens`, in tokens; multiples of 16 are tried."""

    def fits(tokens: int) -> bool:
        return _try_layout(org, geometry, tokens, tokens, planes)[0] is not None

    start = max(page_tokens, 0) // 16 * 16
    below = next((tokens for tokens in range(start, 0, -16) if fits(tokens)), None)
    above = next((tokens for tokens in range(start + 16, MAX_PAGE_TOKENS + 1, 16) if fits(tokens)), None)
    return tuple(tokens for tokens in (below, above) if tokens is not None)


def valid_layouts(
    org: str | Organization, geometry: StateGeometry, page_tokens: range, *, planes: int
) -> Iterator[Layout]:
    """Yield the layouts of every page size in the range that fits, with the grid nearest to the organization's."""
    organization = org if isinstance(org, Organization) else organization_of(org)
    for tokens in page_tokens:
        interval = _interval(organization, tokens, None)
        layout, _ = _try_layout(organization, geometry, tokens, interval, planes)
        if layout is not None:
            yield layout


def _interval(org: Organization, page_tokens: int, checkpoint_interval: int | None) -> int:
    if checkpoint_interval is None:
        return max(1, round(org.checkpoint_interval / page_tokens)) * page_tokens
    if checkpoint_interval < 1 or checkpoint_interval % page_tokens:
        lower = max(1, checkpoint_interval // page_tokens) * page_tokens
        raise SettingError(
            f"expected a checkpoint interval that is a multiple of page_tokens={page_tokens}, "
            f"got {checkpoint_interval}; nearest: {lower}, {lower + page_tokens}"
        )
    return checkpoint_interval


def _try_layout(
    org: Organization, geometry: StateGeometry, page_tokens: int, interval: int, planes: int
) -> tuple[Layout, None] | tuple[None, str]:
    """Build the layout, or say what was expected of the page."""
    attention_planes = planes if org.shared else len(geometry.attention_layers)
    recurrent_planes = planes if org.shared else len(geometry.recurrent_layers)
    groups = math.ceil(len(geometry.recurrent_layers) / recurrent_planes)
    block_bytes = page_tokens * geometry.kv_token_bytes
    alignment = math.lcm(geometry.kv_itemsize, geometry.ssm_itemsize, geometry.conv_itemsize)

    if org.page is PageRule.COMPOSITE:
        recurrent_page_bytes = _round_up(geometry.composite_bytes, alignment)
        if org.shared:
            row_bytes = math.lcm(geometry.kv_token_bytes, alignment)
            recurrent_page_bytes = _round_up(max(recurrent_page_bytes, block_bytes), row_bytes)
        members = 1
    else:
        recurrent_page_bytes = block_bytes
        members = math.ceil(geometry.ssm_bytes / recurrent_page_bytes)
        if geometry.head_bytes > recurrent_page_bytes:
            return None, f"a page of at least {geometry.head_bytes} B (one recurrent head)"
        if geometry.ssm_heads % members:
            return None, f"a page that splits {geometry.ssm_heads} recurrent heads evenly ({members} pages do not)"
    if recurrent_page_bytes % alignment:
        return None, f"a page of whole {alignment}-byte elements"

    slots = 1
    if org.conv is not ConvPlacement.INSIDE:
        payload = groups * geometry.conv_bytes
        if payload > recurrent_page_bytes:
            return None, f"a page of at least {payload} B (convolution states of {groups} layer groups)"
        if org.conv is ConvPlacement.SLAB:
            slots = slots_per_page(recurrent_page_bytes, payload, alignment)
    return (
        Layout(
            organization=org.name,
            geometry=geometry,
            shared=org.shared,
            conv_placement=org.conv,
            page_tokens=page_tokens,
            checkpoint_interval=interval,
            attention_planes=attention_planes,
            recurrent_planes=recurrent_planes,
            attention_page_bytes=recurrent_page_bytes if org.shared else block_bytes,
            recurrent_page_bytes=recurrent_page_bytes,
            members=members,
            heads_per_member=geometry.ssm_heads // members,
            slots_per_slab=slots,
            conv_stride_bytes=recurrent_page_bytes // slots,
            conv_base_bytes=geometry.ssm_bytes if org.conv is ConvPlacement.INSIDE else 0,
        ),
        None,
    )


def _round_up(value: int, multiple: int) -> int:
    return math.ceil(value / multiple) * multiple


def _position(layers: tuple[int, ...], layer: int, kind: str) -> int:
    try:
        return layers.index(layer)
    except ValueError:
        raise SettingError(f"expected a layer with {kind} state ({layers}), got layer {layer}") from None
