"""Names and help texts of the Prometheus metrics. SGLang exports them with `--enable-metrics`."""

from __future__ import annotations

from typing import NamedTuple


class Metric(NamedTuple):
    """One gauge. `labels`: label names."""

    name: str
    help: str
    labels: tuple[str, ...] = ()


ORGANIZATION_INFO = Metric(
    "sgl_hybrid:memory_organization_info",
    "Always 1; the labels name the active memory organization and its units.",
    ("organization", "page_tokens", "checkpoint_interval", "attention_pages", "checkpoints"),
)
POOL_CHECKS = Metric(
    "sgl_hybrid:pool_checks",
    "Allocation checks of one pool since start, by what was found (granted, granted_with_none_free, short, exhausted) "
    "and by outcome of failed checks (deferred, preempted).",
    ("pool", "kind"),
)
STRANDED_FRACTION = Metric(
    "sgl_hybrid:stranded_byte_fraction",
    "Free bytes of one static pool while the other had none free, over configured bytes, weighted by scheduler step.",
)
