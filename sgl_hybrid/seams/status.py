"""What a running server says of its memory organization: `/server_info` and Prometheus.

Source: SGLang 0.5.23, `sglang/srt/managers/scheduler_components/internal_state.py`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from sgl_hybrid import metrics
from sgl_hybrid.memory.dual_pool import Pool
from sgl_hybrid.seams import admission, process
from sgl_hybrid.seams.hooks import Seam


def add_internal_state(result: Any, self: Any, recv_req: Any) -> Any:
    """After the scheduler's internal state is collected: add `memory_organization`, as `/server_info` shows it."""
    result.internal_state["memory_organization"] = report(self.scheduler)
    return result


def report(scheduler: Any) -> dict[str, Any]:
    """The plan, the pools' present units and the counters as plain values.

    `pools`: units of each pool: total, free, cached without a reference, and held by requests.
    """
    served = process.served()
    tree = scheduler.tree_cache
    allocator = scheduler.token_to_kv_pool_allocator
    slots = tree.req_to_token_pool.mamba_allocator.available_size()
    cached_slots = tree.mamba_evictable_size() if tree.supports_mamba() else 0
    pages = allocator.available_size() // allocator.page_size
    units = served.ledger.units
    cached_pages = admission.free_attention_pages(scheduler) - pages
    return {
        **served.plan.describe(),
        "pools": {
            pool.value: {"total": units[pool], "free": free, "cached": cached, "held": units[pool] - free - cached}
            for pool, free, cached in (
                (Pool.ATTENTION, pages, cached_pages),
                (Pool.RECURRENT, slots, cached_slots),
            )
        },
        "counters": served.ledger.snapshot(),
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
    gauges, layout, units = _gauges(), served.plan.layout, served.plan.units
    gauges[metrics.ORGANIZATION_INFO].labels(
        layout.organization,
        str(layout.page_tokens),
        str(layout.checkpoint_interval),
        str(units.num_attention_pages),
        str(units.num_checkpoints),
    ).set(1)
    snapshot = served.ledger.snapshot()
    for pool, counts in snapshot["checks"].items():
        for kind, count in counts.items():
            gauges[metrics.POOL_CHECKS].labels(pool, kind).set(count)
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
