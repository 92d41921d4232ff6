"""Extra key and adapter as one key: any two pairs are apart, ordinary keys stay."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radix.identity import _MARK, tree_key

KEYS = st.one_of(st.none(), st.text("a:1-", max_size=3), st.text("a:1-", max_size=3).map(lambda text: _MARK + text))
PAIRS = st.tuples(KEYS, KEYS)


def test_pairs_that_concatenate_to_the_same_text_are_apart() -> None:
    assert tree_key("ab", "c") != tree_key("a", "bc")
    assert tree_key(None, "a") != tree_key("a", None)
    assert tree_key("a", "") != tree_key("a", None)


@pytest.mark.parametrize(("given", "kept"), [(None, None), ("", None), ("tenant-1", "tenant-1")])
def test_an_ordinary_key_without_an_adapter_stays(given: str | None, kept: str | None) -> None:
    assert tree_key(given, None) == kept


@given(PAIRS, PAIRS)
def test_different_pairs_have_different_keys(one: tuple[str | None, str | None], other: tuple) -> None:
    same = (one[0] or None, one[1]) == (other[0] or None, other[1])
    assert (tree_key(*one) == tree_key(*other)) == same


@given(PAIRS)
def test_a_key_cannot_be_had_by_giving_it(pair: tuple[str | None, str | None]) -> None:
    """A caller who knows the key of an adapter's namespace does not enter it with an extra key."""
    made = tree_key(*pair)
    if pair[1] is not None:
        assert tree_key(made, None) != made
