"""Real servers on nano models, started when a test first asks for one and shared by all tests after it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import requests

from bench.nano import write_model

SERVERS: dict[str, tuple[str, dict[str, str], list[str]]] = {
    "falcon-h1-nano": (
        "falcon-h1-nano",
        {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "2"},
        [
            "--memory-org",
            "d0",
            "--memory-budget",
            "b63",
            "--chunked-prefill-size",
            "1024",
            "--enable-metrics",
            "--enable-cache-report",
        ],
    ),
    "granite-h-nano": ("granite-h-nano", {}, ["--memory-org", "d0", "--memory-budget", "b160"]),
    "falcon-h1-nano-bf16": (
        "falcon-h1-nano",
        {},
        ["--dtype", "bfloat16", "--mamba-ssm-dtype", "bfloat16", "--memory-org", "d0", "--memory-budget", "b63"],
    ),
    "falcon-h1-nano-tiny": (
        "falcon-h1-nano",
        {},
        # Attention for one context and little more, and states for eight requests: attention runs out first.
        [
            "--memory-org",
            "d0",
            "--memory-budget",
            "34MiB",
            "--d0-attention-fraction",
            "0.15",
            "--schedule-conservativeness",
            "0.01",
        ],
    ),
}
"""Name of a server -> model, environment and arguments beyond the common ones."""


class Server(NamedTuple):
    """A running server: its address, its process (the leader of a session of its own) and its log."""

    url: str
    process: subprocess.Popen
    log: Path


@pytest.fixture(scope="session")
def nano_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of the nano models, by name."""
    root = tmp_path_factory.mktemp("models")
    names = sorted({model for model, _, _ in SERVERS.values()})
    for name in names:
        write_model(name, root / name, seed=0)
    return {name: root / name for name in names}


@pytest.fixture(scope="session")
def servers(
    nano_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Server]]:
    """Start (once) and return the server of a name. A server whose log has a traceback at the end fails the session."""
    running: dict[str, Server] = {}

    def get(name: str) -> Server:
        if name not in running:
            model, environment, arguments = SERVERS[name]
            log = tmp_path_factory.mktemp("logs") / f"{name}.log"
            running[name] = start(nano_models[model], environment, arguments, log)
        return running[name]

    yield get
    for server in running.values():
        os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait()
    faulty = {name: server.log for name, server in running.items() if "Traceback" in server.log.read_text()}
    assert not faulty, f"expected servers without a traceback, got {faulty}"


def start(model: Path, environment: dict[str, str], arguments: list[str], log: Path) -> Server:
    """Start a server on a free port and wait until it is healthy."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--device", "cpu"]
    command += ["--port", str(port), *arguments]
    environment = {**os.environ, "SGLANG_PLATFORM": "sgl_hybrid_cpu", "HF_HUB_OFFLINE": "1", **environment}
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-2000:]
        try:
            if requests.get(f"{url}/health", timeout=30).status_code == 200:
                return Server(url, process, log)
        except requests.ConnectionError:
            pass
        time.sleep(0.5)
    raise AssertionError(f"expected a healthy server within 240 s: {log.read_text()[-2000:]}")
