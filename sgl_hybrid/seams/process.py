"""What one scheduler process holds: the plan it serves and the counters it keeps."""

from __future__ import annotations

import json
import logging
from typing import NamedTuple

from sgl_hybrid.errors import SettingError
from sgl_hybrid.memory.dual_pool import DualPoolLedger, Pool
from sgl_hybrid.seams.sizing import MemoryPlan

logger = logging.getLogger(__name__)


class Served(NamedTuple):
    """The plan and its counters."""

    plan: MemoryPlan
    ledger: DualPoolLedger


_served: Served | None = None


def start(plan: MemoryPlan) -> None:
    """Begin to serve `plan` in this process and log it in one line."""
    global _served
    geometry, layout, units = plan.geometry, plan.layout, plan.units
    ledger = DualPoolLedger(
        units={Pool.ATTENTION: units.num_attention_pages, Pool.RECURRENT: units.num_checkpoints},
        unit_bytes={
            Pool.ATTENTION: layout.page_tokens * geometry.kv_token_bytes * len(geometry.attention_layers),
            Pool.RECURRENT: geometry.composite_bytes * len(geometry.recurrent_layers),
        },
    )
    _served = Served(plan, ledger)
    logger.info("sgl_hybrid memory organization: %s", json.dumps(plan.describe(), sort_keys=True))


def served() -> Served:
    """The plan and counters of this process.

    Raises:
        SettingError: the pools have not been sized yet.
    """
    if _served is None:
        raise SettingError("expected a memory organization to be served in this process, got none")
    return _served
