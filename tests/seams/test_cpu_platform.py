"""Decode steps of the CPU platform compute with the threads that the environment asks for, prefills with their own."""

from __future__ import annotations

import pytest
import torch

from sgl_hybrid.errors import SettingError
from sgl_hybrid.seams import cpu_platform

pytestmark = pytest.mark.usefixtures("threads")


@pytest.mark.parametrize("threads", [2], indirect=True)
@pytest.mark.parametrize(("wanted", "seen"), [(None, 2), ("1", 1)])
def test_a_decode_step_has_its_own_number_of_threads(
    monkeypatch: pytest.MonkeyPatch, wanted: str | None, seen: int
) -> None:
    if wanted is None:
        monkeypatch.delenv(cpu_platform.DECODE_THREADS, raising=False)
    else:
        monkeypatch.setenv(cpu_platform.DECODE_THREADS, wanted)
    assert cpu_platform.decode_with_few_threads(lambda self, batch: torch.get_num_threads(), None, "batch") == seen
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("threads", [2], indirect=True)
def test_a_decode_step_that_fails_gives_the_threads_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cpu_platform.DECODE_THREADS, "1")
    with pytest.raises(ZeroDivisionError):
        cpu_platform.decode_with_few_threads(lambda self: 1 // 0, None)
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("wanted", ["0", "two", ""])
def test_another_value_is_refused(monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    monkeypatch.setenv(cpu_platform.DECODE_THREADS, wanted)
    with pytest.raises(SettingError, match="expected a number of threads, got"):
        cpu_platform.bind_operators()
