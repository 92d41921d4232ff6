"""Oracle of the prefix cache: two dictionaries from prefixes to units, every answer found by looking at each length.

A prefix is a salt and a tuple of tokens. `blocks` names the attention page of the block that ends a prefix, `states`
the checkpoint that holds the state after it. `NaiveTree` does not choose what is evicted; it is told, refuses what is
illegal, and knows from its own clock which state was used least recently.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

Prefix = tuple[str | None, tuple[int, ...]]


class Found(NamedTuple):
    """A lookup. depth: tokens whose attention and state are both there. attention: tokens of cached attention. branch:
    the deepest grid position of the attention beyond `depth`, None if there is none."""

    depth: int
    attention: int
    branch: int | None


class NaiveTree:
    """What one cache holds. `block` and `grid` count tokens.

    `locks` protect the attention of a prefix and the state at its end, `path_locks` the attention only.
    """

    def __init__(self, block: int, grid: int) -> None:
        self.block = block
        self.grid = grid
        self.blocks: dict[Prefix, int] = {}
        self.states: dict[Prefix, int] = {}
        self.used: dict[Prefix, int] = {}
        self.locks: Counter[Prefix] = Counter()
        self.path_locks: Counter[Prefix] = Counter()
        self._clock = 0

    def path(self, prefix: Prefix) -> list[Prefix]:
        """Return the prefixes that end the whole blocks of a prefix."""
        salt, tokens = prefix
        return [(salt, tokens[:end]) for end in range(self.block, len(tokens) + 1, self.block)]

    def find(self, salt: str | None, tokens: Sequence[int]) -> Found:
        """Look up without touching anything."""
        depth = attention = 0
        for prefix in self.path((salt, tuple(tokens))):
            if prefix not in self.blocks:
                break
            attention = len(prefix[1])
            if prefix in self.states:
                depth = attention
        branch = attention // self.grid * self.grid
        return Found(depth, attention, branch if branch > depth else None)

    def touch(self, prefix: Prefix) -> None:
        """Note a use of the state of a prefix, if it has one."""
        if prefix in self.states:
            self._clock += 1
            self.used[prefix] = self._clock

    def publish(self, prefix: Prefix, pages: Sequence[int], checkpoint: int) -> bool:
        """Name the state after a prefix and the attention before it; tell whether the checkpoint is named now.

        pages: of the publisher's blocks. What the tree has of them, it keeps; so it does with a state.
        """
        assert len(prefix[1]) % self.grid == 0
        assert prefix[1]
        for block, page in zip(self.path(prefix), pages, strict=True):
            self.blocks.setdefault(block, page)
        adopted = self.states.setdefault(prefix, checkpoint) == checkpoint
        self.touch(prefix)
        return adopted

    def lose(self, blocks: Iterable[Prefix], states: Iterable[Prefix]) -> None:
        """Forget what was evicted: nothing that is locked, and no block before those behind it."""
        lost_blocks, lost_states = set(blocks), set(states)
        assert not lost_blocks & self.locked_blocks()
        assert not lost_states & self.locked_states()
        for prefix in lost_blocks:
            del self.blocks[prefix]
        for prefix in lost_states:
            del self.states[prefix], self.used[prefix]
        self.check()

    def lost_to(self, blocks: dict[Prefix, int], states: dict[Prefix, int]) -> tuple[set[Prefix], set[Prefix]]:
        """Return the blocks and states that the given ones have no more, or have in another unit."""
        lost_blocks = {prefix for prefix, page in self.blocks.items() if blocks.get(prefix) != page}
        lost_states = {prefix for prefix, v in self.states.items() if states.get(prefix) != v}
        return lost_blocks, lost_states

    def locked_blocks(self) -> set[Prefix]:
        """Return the blocks that some lock protects: all before its end."""
        return {block for prefix in +self.locks + self.path_locks for block in self.path(prefix)}

    def locked_states(self) -> set[Prefix]:
        """Return the states at the end of a lock."""
        return set(+self.locks) & self.states.keys()

    def by_use(self) -> list[Prefix]:
        """Return the states, least recently used first."""
        return sorted(self.used, key=lambda prefix: self.used[prefix])

    def clear(self) -> None:
        """Forget everything cached; the recency of what comes later goes on."""
        assert not +self.locks + self.path_locks
        for table in (self.blocks, self.states, self.used):
            table.clear()

    def check(self) -> None:
        """Verify that attention is whole from the root and that a state has all attention before it."""
        for prefix in [*self.blocks, *self.states]:
            assert all(block in self.blocks for block in self.path(prefix)), f"a hole before {prefix}"
        assert len(set(self.states.values())) == len(self.states)
        assert self.used.keys() == self.states.keys()
