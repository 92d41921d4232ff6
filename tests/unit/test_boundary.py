"""Which boundaries each placement keeps, and when a shared context is found."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radix.boundary import Boundary, Worth, boundaries_to_keep, by_worth
from sgl_hybrid.config import CHECKPOINT_PLACEMENTS

GRID = 512
PLACEMENTS = st.sampled_from(CHECKPOINT_PLACEMENTS)


def positions(placement: str, start: int, end: int, prompt: int, branch: int | None = None) -> list[int]:
    found = boundaries_to_keep(placement, grid_tokens=GRID, start=start, end=end, prompt_tokens=prompt, branch=branch)
    return [boundary.position for boundary in found]


@pytest.mark.parametrize(
    ("placement", "start", "end", "prompt", "branch", "expected"),
    [
        ("all", 0, 2000, 2000, None, [512, 1024, 1536]),
        ("all", 512, 2048, 2048, None, [1024, 1536, 2048]),
        ("all", 600, 1000, 2000, None, []),
        ("last", 0, 2000, 2000, None, [1536]),
        ("last", 0, 1024, 2000, None, []),
        ("last", 0, 2000, 2000, 1024, [1536]),
        ("last", 0, 2048, 2048, None, [1536]),
        ("last", 0, 512, 512, None, []),
        ("branch", 0, 2000, 2000, None, [1536]),
        ("branch", 0, 2000, 2000, 1024, [1024, 1536]),
        ("branch", 0, 2000, 2000, 1536, [1536]),
        ("branch", 1024, 2000, 2000, 1024, [1536]),
        ("branch", 0, 1024, 2000, 1024, [1024]),
        ("branch", 0, 2000, 2000, 1000, [1536]),
        ("branch", 0, 500, 500, None, []),
    ],
)
def test_placements_keep(
    placement: str, start: int, end: int, prompt: int, branch: int | None, expected: list[int]
) -> None:
    assert positions(placement, start, end, prompt, branch) == expected


def test_a_branch_point_is_worth_most_and_the_last_boundary_more_than_those_between() -> None:
    found = boundaries_to_keep("all", grid_tokens=GRID, start=0, end=2100, prompt_tokens=2100, branch=1024)
    assert [boundary.worth for boundary in found] == [Worth.BETWEEN, Worth.BRANCH, Worth.BETWEEN, Worth.LAST]
    assert [boundary.position for boundary in by_worth(found)] == [1024, 2048, 1536, 512]


@given(PLACEMENTS, st.integers(1, 6000), st.lists(st.integers(1, 5999), max_size=6), st.none() | st.integers(1, 11))
def test_chunks_keep_what_the_whole_prompt_keeps(
    placement: str, prompt: int, cuts: list[int], branch_blocks: int | None
) -> None:
    """Fault B15, and chunks of a long prompt keep no state that the prompt in one piece would not."""
    branch = None if branch_blocks is None else branch_blocks * GRID
    ends = [0, *sorted({cut for cut in cuts if cut < prompt}), prompt]
    chunks = [
        position for start, end in pairwise(ends) for position in positions(placement, start, end, prompt, branch)
    ]
    assert chunks == positions(placement, 0, prompt, prompt, branch)


@given(PLACEMENTS, st.integers(1, 3000), st.integers(0, 3000), st.integers(1, 3000), st.none() | st.integers(1, 6))
def test_kept_positions_are_boundaries_of_the_chunk(
    placement: str, length: int, start: int, rest: int, branch_blocks: int | None
) -> None:
    end, branch = start + length, None if branch_blocks is None else branch_blocks * GRID
    found = positions(placement, start, end, end + rest, branch)
    assert all(position % GRID == 0 and start < position <= end for position in found)
    assert found == sorted(set(found))
    if placement != "all":
        assert len(found) <= 2


class Visits:
    """A tree that keeps every block of attention it was given and the states that a placement keeps, for prompts that
    share their first `shared` tokens and nothing else."""

    def __init__(self, placement: str, shared: int) -> None:
        self.placement, self.shared = placement, shared
        self.attention = self.state = 0

    def hit(self, prompt: int) -> int:
        """The cached tokens of the next visit with a prompt of this length."""
        attention = min(self.attention, self.shared // GRID * GRID)
        state = min(self.state, attention)
        kept = positions(self.placement, state, prompt, prompt, attention if attention > state else None)
        common = [position for position in kept if position <= self.shared]
        self.state = max([self.state, *common])
        self.attention = max([self.attention, *kept])
        return state


def hits(placement: str, shared: int, prompts: Iterable[int]) -> list[int]:
    visits = Visits(placement, shared)
    return [visits.hit(prompt) for prompt in prompts]


@given(st.integers(1, 5000), st.lists(st.integers(1, 4000), min_size=3, max_size=5))
def test_a_shared_context_is_found_from_the_second_or_third_visit(shared: int, tails: list[int]) -> None:
    """The promise of `all` and of `branch`, for requests that add any amount of text of their own."""
    prompts = [shared + tail for tail in tails]
    depth = shared // GRID * GRID
    assert hits("all", shared, prompts)[1:] == [depth] * (len(prompts) - 1)
    assert hits("branch", shared, prompts)[2:] == [depth] * (len(prompts) - 2)


def test_last_alone_may_never_find_a_shared_context() -> None:
    """What `branch` is for: every last boundary lies in text of the request's own."""
    assert hits("last", 2000, [2000 + GRID] * 5) == [0] * 5
    assert hits("last", 2000, [2030] * 3) == [0, 1536, 1536]


@given(PLACEMENTS, st.integers(1, 4000))
def test_a_repeat_hits_at_its_second_visit(placement: str, prompt: int) -> None:
    """Fault B22: the last token is always computed, a prompt of whole intervals included."""
    depth = (prompt - 1) // GRID * GRID
    assert depth in [0, *positions(placement, 0, prompt, prompt)]


@pytest.mark.parametrize(("start", "end", "prompt"), [(-1, 5, 10), (6, 5, 10), (0, 11, 10)])
def test_a_chunk_outside_the_prompt_is_refused(start: int, end: int, prompt: int) -> None:
    with pytest.raises(ValueError, match="expected 0 <= start <= end <= prompt"):
        positions("all", start, end, prompt)


def test_an_unknown_placement_is_refused() -> None:
    with pytest.raises(ValueError, match="got 'some'"):
        positions("some", 0, 5, 10)


def test_equal_worth_goes_deepest_first() -> None:
    pair = [Boundary(512, Worth.BETWEEN), Boundary(1024, Worth.BETWEEN)]
    assert by_worth(pair) == pair[::-1]
