"""A running server says what it serves: one log line, `/server_info`, Prometheus."""

from __future__ import annotations

import itertools
import json
import time

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from sgl_hybrid import metrics
from tests.e2e import client
from tests.e2e.conftest import GRIDS

pytestmark = pytest.mark.e2e


@pytest.mark.server("d0")
def test_server_info_and_log_name_the_organization_and_its_units(servers) -> None:
    server = servers("d0")
    found = client.memory(server.url)
    assert found["organization"] == "d0"
    assert (found["page_tokens"], found["checkpoint_interval"]) == (16, 1792)
    assert found["units"]["attention_pages"] == found["pools"]["attention"]["total"] == 3256
    assert found["units"]["checkpoints"] == found["pools"]["recurrent"]["total"] == 30
    # 256 B of KV per token and layer; 24 heads x 32 x 128 of SSM and 1,280 conv elements in float32; two layers.
    assert found["kv_token_bytes_per_layer"] == 256
    assert found["ssm_bytes_per_layer"] == 393216
    assert found["conv_bytes_per_layer"] == 5120
    assert found["units"]["total_bytes"] == 2 * (3256 * 16 * 256 + 30 * (393216 + 5120))
    lines = [line for line in server.log.read_text().splitlines() if "sgl_hybrid memory organization" in line]
    assert len(lines) == 1
    logged = json.loads(lines[0].split("organization: ", 1)[1])
    assert logged == {name: value for name, value in found.items() if name in logged}


@pytest.mark.server("d0")
def test_prometheus_has_the_organization_and_its_counters(servers) -> None:
    server = servers("d0")
    client.generate(server.url, client.random_prompt(50, seed=1))
    text = requests.get(f"{server.url}/metrics", timeout=client.TIMEOUT_S).text
    info = [line for line in text.splitlines() if line.startswith("sgl_hybrid:memory_organization_info")]
    assert len(info) == 1
    assert 'organization="d0"' in info[0]
    assert 'attention_pages="3256"' in info[0]
    assert info[0].endswith(" 1.0")
    granted = [line for line in text.splitlines() if line.startswith("sgl_hybrid:pool_checks") and '"granted"' in line]
    assert {line.split('pool="')[1].split('"')[0] for line in granted} == {"attention", "recurrent"}
    assert all(float(line.split()[-1]) > 0 for line in granted)
    assert "sgl_hybrid:stranded_byte_fraction" in text


@pytest.mark.server("d0")
def test_cached_tokens_agree_with_the_servers_counter(servers) -> None:
    """Fault B51: hits reported per request and SGLang's own counter of cached tokens tell the same."""
    server = servers("d0")
    client.flush(server.url)

    def counter() -> float:
        text = requests.get(f"{server.url}/metrics", timeout=client.TIMEOUT_S).text
        lines = [line for line in text.splitlines() if line.startswith("sglang:cached_tokens_total{")]
        return sum(float(line.split()[-1]) for line in lines)

    before = counter()
    prompt = client.random_prompt(2000, seed=21)
    reported = sum(client.generate(server.url, prompt)["meta_info"]["cached_tokens"] for _ in range(3))
    assert reported == 2 * 1792
    assert counter() - before == reported


@pytest.mark.server("s2")
def test_a_shared_pool_reports_its_pages_checkpoints_and_slabs(servers) -> None:
    server = servers("s2")
    client.flush(server.url)
    prompt = client.random_prompt(2100, seed=41)
    client.generate(server.url, prompt)
    client.generate(server.url, prompt)
    found = client.memory(server.url)
    assert (found["organization"], found["members"]) == ("s2", 3)
    assert found["units"]["pages"] == found["pools"]["shared"]["total"] == 193
    assert "stranded_byte_fraction" not in found["counters"]
    # The last boundary before the prompt's end, 2,048, is kept, whatever the chunks: one checkpoint, four blocks.
    assert found["checkpoints"]["cached"] == found["slabs"]["live_slots"] == found["slabs"]["cached_slots"] == 1
    assert found["slabs"]["slabs"] == found["pages"]["shared"]["slab"] == 1
    assert found["pages"]["shared"] == {"attention": 4, "member": 3, "conv": 0, "slab": 1, "free": 193 - 8}
    assert found["pools"]["shared"]["cached"] == 3 + 1 + 4
    assert found["pools"]["shared"]["held"] == 0


def delta(before: dict, after: dict, field: str) -> dict[str, int]:
    return {name: after[field][name] - before[field][name] for name in after[field]}


@pytest.mark.parametrize("name", ["d0", "s2"])
def test_reuse_and_copies_are_counted(servers, name: str) -> None:
    """Fault B51, and what is copied: a hit reads one state and writes one, whether or not it then decodes across a
    boundary."""
    server, grid = servers(name), GRIDS[name]
    client.flush(server.url)
    prompt = client.random_prompt(2 * grid - 8, seed=51)
    client.generate(server.url, prompt)
    infos, reported = [client.memory(server.url)], []
    for new_tokens in (4, 24):
        answer = client.generate(server.url, prompt, max_new_tokens=new_tokens)
        reported.append(answer["meta_info"]["cached_tokens"])
        infos.append(client.memory(server.url))
    assert reported == [grid, grid]
    state_bytes = 2 * (infos[0]["ssm_bytes_per_layer"] + infos[0]["conv_bytes_per_layer"])
    for before, after in itertools.pairwise(infos):
        assert delta(before, after, "reuse") == {
            "joint_hits": 1,
            "joint_tokens": grid,
            "missing_checkpoint_hits": 0,
            "missing_checkpoint_tokens": 0,
        }
    crossing = delta(infos[1], infos[2], "copied_bytes")
    assert crossing == delta(infos[0], infos[1], "copied_bytes")
    assert crossing["prefill_gather"] >= state_bytes
    assert crossing["slab_migration"] == 0


@pytest.mark.server("s2")
def test_prometheus_shows_the_numbers_of_server_info(servers) -> None:
    """Fault B3: pages by kind add up to the pool; an idle server sets them once a second."""
    server = servers("s2")
    client.generate(server.url, client.random_prompt(600, seed=52))
    found = client.memory(server.url)
    expected = {
        (metric.name, frozenset(zip(metric.labels, labels, strict=True))): value
        for metric, labels, value in metrics.samples(found)
    }

    def shown() -> dict[tuple[str, frozenset], float]:
        text = requests.get(f"{server.url}/metrics", timeout=client.TIMEOUT_S).text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        ours = [sample for sample in samples if sample.name.startswith("sgl_hybrid:")]
        return {(sample.name, frozenset(sample.labels.items())): sample.value for sample in ours}

    deadline = time.monotonic() + 10
    while shown() != expected and time.monotonic() < deadline:
        time.sleep(0.2)
    assert shown() == expected
    assert sum(found["pages"]["shared"].values()) == found["units"]["pages"]
