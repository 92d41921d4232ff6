"""Real servers on nano models, started when a test first asks for one and shared by all tests after it.

A server takes 2.5 GB even when it waits. So the tests are put in the order of their servers, and each worker keeps
only the last few.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from bench.nano import write_model
from bench.server import ServerProcess, cpu_environment, free_port, sglang_command

READY_TIMEOUT_S = 240.0
MAX_SERVERS = 2


class Setup(NamedTuple):
    """What one server is started with beyond the common arguments."""

    model: str
    arguments: str
    environment: tuple[tuple[str, str], ...] = ()
    dtype: str = "float32"


POLICIES = (
    "--checkpoint-lifetime retained --preempt-pin-k 1 --protection-budget 0.5 --checkpoint-eviction value "
    "--schedule-conservativeness 0.01 --enable-metrics --enable-cache-report"
)
"""Flags of the policies beyond headroom, and what lets SGLang admit more than fits."""

OVERCOMMIT = "--schedule-conservativeness 0.01 --admission-headroom 0"
"""SGLang expects hardly any output of running requests, so it lets in more than fits and takes some back."""

SETUPS: dict[str, Setup] = {
    "d0": Setup(
        "falcon-h1-nano",
        "--memory-org d0 --memory-budget b63 --chunked-prefill-size 1024 --enable-metrics --enable-cache-report",
        (("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY", "1"),),
    ),
    "s0": Setup("falcon-h1-nano", "--memory-org s0 --memory-budget b63 --checkpoint-placement all"),
    # Beside the default, what a user may turn off or on.
    "s1": Setup(
        "falcon-h1-nano", "--memory-org s1 --memory-budget b63 --no-exact-continuation --enable-session-radix-cache"
    ),
    "s2": Setup(
        "falcon-h1-nano",
        "--memory-org s2 --memory-budget b63 --chunked-prefill-size 1024 --enable-metrics --enable-cache-report",
        (("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY", "1"), ("SGLANG_HYBRID_POISON_FREED", "1")),
    ),
    "s2-mixed": Setup(
        "falcon-h1-nano",
        "--memory-org s2 --memory-budget b63 --chunked-prefill-size 512 "
        "--enable-mixed-chunk --disable-overlap-schedule",
        (("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY", "1"), ("SGLANG_HYBRID_POISON_FREED", "1")),
    ),
    "granite-d0": Setup("granite-h-nano", "--memory-org d0 --memory-budget b160"),
    "granite-s2": Setup("granite-h-nano", "--memory-org s2 --memory-budget b160"),
    "s2-bf16": Setup(
        "falcon-h1-nano", "--mamba-ssm-dtype bfloat16 --memory-org s2 --memory-budget b63", dtype="bfloat16"
    ),
    # Little more than one context of attention, and states for more requests than that: attention runs out first.
    "d0-tiny": Setup(
        "falcon-h1-nano", f"--memory-org d0 --memory-budget 34MiB --d0-attention-fraction 0.15 {OVERCOMMIT}"
    ),
    "s0-tiny": Setup("falcon-h1-nano", f"--memory-org s0 --memory-budget b24 {OVERCOMMIT}"),
    "s1-tiny": Setup("falcon-h1-nano", f"--memory-org s1 --memory-budget b24 {OVERCOMMIT}"),
    "s2-tiny": Setup(
        "falcon-h1-nano", f"--memory-org s2 --memory-budget b17 {OVERCOMMIT}", (("SGLANG_HYBRID_POISON_FREED", "1"),)
    ),
    "granite-d0-tiny": Setup(
        "granite-h-nano", f"--memory-org d0 --memory-budget 20MiB --d0-attention-fraction 0.23 {OVERCOMMIT}"
    ),
    "granite-s0-tiny": Setup("granite-h-nano", f"--memory-org s0 --memory-budget b24 {OVERCOMMIT}"),
    "granite-s1-tiny": Setup("granite-h-nano", f"--memory-org s1 --memory-budget b24 {OVERCOMMIT}"),
    "granite-s2-tiny": Setup(
        "granite-h-nano", f"--memory-org s2 --memory-budget b24 {OVERCOMMIT}", (("SGLANG_HYBRID_POISON_FREED", "1"),)
    ),
    "stock": Setup("falcon-h1-nano", "--page-size 16 --max-total-tokens 65536 --max-mamba-cache-size 120"),
    "granite-stock": Setup("granite-h-nano", "--page-size 16 --max-total-tokens 65536 --max-mamba-cache-size 120"),
    # Every policy at once, on pools that a few requests outgrow.
    "d0-policies": Setup(
        "falcon-h1-nano",
        "--memory-org d0 --memory-budget 34MiB --d0-attention-fraction 0.15 --checkpoint-interval 512 "
        f"--admission-headroom 0.02 {POLICIES}",
    ),
    "s2-policies": Setup(
        "falcon-h1-nano",
        f"--memory-org s2 --memory-budget b12 --admission-headroom 0.1 {POLICIES}",
        (("SGLANG_HYBRID_POISON_FREED", "1"),),
    ),
}
"""Name of a server -> model, arguments and environment beyond the common ones, dtype."""

CHECKS = {"SGLANG_HYBRID_DEBUG_CHECKPOINTS": "1"}
"""Every server hashes its checkpoints and ends when one changes."""

GRIDS = {"d0": 1792, "s0": 512, "s1": 512, "s2": 512}
"""Tokens between two boundaries, by organization."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests with the same server, named by a parameter or the mark `server`, beside each other and into one group
    of pytest-xdist, so that each server has one worker. A test that starts its own is a group by itself."""
    first: dict[str, int] = {}

    def place(item: pytest.Item) -> int:
        mark, parameters = item.get_closest_marker("server"), getattr(item, "callspec", None)
        named = list(mark.args) if mark else []
        named += [value for value in parameters.params.values() if value in list(SETUPS)] if parameters else []
        shared = "servers" in getattr(item, "fixturenames", ())
        name = named[0] if named else item.path.name if shared else item.nodeid
        item.add_marker(pytest.mark.xdist_group(name))
        return first.setdefault(name, len(first))

    items.sort(key=place)


@pytest.fixture(scope="session")
def nano_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of the nano models, by name."""
    root = tmp_path_factory.mktemp("models")
    names = sorted({setup.model for setup in SETUPS.values()})
    for name in names:
        write_model(name, root / name, seed=0)
    return {name: root / name for name in names}


