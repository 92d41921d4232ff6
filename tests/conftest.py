"""Fixtures of several files."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

# A busy machine takes many times as long for an example; how long a test may take says pytest's timeout.
settings.register_profile("sgl_hybrid", deadline=None)
settings.load_profile("sgl_hybrid")


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """One thread of torch, or what the test's parameter says."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(getattr(request, "param", 1))
    yield
    torch.set_num_threads(before)


@pytest.fixture
def gpu_tensors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors have the name of a GPU that is not there, and no memory."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor, device=None: tensor)
    with FakeTensorMode():
        yield
