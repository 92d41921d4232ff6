"""Which boundaries of a prefill get a checkpoint.

Two requests meet only at a depth that both publish. A state in text that no other request has is never found; one at
every boundary costs a checkpoint each. The policies:

    all      every boundary: a shared context is found from its second visit on
    last     the deepest boundary that a repeat of the prompt could use: repeats and longer prompts are found
    branch   the same, and the boundary where the prompt leaves what the tree knows: a shared context is found from its
             third visit on, whatever text of their own the requests add

Which boundaries is a function of the prompt and of the tree, not of the chunks in which the prompt is computed: a chunk
in the middle of a long prompt publishes nothing that the whole prompt would not. Nothing is allocated or moved here.
Source: SGLang 0.5.23 finds the branch point (`MambaComponent.finalize_match_result_in_tree_core`).
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class Worth(enum.IntEnum):
    """What a boundary is worth when there is not room for all: the greater first."""

    BETWEEN = 0
    LAST = 1
    BRANCH = 2


class Boundary(NamedTuple):
    """A position on the grid whose state is to be kept."""

    position: int
    worth: Worth


def boundaries_to_keep(
    placement: str, *, grid_tokens: int, start: int, end: int, prompt_tokens: int, branch: int | None
) -> list[Boundary]:
    """Return the boundaries behind `start`, up to and with `end`, whose states are to be kept, by position.

    start, end: tokens of the prompt before and after this chunk. prompt_tokens: of the whole prompt; its last token is
    always computed, so a repeat can use boundaries before it only. branch: deepest boundary of the attention that the
    tree holds for this prompt, None if a checkpoint is there already.

    Raises:
        ValueError: an unknown placement, or a chunk that is not inside the prompt.
    """
    if not 0 <= start <= end <= prompt_tokens:
        raise ValueError(f"expected 0 <= start <= end <= prompt, got {start}, {end} and {prompt_tokens} tokens")
    last = max(0, prompt_tokens - 1) // grid_tokens * grid_tokens
    if placement == "all":
        wanted = set(range(start // grid_tokens * grid_tokens, end + 1, grid_tokens))
    elif placement == "last":
        wanted = {last}
    elif placement == "branch":
        wanted = {last} if branch is None or branch % grid_tokens else {last, branch}
    else:
        raise ValueError(f"expected placement all, last or branch, got {placement!r}")
    worth = {last: Worth.LAST, branch: Worth.BRANCH}
    return [
        Boundary(position, worth.get(position, Worth.BETWEEN)) for position in sorted(wanted) if start < position <= end
    ]


def by_worth(boundaries: list[Boundary]) -> list[Boundary]:
    """Return boundaries in the order in which they are given room: by worth, of equal worth the deepest first."""
    return sorted(boundaries, key=lambda boundary: (-boundary.worth, -boundary.position))
