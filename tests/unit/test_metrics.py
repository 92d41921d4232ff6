"""Prometheus shows what `/server_info` shows, and counters only grow by what was added."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import REGISTRY

from sgl_hybrid import metrics
from sgl_hybrid.memory.activity import Activity
from sgl_hybrid.seams import process
from sgl_hybrid.seams.status import Exporter
from tests.tiny_server import server_report

NUMBERS: dict[str, Any] = {
    "pools": {"shared": {"total": 193, "free": 100, "cached": 60, "held": 33}},
    "pages": {"shared": {"attention": 40, "member": 48, "conv": 0, "slab": 5, "free": 100}},
    "checkpoints": {"most": 63, "active": 2, "referenced": 1, "cached": 13, "allocated": 20, "published": 18},
    "evictions": {"attention": 3, "checkpoint": 2, "slab": 1},
    "evicted": {"attention_pages": 9, "checkpoints": 5},
    "reuse": {
        "joint_hits": 4,
        "joint_tokens": 4096,
        "missing_checkpoint_hits": 2,
        "missing_checkpoint_tokens": 1536,
    },
    "requests": {"deferred": 7, "retracted": 6, "aborted": 0},
    "copied_bytes": {"prefill_gather": 10, "prefill_scatter": 20, "slab_migration": 30},
    "counters": {"checks": {"attention": {"granted": 11}, "recurrent": {"granted": 12}}},
}
SLABS: dict[str, Any] = {
    "slabs": 5,
    "free_slots": 64,
    "cached_slots": 13,
    "held_slots": 3,
    "opened": 6,
    "popped": 1,
    "occupancy": [0, 2, 3],
}


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A report of S2 with numbers that are told apart; other fields are those of an idle server."""
    monkeypatch.setattr(process, "_served", None)
    return server_report("s2") | NUMBERS | {"slabs": SLABS}


def values(report: dict[str, Any]) -> dict[tuple[str, ...], float]:
    return {(sample.metric.name, *sample.labels): sample.value for sample in metrics.samples(report)}


def test_every_sample_has_the_labels_of_its_metric(report: dict[str, Any]) -> None:
    samples = list(metrics.samples(report))
    assert all(len(sample.labels) == len(sample.metric.labels) for sample in samples)
    assert len({(sample.metric, sample.labels) for sample in samples}) == len(samples)
    missing = set(metrics.METRICS) - {sample.metric for sample in samples}
    assert missing == {metrics.STRANDED_FRACTION}, "a shared pool strands nothing"


def test_samples_are_the_numbers_of_the_report(report: dict[str, Any]) -> None:
    found = values(report)
    units = str(report["page_tokens"]), str(report["checkpoint_interval"]), str(report["units"]["pages"])
    expected: dict[tuple[str, ...], float] = {
        ("memory_organization_info", "s2", *units, "63"): 1,
        ("pool_units", "shared", "held"): 33,
        ("pages", "shared", "slab"): 5,
        ("checkpoints", "referenced"): 1,
        ("checkpoint_events_total", "published"): 18,
        ("prefix_hits_total", "missing_checkpoint"): 2,
        ("prefix_hit_tokens_total", "joint"): 4096,
        ("evictions_total", "slab"): 1,
        ("evicted_total", "attention_pages"): 9,
        ("requests_total", "deferred"): 7,
        ("slabs",): 5,
        ("slab_slots", "cached"): 13,
        ("slab_occupancy", "2"): 3,
        ("slab_events_total", "popped"): 1,
        ("state_bytes_copied_total", "slab_migration"): 30,
        ("pool_checks_total", "recurrent", "granted"): 12,
    }
    assert {key: found[f"sgl_hybrid:{key[0]}", *key[1:]] for key in expected} == expected
    assert ("sgl_hybrid:checkpoints", "most") not in found
    assert ("sgl_hybrid:pool_units", "shared", "total") not in found


def test_the_dual_pools_have_their_fraction_and_no_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_served", None)
    found = values(server_report("d0"))
    assert found["sgl_hybrid:stranded_byte_fraction",] == 0
    assert not any(name.startswith("sgl_hybrid:slab") for name, *_ in found)


@pytest.fixture(scope="module")
def exporter() -> Exporter:
    """One in this process: the registry takes each name once."""
    return Exporter()


def test_counters_grow_to_their_sample_and_gauges_are_set(exporter: Exporter) -> None:
    counter, gauge = metrics.EVICTIONS, metrics.PAGES
    for evictions, pages in ((3, 10), (3, 4), (8, 6)):
        exporter.export(
            [metrics.Sample(counter, ("slab",), evictions), metrics.Sample(gauge, ("shared", "free"), pages)]
        )
        assert REGISTRY.get_sample_value(counter.name, {"kind": "slab"}) == evictions
        assert REGISTRY.get_sample_value(gauge.name, {"pool": "shared", "kind": "free"}) == pages


def test_a_request_is_deferred_once_until_it_is_admitted() -> None:
    class Request:
        """Anything that can be referenced weakly."""

    activity, first, second = Activity(("attention",)), Request(), Request()
    for request in (first, first, second, first):
        activity.defer(request)
    assert activity.requests.deferred == 2
    activity.admit(first, joint_tokens=0, attention_tokens=0)
    activity.defer(first)
    assert activity.requests.deferred == 3


@pytest.mark.parametrize(
    ("joint", "attention", "expected"),
    [(0, 0, (0, 0, 0, 0)), (512, 512, (1, 512, 0, 0)), (0, 1024, (0, 0, 1, 1024)), (512, 1536, (1, 512, 1, 1024))],
)
def test_a_hit_and_its_missing_part_are_counted_apart(
    joint: int, attention: int, expected: tuple[int, int, int, int]
) -> None:
    activity = Activity(())
    activity.admit(activity, joint_tokens=joint, attention_tokens=attention)
    reuse = activity.reuse
    found = reuse.joint_hits, reuse.joint_tokens, reuse.missing_checkpoint_hits, reuse.missing_checkpoint_tokens
    assert found == expected
