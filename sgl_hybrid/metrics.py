"""Prometheus metrics: names, help texts, and their samples as a reading of what `/server_info` reports.

SGLang exports them with `--enable-metrics`. Both pages show the same numbers because both come from one report.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple


class Metric(NamedTuple):
    """One metric. `labels`: label names. A name that ends in `_total` is a counter, every other one a gauge."""

    name: str
    help: str
    labels: tuple[str, ...] = ()

    @property
    def is_counter(self) -> bool:
        return self.name.endswith("_total")


class Sample(NamedTuple):
    """One value of a metric; `labels` are values in the order of the metric's label names."""

    metric: Metric
    labels: tuple[str, ...]
    value: float


ORGANIZATION_INFO = Metric(
    "sgl_hybrid:memory_organization_info",
    "Always 1; the labels name the active memory organization and its units.",
    ("organization", "page_tokens", "checkpoint_interval", "attention_pages", "checkpoints"),
)
POOL_UNITS = Metric(
    "sgl_hybrid:pool_units",
    "Units of one pool now: free, cached (held by the tree, evictable), held (by running requests).",
    ("pool", "state"),
)
PAGES = Metric("sgl_hybrid:pages", "Pages of one pool now, by what they hold.", ("pool", "kind"))
CHECKPOINTS = Metric(
    "sgl_hybrid:checkpoints",
    "Checkpoints now: active (a request writes it), referenced (published, a request uses it), cached (published).",
    ("state",),
)
CHECKPOINT_EVENTS = Metric("sgl_hybrid:checkpoint_events_total", "Events in the life of checkpoints.", ("event",))
PREFIX_HITS = Metric(
    "sgl_hybrid:prefix_hits_total",
    "Admitted requests by what was cached of them: joint (attention and a checkpoint), missing_checkpoint (attention "
    "up to a boundary beyond the deepest checkpoint).",
    ("kind",),
)
PREFIX_HIT_TOKENS = Metric(
    "sgl_hybrid:prefix_hit_tokens_total",
    "Tokens of those requests: joint (not computed), missing_checkpoint (computed again for want of a checkpoint).",
    ("kind",),
)
EVICTIONS = Metric("sgl_hybrid:evictions_total", "Decisions to evict, by the kind of what was due.", ("kind",))
EVICTED = Metric("sgl_hybrid:evicted_total", "Cached units that were evicted, by unit.", ("unit",))
REQUESTS = Metric(
    "sgl_hybrid:requests_total",
    "Requests that memory did not suffice for: deferred at admission, retracted while running, aborted.",
    ("event",),
)
SLABS = Metric("sgl_hybrid:slabs", "Slabs of conv slots now.")
SLAB_SLOTS = Metric(
    "sgl_hybrid:slab_slots",
    "Conv slots of the slabs now: free, cached, held (of active or referenced checkpoints).",
    ("state",),
)
SLAB_OCCUPANCY = Metric("sgl_hybrid:slab_occupancy", "Slabs now, by number of used slots.", ("used_slots",))
SLAB_EVENTS = Metric("sgl_hybrid:slab_events_total", "Pages that became slabs and slabs that became free.", ("event",))
COPIED_BYTES = Metric(
    "sgl_hybrid:state_bytes_copied_total", "State bytes moved from one place of memory to another.", ("reason",)
)
HEADROOM_FRACTION = Metric(
    "sgl_hybrid:headroom_fraction", "Share of a pool's units that admission keeps beyond the need, now."
)
HEADROOM_WAITS = Metric(
    "sgl_hybrid:headroom_waits_total", "Scheduler steps in which the first waiting request waited for headroom alone."
)
PROTECTED = Metric(
    "sgl_hybrid:protected_checkpoints", "Checkpoints that policies keep from eviction now, by policy.", ("policy",)
)
PROTECTED_BYTES = Metric(
    "sgl_hybrid:protected_bytes", "Budget that they take, over all layers, by policy.", ("policy",)
)
POLICY_EVENTS = Metric(
    "sgl_hybrid:policy_events_total", "Decisions of the policies on checkpoints.", ("policy", "event")
)
ADOPTED = Metric(
    "sgl_hybrid:adopted_total",
    "Admitted requests that continue from a checkpoint, by who published it: own, running, ended.",
    ("producer",),
)
SUBMITTED_TOKENS = Metric(
    "sgl_hybrid:submitted_tokens_total", "Tokens of submitted batches: initial, resume, normal_decode.", ("category",)
)
RECORDED_TOKENS = Metric(
    "sgl_hybrid:recorded_tokens_total", "Tokens of ended requests, each once: input_once, output.", ("kind",)
)
RECORDS = Metric("sgl_hybrid:records_total", "Submitted batches with tokens.")
ADMISSION_ROUNDS = Metric(
    "sgl_hybrid:admission_rounds_total", "Admission rounds that looked at a waiting request.", ("result",)
)
POOL_CHECKS = Metric(
    "sgl_hybrid:pool_checks_total",
    "Allocation checks of one pool since start, by what was found (granted, granted_with_none_free, short, exhausted) "
    "and by outcome of failed checks (deferred, preempted).",
    ("pool", "kind"),
)
STRANDED_FRACTION = Metric(
    "sgl_hybrid:stranded_byte_fraction",
    "Free bytes of one static pool while the other had none free, over configured bytes, weighted by scheduler step.",
)

