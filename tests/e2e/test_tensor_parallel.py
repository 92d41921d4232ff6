"""Two ranks on a CPU: the model's heads are divided, and every rank decides the same.

The nano model has one KV head, which SGLang 0.5.23 cannot load on two ranks of a CPU. With that head twice it computes
the same function and each rank gets one, so the answers are those of the undivided model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.server import ServerProcess, cpu_environment, free_port, sglang_command
from tests.e2e import client, reference

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

MODEL = "falcon-h1-nano"
TOLERANCE = 2e-5


def with_two_kv_heads(model: Path, folder: Path) -> Path:
    """Write the model with its KV head twice."""
    shutil.copytree(model, folder)
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 2}))
    weights = load_file(model / "model.safetensors")
    for name, tensor in weights.items():
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            weights[name] = torch.cat([tensor, tensor])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def server(nano_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of two ranks on a small budget. SGLang compares what the ranks ask the tree and what it answers."""
    folder = tmp_path_factory.mktemp("tp")
    model, port = with_two_kv_heads(nano_models[MODEL], folder / "model"), free_port()
    arguments = ["--device", "cpu", "--dtype", "float32", "--sleep-on-idle", "--tp-size", "2"]
    arguments += ["--memory-org", "s2", "--memory-budget", "16MiB", "--chunked-prefill-size", "1024"]
    environment = cpu_environment("float32") | {
        "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
        "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1",
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    }
    command = sglang_command(model, port, arguments)
    with ServerProcess(command, port=port, log=folder / "tp.log", environment=environment) as running:
        running.wait_ready(480)
        yield running
        log = running.log.read_text()
    assert "Traceback" not in log


def test_each_rank_has_its_share_of_the_states(server: ServerProcess) -> None:
    """12 of 24 SSM heads and one of two KV heads: half the state, two members where the undivided model has three."""
    found = client.memory(server.url)
    assert (found["ssm_bytes_per_layer"], found["kv_token_bytes_per_layer"]) == (12 * 32 * 128 * 4, 2 * 32 * 4)
    assert found["members"] == 2


def test_two_ranks_answer_as_the_undivided_model(server: ServerProcess, nano_models: dict[str, Path]) -> None:
    client.flush(server.url)
    prompts = [client.random_prompt(length, seed=length) for length in (5, 63, 129, 512, 513, 1500)]
    answers = client.generate(server.url, prompts, logprob_start_len=0)
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = reference.log_probabilities(nano_models[MODEL], "float32", prompt + answer["output_ids"])
        agreement = reference.compare(expected, prompt, answer)
        assert agreement.tokens_equal, f"{len(prompt)} tokens"
        assert agreement.error <= TOLERANCE, f"{len(prompt)} tokens"
    client.assert_nothing_held(server.url)


def test_the_ranks_reuse_and_evict_the_same(server: ServerProcess, nano_models: dict[str, Path]) -> None:
    """Six contexts twice, then six others twice, in 64 pages: states are found again and evicted, no token differs."""
    client.flush(server.url)
    contexts = [client.random_prompt(1600, seed=80 + index) for index in range(12)]
    order = [*range(6), *range(6), *range(6, 12), *range(6, 12)]
    prompts = [contexts[index] + client.random_prompt(60, seed=100 + turn) for turn, index in enumerate(order)]
    answers = [found for start in range(0, 24, 6) for found in client.generate(server.url, prompts[start : start + 6])]
    for prompt, answer in zip(prompts, answers, strict=True):
        output = answer["output_ids"]
        scores = reference.log_probabilities(nano_models[MODEL], "float32", prompt + output)
        assert scores[len(prompt) - 1 : -1].argmax(dim=-1).tolist() == output
    found = client.memory(server.url)
    assert found["reuse"]["joint_hits"] > 0
    assert found["evicted"]["checkpoints"] > 0
    client.assert_nothing_held(server.url)
