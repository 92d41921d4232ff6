"""Device storage of a memory organization: planes of bytes, typed views of them, and the tables of the checkpoints.

A plane is `num_pages + 1` pages of bytes; page 0 is the padding sink. The planes of a pool are one zeroed allocation:
a kernel steps from plane to plane by a stride. A shared pool has one set of planes for both kinds of layer, D0 has one
for attention and one for composites. Every view aliases its plane and copies nothing.

Needs torch, so nothing in this package imports it. Offsets are 64-bit everywhere: ids times strides pass 2^31.
Source: paper sections 3.2 to 3.5; addresses as in `organization.RecurrentAddress`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sgl_hybrid.memory.checkpoints import CheckpointStore
from sgl_hybrid.memory.ledger import ABSENT
from sgl_hybrid.memory.organization import Layout
from sgl_hybrid.memory.transfer import upload

POISON_BYTE = 0xFF  # NaN in float32, bfloat16, float16 and both float8 formats.


class PagePool:
    """The tensors of one rank.

    Args:
        layout: what goes where.
        num_pages: pages of the shared pool, or of the attention pool, without the sink.
        num_virtual: rows of the tables, without row 0 (`CheckpointStore.num_virtual`).
        num_composites: pages of the second pool, without its sink; only where the layout has two pools.
        kv_dtype, ssm_dtype, conv_dtype: element types, of the geometry's sizes.

    Attributes:
        attention_planes: `[planes, num_pages + 1, page_bytes] uint8, contiguous`.
        recurrent_planes: the same tensor in a shared pool; `[planes, num_composites + 1, page_bytes] uint8` in D0.
        tables: `[num_virtual + 1, groups * members + conv_columns] int32`, both tables side by side; never replaced, so
            that a captured graph may hold it.
        member_table: `[num_virtual + 1, groups * members] int32`, columns of `tables`; -1 is absent.
        conv_line: `[num_virtual + 1, conv_columns] int32`, its other columns.
        ssm_dtype: the element type of stored states.
        table_writes: uploads to the tables so far.

    Raises:
        ValueError: a dtype of another size, a stride or offset that is no multiple of it, or a missing pool size.
    """

    def __init__(
        self,
        layout: Layout,
        num_pages: int,
        *,
        num_virtual: int,
        device: torch.device | str,
        kv_dtype: torch.dtype,
        ssm_dtype: torch.dtype,
        conv_dtype: torch.dtype,
        num_composites: int | None = None,
    ) -> None:
        if layout.shared != (num_composites is None):
            wanted = "no num_composites (one shared pool)" if layout.shared else "num_composites (two pools)"
            raise ValueError(f"expected {wanted} for {layout.organization}, got {num_composites}")
        for name, count in (("num_pages", num_pages), ("num_virtual", num_virtual), ("num_composites", num_composites)):
            if count is not None and count < 1:
                raise ValueError(f"expected {name} >= 1, got {count}")
        _check_dtypes(layout, kv_dtype, ssm_dtype, conv_dtype)
        self.layout = layout
        self.num_virtual = num_virtual
        self.device = torch.device(device)
        self._kv_dtype, self.ssm_dtype, self._conv_dtype = kv_dtype, ssm_dtype, conv_dtype
        self.attention_planes = self._zeros(layout.attention_planes, num_pages, layout.attention_page_bytes)
        self.recurrent_planes = self.attention_planes
        if num_composites is not None:
            self.recurrent_planes = self._zeros(layout.recurrent_planes, num_composites, layout.recurrent_page_bytes)
        # Both tables are columns of one tensor: a row is uploaded once.
        width = layout.member_pages + layout.conv_columns
        self.tables = torch.full((num_virtual + 1, width), ABSENT, dtype=torch.int32, device=self.device)
        self.tables[0] = 0
        self.member_table = self.tables[:, : layout.member_pages]
        self.conv_line = self.tables[:, layout.member_pages :]
        self.table_writes = 0

    @property
    def state_bytes(self) -> int:
        """Bytes of all planes, padding sinks included, tables not."""
        pools = [self.attention_planes] if self.layout.shared else [self.attention_planes, self.recurrent_planes]
        return sum(pool.numel() for pool in pools)

    @property
    def num_token_rows(self) -> int:
        """Rows of `key_rows` and `value_rows`: every page times the pitch."""
        return int(self.attention_planes.shape[1]) * self.layout.tokens_per_page_pitch

    def key_rows(self, layer: int) -> torch.Tensor:
        """Return K of attention layer `layer`: `[num_token_rows, kv_heads, head_dim]` in the KV dtype, strided.

        Token t lies in row page * layout.tokens_per_page_pitch + t % page_tokens, its K before its V. The page is one
        of the layer's group (`Layout.attention_slot`).

        Raises:
            SettingError: the layer has no attention KV.
        """
        return self._token_rows(layer)[:, 0]

    def value_rows(self, layer: int) -> torch.Tensor:
        """Return V of attention layer `layer`, as `key_rows`."""
        return self._token_rows(layer)[:, 1]

    def ssm_members(self, layer: int) -> torch.Tensor:
        """Return the recurrent pages of `layer`: `[pages + 1, heads_per_member, head_dim, d_state]`, strided.

        Its pages are the table's columns first_member to first_member + members (`Layout.recurrent_slot`).

        Raises:
            SettingError: the layer has no recurrent state.
        """
        return self.member_planes()[self.layout.recurrent_slot(layer).plane]

    def conv_lines(self, layer: int) -> torch.Tensor:
        """Return the conv lines of `layer`: `[num_lines, channels, d_conv - 1]`, the last two dimensions dense.

        The line is in the table's column conv_column (`Layout.recurrent_slot`).

        Raises:
            SettingError: the layer has no recurrent state.
        """
        address = self.layout.recurrent_slot(layer)
        return self._conv_planes(address.conv_offset_bytes)[address.plane]

    def member_planes(self) -> torch.Tensor:
        """Return the recurrent pages of all planes: `[planes, pages + 1, heads_per_member, head_dim, d_state]`."""
        geometry, layout = self.layout.geometry, self.layout
        shape = (layout.heads_per_member, geometry.ssm_head_dim, geometry.d_state)
        elements = layout.heads_per_member * geometry.ssm_head_dim * geometry.d_state
        return self.recurrent_planes.view(self.ssm_dtype)[:, :, :elements].unflatten(2, shape)

    def conv_planes(self, group: int) -> torch.Tensor:
        """Return the conv lines of one group of layers in all planes: `[planes, num_lines, channels, d_conv - 1]`.

        Raises:
            ValueError: no such group.
        """
        if not 0 <= group < self.layout.groups:
            raise ValueError(f"expected a group from 0 to {self.layout.groups - 1}, got {group}")
        first = self.layout.geometry.recurrent_layers[group * self.layout.recurrent_planes]
        return self._conv_planes(self.layout.recurrent_slot(first).conv_offset_bytes)

    def table_rows(self, slots: torch.Tensor) -> torch.Tensor:
        """Return rows of both tables side by side: `[*slots.shape, groups * members + conv_columns] int64`, members
        first. slots: int64 ids of any shape. One gather; copies."""
        return self.tables[slots].to(torch.int64)

    def update_tables(self, store: CheckpointStore) -> int:
        """Write the rows of the store that changed since the last call; return how many.

        One upload and one indexed write, ordered before kernels launched later; does not synchronize.

        Raises:
            ValueError: the store has another number of ids.
        """
        if store.num_virtual != self.num_virtual:
            raise ValueError(f"expected a store of {self.num_virtual} ids, got {store.num_virtual}")
        dirty = store.take_dirty()
        if dirty:
            changed = [(v, *store.member_row(v), *store.conv_row(v)) for v in dirty]
            rows = upload(changed, torch.int32, self.device)
            self.tables.index_copy_(0, rows[:, 0].long(), rows[:, 1:])
            self.table_writes += 1
        return len(dirty)

    def poison(
        self,
        *,
        attention_pages: Sequence[int] = (),
        recurrent_pages: Sequence[int] = (),
        conv_lines: Sequence[int] = (),
    ) -> None:
        """Fill freed units with NaN bytes in every plane: whole pages, and the payload of conv lines. For tests."""
        layout = self.layout
        for planes, ids in ((self.attention_planes, attention_pages), (self.recurrent_planes, recurrent_pages)):
            planes.index_fill_(1, self._ids(ids), POISON_BYTE)
        lines = self._line_bytes()[:, :, layout.conv_base_bytes : layout.conv_base_bytes + layout.conv_slot_bytes]
        lines.index_fill_(1, self._ids(conv_lines), POISON_BYTE)

    def _zeros(self, planes: int, num_pages: int, page_bytes: int) -> torch.Tensor:
        return torch.zeros((planes, num_pages + 1, page_bytes), dtype=torch.uint8, device=self.device)

    def _ids(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(ids), dtype=torch.int64, device=self.device)

    def _token_rows(self, layer: int) -> torch.Tensor:
        geometry = self.layout.geometry
        plane = self.attention_planes[self.layout.attention_slot(layer)[1]]
        return plane.view(self._kv_dtype).view(self.num_token_rows, 2, geometry.kv_heads, geometry.head_dim)

    def _line_bytes(self) -> torch.Tensor:
        return self.recurrent_planes.view(self.layout.recurrent_planes, -1, self.layout.conv_stride_bytes)

    def _conv_planes(self, offset_bytes: int) -> torch.Tensor:
        geometry = self.layout.geometry
        shape = (geometry.conv_channels, geometry.d_conv - 1)
        start = offset_bytes // self._conv_dtype.itemsize
        elements = geometry.conv_channels * (geometry.d_conv - 1)
        return self._line_bytes().view(self._conv_dtype)[:, :, start : start + elements].unflatten(2, shape)


def _check_dtypes(layout: Layout, kv_dtype: torch.dtype, ssm_dtype: torch.dtype, conv_dtype: torch.dtype) -> None:
    """Check that every dtype has the geometry's size and that every stride and offset is a multiple of it."""
    geometry = layout.geometry
    offsets = [layout.conv_stride_bytes]
    offsets += [layout.recurrent_slot(layer).conv_offset_bytes for layer in geometry.recurrent_layers]
    for name, dtype, itemsize, multiples in (
        ("kv_dtype", kv_dtype, geometry.kv_itemsize, [layout.attention_page_bytes]),
        ("ssm_dtype", ssm_dtype, geometry.ssm_itemsize, [layout.recurrent_page_bytes]),
        ("conv_dtype", conv_dtype, geometry.conv_itemsize, offsets),
    ):
        if dtype.itemsize != itemsize:
            raise ValueError(f"{name}: expected a dtype of {itemsize} bytes, got {dtype} of {dtype.itemsize}")
        for value in multiples:
            if value % itemsize:
                raise ValueError(f"{name}: expected strides and offsets in multiples of {itemsize} bytes, got {value}")
