"""Distinct requests per boundary: names that do not collide, repeats that do not count, memory that is bounded."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radix.demand import BoundaryNames, Demand, Namespace

GRID = 4
EVERYBODY = Namespace()
PARTS = st.one_of(st.none(), st.text(max_size=3))


def names(tokens: list[int], namespace: Namespace = EVERYBODY) -> dict[int, bytes]:
    found = BoundaryNames(namespace, GRID).up_to(tokens)
    return {GRID * (index + 1): name for index, name in enumerate(found)}


def test_a_boundary_is_named_by_all_tokens_before_it() -> None:
    tokens = list(range(11))
    assert list(names(tokens)) == [4, 8]
    assert names(tokens)[8] == names([*tokens[:8], 99])[8]
    changed = names([99, *tokens[1:]])
    assert changed[4] != names(tokens)[4]
    assert changed[8] != names(tokens)[8]
    assert names(tokens[:3]) == {}


def test_names_are_the_same_however_the_prefix_grew() -> None:
    tokens = list(range(21))
    growing = BoundaryNames(EVERYBODY, GRID)
    for length in (0, 3, 4, 9, 9, 5, 21):
        assert growing.up_to(tokens[:length]) == list(names(tokens[:length]).values())


def test_tokens_are_taken_whole() -> None:
    """Large ids, and ids whose bytes run into each other."""
    assert names([1, 0, 0, 0])[4] != names([256, 0, 0, 0])[4] != names([0, 1, 0, 0])[4]
    assert len(names([2**40, -1, 0, 151_936])) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Namespace("ab", "c"), Namespace("a", "bc")),
        (Namespace("a", None), Namespace(None, "a")),
        (Namespace("", None), Namespace(None, None)),
        (Namespace("a", ""), Namespace("a", None)),
    ],
)
def test_namespaces_do_not_meet_by_concatenation(one: Namespace, other: Namespace) -> None:
    tokens = [1, 2, 3, 4]
    assert names(tokens, one)[4] != names(tokens, other)[4]


@given(st.lists(st.builds(Namespace, PARTS, PARTS), min_size=2, unique=True))
def test_any_two_namespaces_are_apart(namespaces: list[Namespace]) -> None:
    assert len({namespace.seed() for namespace in namespaces}) == len(namespaces)


def test_distinct_requests_count_and_repeats_do_not() -> None:
    demand = Demand()
    assert demand.register("a", [b"x", b"y"]) == [b"x", b"y"]
    assert demand.register("a", [b"x", b"z"]) == [b"z"]
    assert demand.register("b", [b"x"]) == [b"x"]
    assert [demand.count(boundary) for boundary in (b"x", b"y", b"z", b"?")] == [2, 1, 1, 0]


def test_a_request_beyond_the_horizon_no_longer_counts() -> None:
    demand = Demand(horizon=3)
    demand.register("a", [b"x"])
    demand.register("b", [b"x"])
    demand.register("c", [b"y"])
    assert demand.count(b"x") == 2
    demand.register("d", [b"y"])
    assert demand.count(b"x") == 1
    assert demand.register("a", [b"x"]) == []  # the same requester, back again
    assert demand.count(b"x") == 1


def test_the_boundary_wanted_least_recently_is_forgotten_first() -> None:
    demand = Demand(max_boundaries=2)
    demand.register("a", [b"x", b"y"])
    demand.register("b", [b"x"])
    demand.register("c", [b"z"])
    assert len(demand) == 2
    assert [demand.count(boundary) for boundary in (b"x", b"y", b"z")] == [2, 0, 1]
    demand.clear()
    assert (len(demand), demand.count(b"x")) == (0, 0)


@pytest.mark.parametrize("limits", [{"horizon": 0}, {"max_boundaries": 0}, {"max_requesters": -1}])
def test_limits_below_one_are_refused(limits: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="from 1 on"):
        Demand(**limits)


@given(
    st.lists(st.tuples(st.integers(0, 12), st.lists(st.integers(0, 9), max_size=3)), max_size=80),
    st.integers(1, 6),
    st.integers(1, 5),
    st.integers(1, 4),
)
def test_counts_and_memory_are_bounded_whatever_is_registered(
    events: list[tuple[int, list[int]]], horizon: int, max_boundaries: int, max_requesters: int
) -> None:
    demand = Demand(horizon=horizon, max_boundaries=max_boundaries, max_requesters=max_requesters)
    wanted: dict[bytes, set[str]] = {}
    for requester, boundaries in events:
        keys = [bytes([key]) for key in boundaries]
        demand.register(str(requester), keys)
        for key in keys:
            wanted.setdefault(key, set()).add(str(requester))
        assert len(demand) <= max_boundaries
        assert len(demand._arrivals) <= horizon
        for key, requesters in wanted.items():
            assert demand.count(key) <= min(max_requesters, horizon, len(requesters))
    assert all(len(kept) <= max_requesters for kept in demand._wanted.values())


def test_a_salt_makes_every_boundary_another() -> None:
    tokens = list(range(40))
    demand = Demand()
    for requester, salt in zip("abc", (None, "s", "t"), strict=True):
        demand.register(requester, names(tokens, Namespace(None, salt)).values())
    found = [names(tokens, Namespace(None, salt)).values() for salt in (None, "s", "t")]
    assert {demand.count(name) for name in itertools.chain(*found)} == {1}
