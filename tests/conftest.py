"""Fixtures of several files."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """One thread of torch, or what the test's parameter says."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(getattr(request, "param", 1))
    yield
    torch.set_num_threads(before)
