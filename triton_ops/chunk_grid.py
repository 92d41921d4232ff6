"""Cut packed sequences into chunks on the grid of absolute token positions.

A chunk lies in one sequence, has at most `chunk_tokens` tokens and never straddles a boundary. Inside a grid interval
the chunks start at multiples of `chunk_tokens` from the boundary before them, so the cuts behind a boundary are the
same for a sequence that passes it and for one that is resumed there.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple


class Chunk(NamedTuple):
    """Consecutive tokens of one sequence.

    `row` is the packed row of the first token, `position` its absolute position; `ends_at_boundary` says that the token
    after the last one sits on the grid.
    """

    sequence: int
    row: int
    num_tokens: int
    position: int
    ends_at_boundary: bool


def cut_chunks(
    query_start_loc: Sequence[int],
    start_positions: Sequence[int],
    *,
    chunk_tokens: int,
    grid_tokens: int | None,
) -> list[Chunk]:
    """Return the chunks of every sequence in packed order; an empty sequence has none.

    query_start_loc: num_seqs + 1 packed rows, the first 0.
    start_positions: num_seqs absolute positions of the first tokens.
    grid_tokens: distance of two boundaries; None means that there is no boundary.

    Raises: ValueError for a length that is not positive, a row table that is not ascending from 0, a negative position
    or tables of different length.
    """
    if chunk_tokens <= 0:
        raise ValueError(f"expected chunk_tokens > 0, got {chunk_tokens}")
    if grid_tokens is not None and grid_tokens <= 0:
        raise ValueError(f"expected grid_tokens > 0 or None, got {grid_tokens}")
    if len(query_start_loc) != len(start_positions) + 1:
        raise ValueError(
            f"expected one more entry in query_start_loc than in start_positions, "
            f"got {len(query_start_loc)} and {len(start_positions)}"
        )
    if query_start_loc[0] != 0 or any(end < start for start, end in pairwise(query_start_loc)):
        raise ValueError(f"expected query_start_loc to ascend from 0, got {list(query_start_loc)}")
    if any(position < 0 for position in start_positions):
        raise ValueError(f"expected start_positions >= 0, got {list(start_positions)}")

    chunks = []
    for sequence, (row, end) in enumerate(pairwise(query_start_loc)):
        position = start_positions[sequence]
        while row < end:
            boundary = 0 if grid_tokens is None else position - position % grid_tokens
            cut = position + chunk_tokens - (position - boundary) % chunk_tokens
            if grid_tokens is not None:
                cut = min(cut, boundary + grid_tokens)
            cut = min(cut, position + end - row)
            ends_at_boundary = grid_tokens is not None and cut % grid_tokens == 0
            chunks.append(Chunk(sequence, row, cut - position, position, ends_at_boundary))
            row += cut - position
            position = cut
    return chunks


def cut_tokens(chunk_tokens: int, grid_tokens: int, *, state_is_exact: bool) -> int:
    """Return the tokens at whose multiples behind a boundary a call may end without changing a bit of the next one.

    A call that ends inside a chunk sums that chunk in two parts, and one that ends between two boundaries hands its
    state on in the storage type. state_is_exact: the storage type is the one in which states are computed.
    """
    return chunk_tokens if state_is_exact and grid_tokens % chunk_tokens == 0 else grid_tokens


def check_captures(
    captures: Sequence[tuple[int, int]], query_start_loc: Sequence[int], start_positions: Sequence[int]
) -> None:
    """Refuse a (sequence, absolute position) that is not between the start and the end of its sequence.

    Raises: ValueError with the positions that can be captured.
    """
    for sequence, position in captures:
        if not 0 <= sequence < len(start_positions):
            raise ValueError(f"expected a captured sequence in [0, {len(start_positions)}), got {sequence}")
        start = start_positions[sequence]
        end = start + query_start_loc[sequence + 1] - query_start_loc[sequence]
        if not start <= position <= end:
            raise ValueError(f"expected a captured position in [{start}, {end}] of sequence {sequence}, got {position}")
