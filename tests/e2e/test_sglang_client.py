"""SGLang's own benchmark client against every arm that SGLang serves: its numbers are ours on the same requests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.arm_plan import Policy, Serving, plan_arm
from bench.arms import ARMS, Arm
from bench.metrics.measure import measure
from bench.server import ServerProcess, cpu_environment, free_port, sglang_command
from tests.e2e.conftest import READY_TIMEOUT_S
from tests.e2e.recording_proxy import RecordingProxy

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

GROUPS, PER_GROUP = 4, 6
COMMON_TOKENS, QUESTION_TOKENS, OUTPUT_TOKENS = 1900, 64, 24


@contextmanager
def serve(arm: Arm, model: Path, folder: Path) -> Iterator[ServerProcess]:
    """Serve an arm at the main budget and cap, with answers that repeat their text, as SGLang streams by default."""
    plan, port = plan_arm(arm, "b63", Serving(model=model), Policy(cap=63)), free_port()
    flags = ["--device", "cpu", "--dtype", "float32", "--sleep-on-idle", "--max-running-requests", "63", *plan.flags]
    command, environment = sglang_command(model, port, flags), cpu_environment("float32")
    with ServerProcess(command, port=port, log=folder / "server.log", environment=environment) as server:
        server.wait_ready(READY_TIMEOUT_S)
        yield server
    assert "Traceback" not in server.log.read_text()


@pytest.mark.parametrize("name", [arm.name for arm in ARMS.values() if arm.engine == "sglang"])
def test_sglangs_client_and_ours_agree(nano_models: dict[str, Path], tmp_path: Path, name: str) -> None:
    """Requests that share 1,900 tokens in groups pass through a proxy that measures them as the load generator does.

    Counts are equal. Times are of two observers of one run, a local hop apart, so throughput and mean latencies agree
    within a few percent whatever else the machine does.
    """
    model, output = nano_models["falcon-h1-nano"], tmp_path / "sglang.jsonl"
    with serve(ARMS[name], model, tmp_path) as server, RecordingProxy(server.url) as proxy:
        command = [
            *(sys.executable, "-m", "sglang.benchmark.serving", "--backend", "sglang"),
            *("--host", "127.0.0.1", "--port", str(proxy.port), "--model", str(model), "--tokenizer", str(model)),
            *("--dataset-name", "generated-shared-prefix", "--tokenize-prompt", "--seed", "1"),
            *("--gsp-num-groups", str(GROUPS), "--gsp-prompts-per-group", str(PER_GROUP)),
            *("--gsp-system-prompt-len", str(COMMON_TOKENS), "--gsp-question-len", str(QUESTION_TOKENS)),
            *("--gsp-output-len", str(OUTPUT_TOKENS), "--request-rate", "4", "--warmup-requests", "0"),
            *("--output-file", str(output), "--disable-tqdm"),
        ]
        environment = {**os.environ, **cpu_environment("float32")}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        records = list(proxy.records)
    [theirs] = [json.loads(line) for line in output.read_text().splitlines()]
    ours = measure(records)
    assert theirs["completed"] == len(records) == GROUPS * PER_GROUP
    assert theirs["total_output_tokens"] == sum(record.output_tokens for record in records)
    assert theirs["total_input_tokens"] == sum(record.prompt_tokens for record in records)
    assert theirs["output_throughput"] == pytest.approx(ours["output_tokens_per_s"], rel=0.05)
    assert theirs["request_throughput"] == pytest.approx(ours["requests_per_s"], rel=0.05)
    for theirs_name, ours_name in (
        ("median_ttft_ms", "ttft_p50_ms"),
        ("p99_ttft_ms", "ttft_p99_ms"),
        ("median_tpot_ms", "tpot_p50_ms"),
        ("median_e2e_latency_ms", "e2e_p50_ms"),
    ):
        assert theirs[theirs_name] == pytest.approx(ours[ours_name], rel=0.05, abs=25.0), theirs_name
    # What the load is for: after the first of its group a request finds a state below its 1,900 common tokens. SGLang's
    # own arms find fewer: 4 or 5 of its 30 slots are taken by each running request, and with memory to spare too many
    # requests of this burst found 0 to 896 tokens and 6 of 24 as many as this.
    cached = [record.cached_tokens or 0 for record in records]
    least = GROUPS * (PER_GROUP - 3) if ARMS[name].organization is not None else 1
    assert sum(count >= 1536 for count in cached) >= least, f"cached tokens in order of arrival: {cached}"
