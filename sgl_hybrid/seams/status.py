"""What a running server says of its memory organization: `/server_info` and Prometheus.

Source: SGLang 0.5.23, `sglang/srt/managers/scheduler_components/internal_state.py`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec

from sgl_hybrid import metrics
from sgl_hybrid.memory.dual_pool import Pool
from sgl_hybrid.seams import process
from sgl_hybrid.seams.hooks import Seam


def add_internal_state(result: Any, self: Any, recv_req: Any) -> Any:
    """After the scheduler's internal state is collected: add `memory_organization`, as `/server_info` shows it."""
    result.internal_state["memory_organization"] = report(self.scheduler)
    return result


def report(scheduler: Any) -> dict[str, Any]:
    """The plan, the units of the pools by who has them, and the counters, as plain values."""
    served = process.served()
    tree = scheduler.tree_cache
    result = {**served.plan.describe(), "pools": pools(tree), "counters": served.ledger.snapshot(served.memory.shared)}
    store = served.memory.store
    result["checkpoints"] = {
        "active": store.num_active,
        "referenced": store.num_referenced,
        "cached": store.num_cached,
        **msgspec.structs.asdict(store.counts),
    }
    result["evictions"] = dict(served.evictions)
    result["running_requests_cap"] = scheduler.max_running_requests
    if store.slabs is not None:
        slabs = store.slabs
        result["slabs"] = {
            "slabs": slabs.num_slabs,
            "live_slots": slabs.num_live,
            "active_or_referenced_slots": slabs.num_pinned,
            "opened": slabs.opened,
            "popped": slabs.popped,
            "occupancy": list(slabs.occupancy()),
        }
    return result


def pools(tree: Any) -> dict[str, dict[str, int]]:
    """Units of each pool: total, free, cached without a reference, and held by requests.

    A dual organization has a pool of attention pages and one of composites; a shared one has one pool of pages, in
    which a slab page counts as cached while none of its slots is active or referenced.
    """
    memory = process.served().memory
    store, full = memory.store, tree.full_evictable_size() // memory.layout.page_tokens
    if not memory.shared:
        found = {
            Pool.ATTENTION.value: (memory.pages.num_pages, memory.pages.num_free, full),
            Pool.RECURRENT.value: (store.num_virtual, store.num_free_ids, store.num_cached),
        }
    else:
        ledger = store.ledgers().pages
        idle = 0 if store.slabs is None else sum(store.is_reclaimable(page) for page in store.slabs.slabs())
        found = {"shared": (ledger.total, ledger.free, full + ledger.cached + idle)}
    return {
        name: {"total": total, "free": free, "cached": cached, "held": total - free - cached}
        for name, (total, free, cached) in found.items()
    }


@lru_cache(maxsize=1)
def _gauges() -> dict[metrics.Metric, Any]:
    # Imported late: prometheus_client reads its multiprocess folder from the environment, which SGLang sets first.
    from prometheus_client import Gauge

    names = (metrics.ORGANIZATION_INFO, metrics.POOL_CHECKS, metrics.STRANDED_FRACTION)
    return {metric: Gauge(metric.name, metric.help, metric.labels, multiprocess_mode="mostrecent") for metric in names}


def publish(result: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """After `SchedulerMetricsReporter` reports prefill or decode statistics: set the gauges, if metrics are on."""
    if not self.enable_metrics:
        return
    served = process.served()
    gauges, layout = _gauges(), served.plan.layout
    gauges[metrics.ORGANIZATION_INFO].labels(
        layout.organization,
        str(layout.page_tokens),
        str(layout.checkpoint_interval),
        str(served.memory.pages.num_pages),
        str(served.memory.store.num_virtual),
    ).set(1)
    snapshot = served.ledger.snapshot(served.memory.shared)
    for pool, counts in snapshot["checks"].items():
        for kind, count in counts.items():
            gauges[metrics.POOL_CHECKS].labels(pool, kind).set(count)
    if not served.memory.shared:
        gauges[metrics.STRANDED_FRACTION].set(snapshot["stranded_byte_fraction"])


_REPORTER = "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter"

SEAMS: tuple[Seam, ...] = (
    Seam(
        "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController.get_internal_state",
        "after",
        add_internal_state,
        ("recv_req",),
        "the organization is shown in /server_info",
    ),
    *(
        Seam(f"{_REPORTER}.{name}", "after", publish, (), "the organization and its counters are Prometheus metrics")
        for name in ("report_prefill_stats", "report_decode_stats")
    ),
)