@pytest.fixture(scope="session")
def servers(
    nano_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], ServerProcess]]:
    """Start and return the server of a name. At the end no server's log may hold a traceback."""
    running: dict[str, ServerProcess] = {}
    folder = tmp_path_factory.mktemp("logs")

    faulty: list[Path] = []

    def stop(name: str) -> None:
        server = running.pop(name)
        if "Traceback" in server.log.read_text():
            faulty.append(server.log)
        server.stop(1.0)

    def get(name: str) -> ServerProcess:
        if name in running:
            running[name] = running.pop(name)
            return running[name]
        while len(running) >= MAX_SERVERS:
            stop(next(iter(running)))
        setup = SETUPS[name]
        port = free_port()
        arguments = ["--device", "cpu", "--dtype", setup.dtype, "--sleep-on-idle", *setup.arguments.split()]
        server = ServerProcess(
            sglang_command(nano_models[setup.model], port, arguments),
            port=port,
            log=folder / f"{name}-{port}.log",
            environment={**cpu_environment(setup.dtype), **CHECKS, **dict(setup.environment)},
        )
        running[name] = server.__enter__()
        server.wait_ready(READY_TIMEOUT_S)
        return server

    yield get
    while running:
        stop(next(iter(running)))
    assert not faulty, f"expected servers without a traceback, got {faulty}"
