"""With `SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY` every ledger of the organization is verified after every step.

SGLang's own busy check counts the tokens of the attention pool. A violation ends the scheduler, as SGLang's does. Idle
schedulers are checked always (`BlockAllocator.verify_byte_accounting`).

Source: SGLang 0.5.23, `sglang/srt/managers/scheduler_components/invariant_checker.py`.
"""

from __future__ import annotations

from typing import Any

from sgl_hybrid.seams import process
from sgl_hybrid.seams.hooks import Seam


def check_ledgers(result: None, self: Any) -> None:
    """After `SchedulerInvariantChecker.self_check_during_busy`.

    Raises:
        InvariantError: naming what is inconsistent.
    """
    served = process.served()
    served.memory.check()
    served.activity.ledger_checks += 1


SEAMS: tuple[Seam, ...] = (
    Seam(
        "sglang.srt.managers.scheduler_components.invariant_checker.SchedulerInvariantChecker.self_check_during_busy",
        "after",
        check_ledgers,
        (),
        "strict mode: every ledger is verified at every step",
    ),
)
