"""The state memory of one rank: page allocators, checkpoint store and device storage of an organization.

A shared organization has one page allocator for attention, members, conv pages and slabs; a dual one has an allocator
of attention pages and one of checkpoints. Whoever asks for tokens or state slots sees no difference.

Needs torch (through `page_pool`), so nothing else in this package imports it.
Source: paper sections 3.1 to 3.5.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sgl_hybrid.memory.activity import CopiedBytes
from sgl_hybrid.memory.budget import Units
from sgl_hybrid.memory.checkpoints import CheckpointStore, Move
from sgl_hybrid.memory.organization import ConvPlacement
from sgl_hybrid.memory.page_pool import PagePool
from sgl_hybrid.memory.pages import PageAllocator
from sgl_hybrid.memory.transfer import upload


class StateMemory:
    """Pages, checkpoints and tensors of one rank.

    Attributes:
        pages: allocator of the pages that attention takes (of all pages in a shared organization).
        store: checkpoints; its allocator is `pages` in a shared organization, its own in a dual one.
        pool: the tensors.
        copied: state bytes that were moved, by reason.
    """

    def __init__(
        self,
        units: Units,
        *,
        device: torch.device | str,
        kv_dtype: torch.dtype,
        ssm_dtype: torch.dtype,
        conv_dtype: torch.dtype,
    ) -> None:
        layout = units.layout
        self.layout = layout
        self.shared = layout.shared
        self.copied = CopiedBytes()
        self.pages = PageAllocator(units.num_pages if layout.shared else units.num_attention_pages)
        composites = self.pages if layout.shared else PageAllocator(units.num_checkpoints)
        self.store = CheckpointStore(layout, composites)
        self.pool = PagePool(
            layout,
            self.pages.num_pages,
            num_virtual=self.store.num_virtual,
            num_composites=None if layout.shared else units.num_checkpoints,
            device=device,
            kv_dtype=kv_dtype,
            ssm_dtype=ssm_dtype,
            conv_dtype=conv_dtype,
        )

    @property
    def pages_per_checkpoint(self) -> int:
        """Attention pages that one more checkpoint costs at most: none in a dual organization, in a shared one its
        members and a conv page or a new slab."""
        if not self.shared:
            return 0
        return self.layout.member_pages + (self.layout.conv_placement is not ConvPlacement.INSIDE)

    @property
    def pages_freed_by_checkpoint(self) -> int:
        """Attention pages that evicting one checkpoint gives at least: its members, and a conv page if it has one of
        its own. A slab goes with its last slot only."""
        if not self.shared:
            return 0
        return self.layout.member_pages + (self.layout.conv_placement is ConvPlacement.PAGE)

    @property
    def num_idle_slabs(self) -> int:
        """Slab pages that evicting all cached checkpoints gives, beyond their members."""
        return 0 if self.store.slabs is None else self.store.slabs.num_idle

    def move_conv(self, moves: Sequence[Move]) -> None:
        """Copy the conv states of all recurrent layers from their old to their new lines.

        On a GPU waits for the device first: with overlap scheduling a step in flight may still write a line that was
        given back when its request ended, and this copy is on another stream.
        """
        device = self.pool.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        old, new = upload([(move.old_line, move.new_line) for move in moves], torch.int64, device).t()
        for group in range(self.layout.groups):
            lines = self.pool.conv_planes(group)
            states = lines[:, old]
            lines[:, new] = states
            self.copied.slab_migration += states.nbytes

    def check(self) -> None:
        """Verify every ledger.

        Raises:
            InvariantError: naming what is inconsistent.
        """
        self.pages.check()
        self.store.check()
