"""What one scheduler process holds: the plan it serves and the counters it keeps."""

from __future__ import annotations

import json
import logging
from typing import NamedTuple

from radix.eviction import Kind
from sgl_hybrid.errors import SettingError
from sgl_hybrid.memory.activity import Activity
from sgl_hybrid.memory.budget import attention_unit_total_bytes, checkpoint_unit_total_bytes
from sgl_hybrid.memory.dual_pool import DualPoolLedger, Pool
from sgl_hybrid.memory.state_memory import StateMemory
from sgl_hybrid.seams.sizing import MemoryPlan

logger = logging.getLogger(__name__)


class Served(NamedTuple):
    """The plan and its counters."""

    plan: MemoryPlan
    memory: StateMemory
    ledger: DualPoolLedger
    activity: Activity


_served: Served | None = None


def start(plan: MemoryPlan, memory: StateMemory) -> None:
    """Begin to serve `plan` from `memory` in this process and log it in one line."""
    global _served
    layout = plan.layout
    ledger = DualPoolLedger(
        units={Pool.ATTENTION: memory.pages.num_pages, Pool.RECURRENT: memory.store.num_virtual},
        unit_bytes={
            Pool.ATTENTION: attention_unit_total_bytes(layout),
            Pool.RECURRENT: checkpoint_unit_total_bytes(layout),
        },
    )
    _served = Served(plan, memory, ledger, Activity(tuple(kind.value for kind in Kind)))
    logger.info("sgl_hybrid memory organization: %s", json.dumps(plan.describe(), sort_keys=True))


def served() -> Served:
    """The plan and counters of this process.

    Raises:
        SettingError: the pools have not been sized yet.
    """
    if _served is None:
        raise SettingError("expected a memory organization to be served in this process, got none")
    return _served
