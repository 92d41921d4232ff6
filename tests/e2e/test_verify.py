"""`bench verify` on the shared servers: found equals recomputed, bit for bit where one request runs at a time."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from bench.cli import main
from bench.verify.compare import Verdict
from bench.verify.records import VerifyResult
from tests.e2e import client

pytestmark = pytest.mark.e2e

ALONE = ("warm", "decode boundary", "restore")
NAMES = ("d0", "s0", "s2", "s2-bf16")


@pytest.mark.parametrize("name", NAMES)
def test_what_is_found_equals_what_is_computed(servers, tmp_path: Path, name: str) -> None:
    """One prompt that ends a few tokens behind its third boundary (D0's second), from each boundary before its end."""
    server = servers(name)
    grid = client.memory(server.url)["checkpoint_interval"]
    num_boundaries = 2 if name == "d0" else 3
    prompts, file = tmp_path / "prompts.jsonl", tmp_path / "result.json"
    prompts.write_text(json.dumps({"prompt_ids": client.random_prompt(num_boundaries * grid + 37, seed=91)}))
    paths = [option for path in ALONE for option in ("--only", path)]
    options = ["--quick", "--prompts", str(prompts), "--restores", "4", "--out", str(file)]
    status = main(["verify", "--url", server.url, *options, *paths])
    [arm] = msgspec.json.decode(file.read_bytes(), type=VerifyResult).arms
    assert {path.path: path.verdict for path in arm.paths} == dict.fromkeys(ALONE, Verdict.EQUAL)
    assert sum(path.counts["not exercised"] for path in arm.paths) == 0
    assert arm.paths[0].counts["equal"] == num_boundaries
    assert status == 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["d0", "s2"])
def test_500_prompts_in_batches_have_the_bits_of_lone_ones(servers, tmp_path: Path, name: str) -> None:
    file = tmp_path / "result.json"
    options = ["--quick", "--concurrent", "500", "--only", "concurrent", "--out", str(file)]
    assert main(["verify", "--url", servers(name).url, *options]) == 0
    [arm] = msgspec.json.decode(file.read_bytes(), type=VerifyResult).arms
    compared = [finding for finding in arm.findings if finding.path == "concurrent"]
    assert len(compared) == 2 * 500
    assert sum(bool(finding.cached_tokens) for finding in compared) > 500
    assert {finding.verdict for finding in arm.findings} == {Verdict.EQUAL}
