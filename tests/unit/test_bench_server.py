"""Servers as processes: started, awaited, asked, stopped with all they started, and their deaths explained."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench.cli import main
from bench.demo import DemoSettings, check_organization, organization_table, server_arguments
from bench.server import ServerError, ServerProcess, cpu_environment, free_port, sglang_command


def stand_in(folder: Path, *flags: str) -> ServerProcess:
    port = free_port()
    command = [sys.executable, "-m", "tests.unit.fake_server", "--port", str(port), *flags]
    return ServerProcess(command, port=port, log=folder / "logs" / "server.log", environment={"FAKE": "1"})


def is_running(pid: int) -> bool:
    """Return whether the process exists and is not merely waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(holds: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Wait until a condition holds, and fail if it does not within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_server_is_started_awaited_asked_and_stopped(tmp_path: Path) -> None:
    waits: list[float] = []
    with stand_in(tmp_path) as server:
        assert server.wait_ready(30, waits.append) < 30
        assert server.info()["version"] == "0.0"
        pid = server._process.pid
        assert is_running(pid)
    assert not is_running(pid)
    assert waits == sorted(waits)
    assert "fake server starting" in server.log.read_text()


def test_stopping_ends_the_whole_process_group(tmp_path: Path) -> None:
    child = tmp_path / "child"
    with stand_in(tmp_path, "--child", str(child)) as server:
        server.wait_ready(30)
        pid = int(child.read_text())
        assert is_running(pid)
    wait_for(lambda: not is_running(pid))


def test_a_server_that_ends_at_start_is_reported_with_its_last_lines(tmp_path: Path) -> None:
    server = stand_in(tmp_path, "--fail")
    with pytest.raises(ServerError) as caught, server:
        server.wait_ready(30)
    message = str(caught.value)
    assert message.startswith("expected a running server, got one that ended with status 2; the last lines of ")
    assert message.endswith("error: expected a budget above 0 bytes, got 0 bytes")


def test_a_server_killed_later_is_noticed(tmp_path: Path) -> None:
    with stand_in(tmp_path) as server:
        server.wait_ready(30)
        server.check_alive()
        os.kill(server._process.pid, signal.SIGKILL)
        server._process.wait()
        with pytest.raises(ServerError, match="ended with status -9"):
            server.info()


def test_a_server_that_never_gets_ready_is_given_up(tmp_path: Path) -> None:
    sleeper = ServerProcess(
        [sys.executable, "-c", "import signal; signal.pause()"], port=free_port(), log=tmp_path / "log", environment={}
    )
    with pytest.raises(ServerError, match="expected the server to be ready within 0 s"), sleeper:
        sleeper.wait_ready(0.1)
    assert not is_running(sleeper._process.pid)


def test_an_error_inside_the_block_still_stops_the_server(tmp_path: Path) -> None:
    def interrupted() -> None:
        with server:
            server.wait_ready(30)
            raise KeyboardInterrupt

    server = stand_in(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not is_running(server._process.pid)


def test_a_second_interrupt_ends_the_wait_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """A leader that does not heed SIGTERM, and what it started."""
    child = tmp_path / "child"
    program = (
        "import pathlib, signal, subprocess, sys\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
        f"pathlib.Path({str(child)!r}).write_text(str(child.pid))\n"
        "while True: signal.pause()"
    )
    server = ServerProcess([sys.executable, "-c", program], port=free_port(), log=tmp_path / "log", environment={})

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        server.__enter__()
        wait_for(lambda: child.exists() and child.read_text() != "")
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            server.stop()
    finally:
        signal.signal(signal.SIGALRM, before)
    pid = int(child.read_text())
    wait_for(lambda: not is_running(pid))
    assert not is_running(server._process.pid)


def test_the_command_and_environment_of_a_cpu_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = sglang_command(tmp_path / "m", 3000, server_arguments(DemoSettings(organization="d0", budget="b83")))
    assert command[1:3] == ["-m", "sglang.launch_server"]
    given = dict(pairwise(command))
    assert given["--memory-org"] == "d0"
    assert given["--memory-budget"] == "b83"
    assert given["--device"] == "cpu"
    assert given["--port"] == "3000"
    assert given["--max-running-requests"] == "63"
    assert cpu_environment("float32")["SGLANG_MAMBA_CONV_DTYPE"] == "float32"
    assert cpu_environment("float32")["SGLANG_PLATFORM"] == "sgl_hybrid_cpu"
    for name, default, other in (
        ("OMP_WAIT_POLICY", "PASSIVE", "ACTIVE"),
        ("SGLANG_HYBRID_DECODE_THREADS", "1", "2"),
    ):
        monkeypatch.delenv(name, raising=False)
        assert cpu_environment("float32")[name] == default
        monkeypatch.setenv(name, other)
        assert cpu_environment("float32")[name] == other


REPORT: dict[str, Any] = {
    "organization": "d0",
    "units": {"budget": "b63"},
    "pools": {
        "attention": {"total": 3256, "free": 256, "cached": 3000, "held": 0},
        "recurrent": {"total": 30, "free": 2, "cached": 28, "held": 0},
    },
    "counters": {
        "stranded_byte_fraction": 0.125,
        "checks": {"attention": {"granted": 9, "deferred": 4}, "recurrent": {"granted": 7, "deferred": 1234}},
    },
}


def test_another_organization_than_asked_for_is_an_error() -> None:
    assert check_organization({"internal_states": [{"memory_organization": REPORT}]}, "d0") == REPORT
    with pytest.raises(ServerError, match="expected a server with memory organization s2, got d0"):
        check_organization({"internal_states": [{"memory_organization": REPORT}]}, "s2")
    for stock in ({}, {"internal_states": []}, {"internal_states": [{}]}):
        with pytest.raises(ServerError, match="expected a server with memory organization d0, got None"):
            check_organization(stock, "d0")


def test_the_organization_table_shows_pools_and_checks(tmp_path: Path) -> None:
    with open(tmp_path / "out", "w") as sink:
        console = Console(width=120, record=True, file=sink)
        console.print(organization_table(REPORT))
    text = console.export_text()
    for part in ("d0 at b63: stranded bytes 12.50 %", "attention", "3,256", "3,000", "recurrent", "1,234", "deferred"):
        assert part in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--org", "s9"], "expected a memory organization of s0, s1, s2, d0, got 's9'"),
        (["--requests", "0"], "expected at least 1 request, got 0"),
        (["--q", "-1"], "expected a common-prefix fraction q of 0 to 1, got -1.0"),
        (["--rate", "0"], "expected a rate above 0 requests/s, got 0.0 requests/s"),
        (
            ["--model", "llama"],
            "expected a model out of falcon-h1-nano, falcon-h1-pico, granite-h-nano, got 'llama'; "
            "nearest: granite-h-nano",
        ),
    ],
)
def test_demo_mistakes_are_one_line_before_anything_starts(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["demo", *flags]) == 2
    assert capsys.readouterr().err == f"error: {message}\n"
    assert not (tmp_path / "run").exists()
