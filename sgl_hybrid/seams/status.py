"""What a running server says of its memory organization: `/server_info` and Prometheus.

Source: SGLang 0.5.23, `sglang/srt/managers/scheduler_components/internal_state.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import msgspec

from sgl_hybrid import metrics
from sgl_hybrid.memory.dual_pool import Pool
from sgl_hybrid.memory.pages import PageKind
from sgl_hybrid.memory.slabs import SlabAllocator
from sgl_hybrid.memory.state_memory import StateMemory
from sgl_hybrid.seams import process
from sgl_hybrid.seams.hooks import Seam
from sgl_hybrid.seams.policy_report import policy_report

EXPORT_INTERVAL_S = 1.0
"""Least time between two exports: SGLang reports decode statistics in every step, and an idle server in a loop."""


def add_internal_state(result: Any, self: Any, recv_req: Any) -> Any:
    """After the scheduler's internal state is collected: add `memory_organization`, as `/server_info` shows it."""
    result.internal_state["memory_organization"] = report(self.scheduler)
    return result


def report(scheduler: Any) -> dict[str, Any]:
    """The plan, the units by who has them, and the counters, as plain values."""
    served = process.served()
    memory, activity, store = served.memory, served.activity, served.memory.store
    result = {
        **served.plan.describe(),
        "pools": pools(scheduler.tree_cache),
        "pages": pages_by_kind(memory),
        "checkpoints": {
            "most": store.num_virtual,
            "active": store.num_active,
            "referenced": store.num_referenced,
            "cached": store.num_cached,
            **msgspec.structs.asdict(store.counts),
        },
        "evictions": dict(activity.evictions),
        "evicted": msgspec.structs.asdict(activity.evicted),
        "reuse": msgspec.structs.asdict(activity.reuse),
        "requests": msgspec.structs.asdict(activity.requests),
        "copied_bytes": msgspec.structs.asdict(memory.copied),
        "running_requests_cap": scheduler.max_running_requests,
        "ledger_checks": activity.ledger_checks,
        "counters": served.ledger.snapshot(memory.shared),
        **policy_report(),
    }
    if store.slabs is not None:
        result["slabs"] = slab_counts(store.slabs)
    return result


def pages_by_kind(memory: StateMemory) -> dict[str, dict[str, int]]:
    """Pages of each pool by what they hold; the kinds that a pool can have sum to its pages. A composite (in S0 and D0
    the recurrent state with its conv state behind it) is a member page."""
    kinds = [PageKind.ATTENTION, PageKind.MEMBER, PageKind.CONV, PageKind.SLAB, PageKind.FREE]
    if memory.shared:
        return {"shared": {kind.name.lower(): memory.pages.count(kind) for kind in kinds}}
    found = {Pool.ATTENTION: (memory.pages, PageKind.ATTENTION), Pool.RECURRENT: (memory.store.pages, PageKind.MEMBER)}
    return {
        pool.value: {kind.name.lower(): pages.count(kind) for kind in (held, PageKind.FREE)}
        for pool, (pages, held) in found.items()
    }


def slab_counts(slabs: SlabAllocator) -> dict[str, Any]:
    """Slabs and their slots now, and how many were opened and popped. Live slots are pinned or cached."""
    return {
        "slabs": slabs.num_slabs,
        "live_slots": slabs.num_live,
        "held_slots": slabs.num_held,
        "cached_slots": slabs.num_live - slabs.num_held,
        "free_slots": slabs.num_open,
        "opened": slabs.opened,
        "popped": slabs.popped,
        "occupancy": slabs.occupancy(),
    }


def pools(tree: Any) -> dict[str, dict[str, int]]:
    """Units of each pool: total, free, cached without a reference, and held by requests.

    A dual organization has a pool of attention pages and one of checkpoints; a shared one has one pool of pages, in
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
        found = {"shared": (ledger.total, ledger.free, full + ledger.cached + memory.num_idle_slabs)}
    return {
        name: {"total": total, "free": free, "cached": cached, "held": total - free - cached}
        for name, (total, free, cached) in found.items()
    }


class Exporter:
    """Sets the Prometheus metrics of this process from reports.

    In SGLang's multiprocess mode a counter can only be incremented, so the last value of each is kept.
    """

    def __init__(self) -> None:
        # Imported late: prometheus_client reads its multiprocess folder from the environment, which SGLang sets first.
        from prometheus_client import Counter, Gauge

        self._exported = {
            metric: Counter(metric.name, metric.help, metric.labels)
            if metric.is_counter
            else Gauge(metric.name, metric.help, metric.labels, multiprocess_mode="mostrecent")
            for metric in metrics.METRICS
        }
        self._children: dict[tuple[metrics.Metric, tuple[str, ...]], Any] = {}
        self._last: dict[tuple[metrics.Metric, tuple[str, ...]], float] = {}
        self.exported_at_s = -EXPORT_INTERVAL_S

    def export(self, samples: Iterable[metrics.Sample]) -> None:
        """Set every gauge and bring every counter up to its sample; what has not changed is not written again."""
        self.exported_at_s = time.monotonic()
        for metric, labels, value in samples:
            key = metric, labels
            last = self._last.get(key)
            if value == last:
                continue
            child = self._children.get(key)
            if child is None:
                parent = self._exported[metric]
                child = self._children[key] = parent.labels(*labels) if labels else parent
            if metric.is_counter:
                child.inc(value - (last or 0))
            else:
                child.set(value)
            self._last[key] = value


@lru_cache(maxsize=1)
def exporter() -> Exporter:
    """The one exporter of this process."""
    return Exporter()


def publish(result: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """After `SchedulerMetricsReporter` reports: set the metrics on the rank that has SGLang's own, at most once in
    `EXPORT_INTERVAL_S`."""
    if self.current_scheduler_metrics_enabled and time.monotonic() - exporter().exported_at_s >= EXPORT_INTERVAL_S:
        exporter().export(metrics.samples(report(self.scheduler)))


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
        for name in ("report_prefill_stats", "report_decode_stats", "_maybe_log_idle_metrics")
    ),
)
