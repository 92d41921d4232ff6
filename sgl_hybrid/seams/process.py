"""What one scheduler process holds: the plan it serves and the counters it keeps."""

from __future__ import annotations

import json
import logging
import os
from typing import NamedTuple

from radix.eviction import Kind
from radix.policies import Chosen, Policies
from radix.retention import Lifetime
from sgl_hybrid.errors import SettingError
from sgl_hybrid.memory.activity import Activity
from sgl_hybrid.memory.audit import CheckpointAudit
from sgl_hybrid.memory.budget import attention_unit_total_bytes, checkpoint_unit_total_bytes
from sgl_hybrid.memory.dual_pool import DualPoolLedger, Pool
from sgl_hybrid.memory.state_memory import StateMemory
from sgl_hybrid.platforms import NO_GPU_RUN, Platform, start_line
from sgl_hybrid.seams.sizing import MemoryPlan

logger = logging.getLogger(__name__)

DEBUG_CHECKPOINTS = os.environ.get("SGLANG_HYBRID_DEBUG_CHECKPOINTS") == "1"
"""For tests and debugging: hash every published checkpoint when it is published, read and evicted."""


class Served(NamedTuple):
    """The plan, its policies and its counters. `audit` is None unless checkpoints are checked."""

    plan: MemoryPlan
    memory: StateMemory
    ledger: DualPoolLedger
    activity: Activity
    policies: Policies
    audit: CheckpointAudit | None


_served: Served | None = None


def start(plan: MemoryPlan, memory: StateMemory) -> None:
    """Begin to serve `plan` from `memory` in this process and log both, on a GPU with a warning."""
    global _served
    layout = plan.layout
    ledger = DualPoolLedger(
        units={Pool.ATTENTION: memory.pages.num_pages, Pool.RECURRENT: memory.store.num_virtual},
        unit_bytes={
            Pool.ATTENTION: attention_unit_total_bytes(layout),
            Pool.RECURRENT: checkpoint_unit_total_bytes(layout),
        },
    )
    activity = Activity(tuple(kind.value for kind in Kind))
    audit = CheckpointAudit(memory) if DEBUG_CHECKPOINTS else None
    _served = Served(plan, memory, ledger, activity, policies_of(plan, memory), audit)
    logger.info("sgl_hybrid memory organization: %s", json.dumps(plan.describe(), sort_keys=True))
    platform = Platform(memory.pool.device.type)
    exact = plan.settings.exact_continuation
    logger.info("sgl_hybrid platform: %s", start_line(layout.organization, platform, exact=exact))
    if platform is Platform.CUDA:
        logger.warning("sgl_hybrid: %s", NO_GPU_RUN)


def policies_of(plan: MemoryPlan, memory: StateMemory) -> Policies:
    """The policies that the settings of a plan ask for, on its pools."""
    settings, layout = plan.settings, plan.layout
    headroom = settings.admission_headroom
    asked = {
        "headroom": None if headroom == "auto" else headroom,
        "lifetime": settings.checkpoint_lifetime and Lifetime(settings.checkpoint_lifetime),
        "retention_k": settings.retention_k,
        "pin_k": settings.preempt_pin_k,
        "protection": settings.protection_budget,
        "value_eviction": settings.checkpoint_eviction == "value",
    }
    chosen = Chosen(**{name: value for name, value in asked.items() if value is not None})
    pages = memory.pages.num_pages
    return Policies(
        chosen,
        grid=layout.checkpoint_interval,
        pools=(pages,) if memory.shared else (pages, memory.store.num_virtual),
        pool_tokens=pages * layout.page_tokens,
    )


def served() -> Served:
    """The plan and counters of this process.

    Raises:
        SettingError: the pools have not been sized yet.
    """
    if _served is None:
        raise SettingError("expected a memory organization to be served in this process, got none")
    return _served
