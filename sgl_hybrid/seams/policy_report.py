"""What the policies of this process have decided, as plain values for `/server_info` and Prometheus."""

from __future__ import annotations

from typing import Any

import msgspec

from radix.headroom import headroom_blocks
from radix.policies import Policies
from radix.protection import Units
from sgl_hybrid.memory.dual_pool import Pool
from sgl_hybrid.seams import process


def policy_report() -> dict[str, dict[str, Any]]:
    """One section for each policy; bytes are over all layers of this rank."""
    served = process.served()
    policies, counts = served.policies, served.policies.counts
    fraction, shared = policies.headroom.fraction, served.memory.shared
    seen, pins = policies.occupancy, policies.pins
    return {
        "headroom": {
            "fraction": fraction,
            "attention_pages": headroom_blocks(fraction, served.memory.pages.num_pages),
            "checkpoints": 0 if shared else headroom_blocks(fraction, served.memory.store.num_virtual),
            "waits": counts.headroom_waits,
        },
        "retention": {
            "lifetime": policies.chosen.lifetime.value,
            "eligible_boundaries": counts.eligible_boundaries,
            "protected": counts.retained,
            "protected_now": len(policies.retention.protected),
            "kept_requests": counts.retained_requests,
            "evictions_skipped": counts.evictions_skipped,
            "released": counts.released,
            "release_skipped": counts.release_skipped,
            "bytes_now": _bytes(policies.retention.units),
            "bytes_most": _bytes(seen.retained_most),
            "bytes_mean": _mean(seen.retained_unit_steps, policies),
        },
        "pins": {
            **msgspec.structs.asdict(pins.counts),
            "pinned_now": len(pins.held),
            "bytes_now": _bytes(pins.units),
            "bytes_most": _bytes(seen.pinned_most),
            "bytes_mean": _mean(seen.pinned_unit_steps, policies),
            "resumed": counts.resumed,
            "resumed_at_pin": counts.resumed_at_pin,
        },
        "protection": {
            "budget_bytes": _bytes(policies.budget.limits),
            "used_bytes": _bytes(policies.budget.used),
            "yielded": counts.yielded,
        },
        "adopted": {
            "own": counts.adopted_own,
            "running": counts.adopted_running,
            "ended": counts.adopted_ended,
        },
        "work": {**msgspec.structs.asdict(policies.work), "recorded": policies.work.recorded},
    }


def _bytes(units: Units) -> int:
    """Bytes of units of each pool; the pool of a shared organization counts in pages, as its attention does."""
    sizes = process.served().ledger.unit_bytes
    return sum(count * sizes[pool] for count, pool in zip(units, Pool, strict=False))


def _mean(unit_steps: Units, policies: Policies) -> float:
    return _bytes(unit_steps) / max(1, policies.occupancy.steps)
