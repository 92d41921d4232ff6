"""What an idle server of a tiny model reports, without SGLang."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from sgl_hybrid.config import MemorySettings
from sgl_hybrid.memory.state_memory import StateMemory
from sgl_hybrid.seams import process, status
from sgl_hybrid.seams.sizing import make_plan
from tests.tiny_layouts import PAGE_TOKENS, tiny_geometry


def server_report(organization: str) -> dict[str, Any]:
    """Return the report of an organization; this process serves it from now on."""
    settings = MemorySettings(
        memory_org=organization, memory_budget="1MiB", page_tokens=PAGE_TOKENS, checkpoint_interval=PAGE_TOKENS
    )
    plan = make_plan(settings, tiny_geometry(), context_tokens=None)
    memory = StateMemory(
        plan.units, device="cpu", kv_dtype=torch.bfloat16, ssm_dtype=torch.bfloat16, conv_dtype=torch.bfloat16
    )
    process.start(plan, memory)
    tree = SimpleNamespace(full_evictable_size=lambda: 0)
    return status.report(SimpleNamespace(tree_cache=tree, max_running_requests=1))