METRICS: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))


def samples(report: Mapping[str, Any]) -> Iterator[Sample]:
    """Yield the samples of a report as `/server_info` shows it (`memory_organization`)."""
    units = report["units"]
    yield Sample(
        ORGANIZATION_INFO,
        (
            report["organization"],
            str(report["page_tokens"]),
            str(report["checkpoint_interval"]),
            str(units["pages"] or units["attention_pages"]),
            str(report["checkpoints"]["most"]),
        ),
        1,
    )
    for pool, units in report["pools"].items():
        yield from _labelled(POOL_UNITS, {state: units[state] for state in ("free", "cached", "held")}, pool)
    for pool, kinds in report["pages"].items():
        yield from _labelled(PAGES, kinds, pool)
    checkpoints = report["checkpoints"]
    states = {state: checkpoints[state] for state in ("active", "referenced", "cached")}
    yield from _labelled(CHECKPOINTS, states)
    yield from _labelled(CHECKPOINT_EVENTS, {n: v for n, v in checkpoints.items() if n not in states and n != "most"})
    reuse = report["reuse"]
    for kind in ("joint", "missing_checkpoint"):
        yield Sample(PREFIX_HITS, (kind,), reuse[f"{kind}_hits"])
        yield Sample(PREFIX_HIT_TOKENS, (kind,), reuse[f"{kind}_tokens"])
    yield from _labelled(EVICTIONS, report["evictions"])
    yield from _labelled(EVICTED, report["evicted"])
    yield from _labelled(REQUESTS, report["requests"])
    yield from _labelled(COPIED_BYTES, report["copied_bytes"])
    if "slabs" in report:
        yield from _slab_samples(report["slabs"])
    yield from _policy_samples(report)
    counters = report["counters"]
    for pool, kinds in counters["checks"].items():
        yield from _labelled(POOL_CHECKS, kinds, pool)
    if "stranded_byte_fraction" in counters:
        yield Sample(STRANDED_FRACTION, (), counters["stranded_byte_fraction"])


def _slab_samples(slabs: Mapping[str, Any]) -> Iterator[Sample]:
    yield Sample(SLABS, (), slabs["slabs"])
    yield from _labelled(SLAB_SLOTS, {state: slabs[f"{state}_slots"] for state in ("free", "cached", "held")})
    yield from _labelled(SLAB_OCCUPANCY, {str(used): count for used, count in enumerate(slabs["occupancy"])})
    yield from _labelled(SLAB_EVENTS, {event: slabs[event] for event in ("opened", "popped")})


def _policy_samples(report: Mapping[str, Any]) -> Iterator[Sample]:
    headroom, retention, pins, work = (report[name] for name in ("headroom", "retention", "pins", "work"))
    yield Sample(HEADROOM_FRACTION, (), headroom["fraction"])
    yield Sample(HEADROOM_WAITS, (), headroom["waits"])
    yield from _labelled(PROTECTED, {"retention": retention["protected_now"], "pins": pins["pinned_now"]})
    yield from _labelled(PROTECTED_BYTES, {"retention": retention["bytes_now"], "pins": pins["bytes_now"]})
    kept = ("eligible_boundaries", "protected", "kept_requests", "evictions_skipped", "released", "release_skipped")
    yield from _labelled(POLICY_EVENTS, {name: retention[name] for name in kept}, "retention")
    pin_events = ("tested", "eligible", "pinned", "resumed", "resumed_at_pin")
    yield from _labelled(POLICY_EVENTS, {name: pins[name] for name in pin_events}, "pins")
    yield from _labelled(POLICY_EVENTS, {"yielded": report["protection"]["yielded"]}, "protection")
    yield from _labelled(ADOPTED, report["adopted"])
    yield from _labelled(SUBMITTED_TOKENS, {name: work[name] for name in ("initial", "resume", "normal_decode")})
    yield from _labelled(RECORDED_TOKENS, {name: work[name] for name in ("input_once", "output")})
    yield Sample(RECORDS, (), work["records"])
    empty, rounds = work["empty_rounds"], work["rounds"]
    yield from _labelled(ADMISSION_ROUNDS, {"empty": empty, "admitted": rounds - empty})


def _labelled(metric: Metric, values: Mapping[str, float], *first: str) -> Iterator[Sample]:
    """Yield one sample for each named value; its name is the last label."""
    for name, value in values.items():
        yield Sample(metric, (*first, name), value)
