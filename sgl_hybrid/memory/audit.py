"""Debug checks of published checkpoints: their bytes never change, and their depth is what they have consumed.

A published checkpoint is read by requests that come later, so whatever writes into it, or publishes it under another
depth, shows as a wrong answer somewhere else. The audit looks where the mistake is: it hashes every part of a
checkpoint when the tree gets it, when a request reads it and when it leaves the tree: a pass over the state each time.

Needs torch (through `page_pool`), so nothing else in this package imports it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

from sgl_hybrid.errors import InvariantError
from sgl_hybrid.memory.state_memory import StateMemory


class CheckpointAudit:
    """What is known of each slot: the tokens that its state has consumed, and the hash of a published one."""

    def __init__(self, memory: StateMemory) -> None:
        self.memory = memory
        self._consumed: dict[int, int] = {}
        self._digests: dict[int, bytes] = {}

    def wrote(self, states: Iterable[tuple[int, int]]) -> None:
        """Note what a step of the model writes: (slot, tokens that the state in it has then consumed).

        Raises:
            InvariantError: a published checkpoint is written.
        """
        for v, tokens in states:
            if v in self._digests:
                raise InvariantError(f"expected published checkpoint {v} to stay as it is, got a step that writes it")
            self._consumed[v] = tokens

    def published(self, v: int, depth: int) -> None:
        """Note that the tree names v at a depth.

        Raises:
            InvariantError: the state has consumed another number of tokens, or is of an unknown one.
        """
        consumed = self._consumed.get(v)
        if consumed != depth:
            raise InvariantError(f"expected checkpoint {v} to be published at {consumed} consumed tokens, got {depth}")
        self._digests[v] = self.digest(v)

    def read(self, v: int) -> None:
        """Verify a checkpoint that a request continues from. An unpublished one is its own, and not looked at.

        Raises:
            InvariantError: its bytes are not those that were published.
        """
        if v in self._digests and self.digest(v) != self._digests[v]:
            raise InvariantError(f"expected the bytes of checkpoint {v} as published, got others")

    def left(self, v: int) -> None:
        """Verify a checkpoint that leaves the tree, before its parts are freed.

        Raises:
            InvariantError: as `read`, or it was not published.
        """
        if v not in self._digests:
            raise InvariantError(f"expected a published checkpoint to leave the tree, got {v}")
        self.read(v)
        del self._digests[v]

    def clear(self) -> None:
        """Verify and forget all: the tree is dropped as a whole.

        Raises:
            InvariantError: as `read`.
        """
        for v in list(self._digests):
            self.left(v)

    def digest(self, v: int) -> bytes:
        """Hash the recurrent and conv states of all layers of a checkpoint; copies them to the host."""
        pool, layout, store = self.memory.pool, self.memory.layout, self.memory.store
        members, lines = store.member_row(v), store.conv_row(v)
        found = hashlib.blake2b(digest_size=16)
        for layer in layout.geometry.recurrent_layers:
            slot = layout.recurrent_slot(layer)
            pages = list(members[slot.first_member : slot.first_member + layout.members])
            for state in (pool.ssm_members(layer)[pages], pool.conv_lines(layer)[lines[slot.conv_column]]):
                found.update(state.contiguous().view(torch.uint8).cpu().numpy().tobytes())
        return found.digest()
