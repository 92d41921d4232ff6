"""Without --memory-budget: the free memory that the pools are planned from is one number for all ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import sglang.srt.runtime_context as runtime
import sglang.srt.utils.common as common

from sgl_hybrid.config import MemorySettings
from sgl_hybrid.seams import install, pools

FREE_GIB, BEFORE_GIB, STATIC = 60.0, 79.0, 0.9


class MeasuredError(Exception):
    """Ends the sizing once the budget is known."""


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_budget_is_the_least_of_all_ranks(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    group = object()

    def free_memory(device: str, gpu_id: int, distributed: bool = False, cpu_group: Any = None) -> float:
        assert (device, gpu_id, distributed, cpu_group) == ("cuda", 1, ranks > 1, group)
        return FREE_GIB

    def plan(settings: MemorySettings, configurator: Any, *, available_bytes: int | None) -> None:
        assert available_bytes == int((FREE_GIB - BEFORE_GIB * (1 - STATIC)) * (1 << 30))
        raise MeasuredError

    world = SimpleNamespace(launch_world_size=ranks, world_group=SimpleNamespace(cpu_group=group))
    monkeypatch.setattr(runtime, "get_parallel", lambda: world)
    monkeypatch.setattr(runtime, "get_schedule", lambda: SimpleNamespace(mem_fraction_static=STATIC))
    monkeypatch.setattr(common, "get_available_gpu_memory", free_memory)
    monkeypatch.setattr(install, "settings", lambda: MemorySettings.from_values({"memory_org": "s2"}))
    monkeypatch.setattr(pools, "plan_from_model", plan)
    with pytest.raises(MeasuredError):
        pools.resolve_pool_config(lambda: None, SimpleNamespace(device="cuda", gpu_id=1), BEFORE_GIB)
