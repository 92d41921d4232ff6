"""Start, watch and stop one server of a comparison, as a process of its own.

The server runs in a session of its own, so a Ctrl-C meant for the benchmark does not reach it, and it is told to end if
the benchmark dies. Its output goes to a log file. SGLang is never imported here.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

_HOST = "127.0.0.1"
POLL_S = 0.5
"""Seconds between two looks at a server that is coming up."""
_PR_SET_PDEATHSIG = 1  # prctl: signal for this process when its parent dies


class ServerError(RuntimeError):
    """The server ended, or did not come up. The message ends with the last lines of its log."""


def sglang_command(model: Path, port: int, arguments: Sequence[str]) -> list[str]:
    """Return the command line of an SGLang server on this machine's loopback interface."""
    launch = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
    return [*launch, "--host", _HOST, "--port", str(port), *arguments]


def cpu_environment(dtype: str) -> dict[str, str]:
    """Return what a server on the CPU reference platform needs in its environment to compute in `dtype`.

    SGLang keeps convolution state in bfloat16 unless told otherwise, which costs a float32 model its accuracy. The
    last two variables keep values that are set. Decode steps compute with one thread: their operators on a nano
    model are shorter than it takes to wake a second one. Waiting threads sleep instead of spinning: the cores are
    shared with the load generator and SGLang's other processes, and a spinning pair of threads comes to a near stop
    when another process needs a core.
    """
    return {
        "SGLANG_PLATFORM": "sgl_hybrid_cpu",
        "SGLANG_MAMBA_CONV_DTYPE": dtype,
        "HF_HUB_OFFLINE": "1",
        "SGLANG_HYBRID_DECODE_THREADS": os.environ.get("SGLANG_HYBRID_DECODE_THREADS", "1"),
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
    }


def gpu_environment(dtype: str) -> dict[str, str]:
    """Return what a server on an NVIDIA GPU needs in its environment to keep convolution state in `dtype`."""
    return {"SGLANG_PLATFORM": "", "SGLANG_MAMBA_CONV_DTYPE": dtype, "HF_HUB_OFFLINE": "1"}


def free_port() -> int:
    """Return a loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
        return port


class ServerProcess:
    """One server. A context manager: entering starts it, leaving stops it and everything it started."""

    def __init__(self, command: Sequence[str], *, port: int, log: Path, environment: Mapping[str, str]) -> None:
        self.url = f"http://{_HOST}:{port}"
        self.log = log
        self._command = list(command)
        self._port = port
        self._environment = {**os.environ, **environment}

    def __enter__(self) -> Self:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab") as output:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def wait_ready(self, timeout_s: float, on_wait: Callable[[float], None] = lambda elapsed_s: None) -> float:
        """Wait until `/health` answers and return the seconds it took. `on_wait` is called every `POLL_S`.

        Raises: ServerError if the server ends first or is not ready within `timeout_s`.
        """
        begun = time.monotonic()
        while True:
            elapsed_s = time.monotonic() - begun
            self.check_alive()
            if self._get("/health", timeout_s=10)[0] == 200:
                return time.monotonic() - begun
            if elapsed_s > timeout_s:
                raise ServerError(f"expected the server to be ready within {timeout_s:.0f} s{self._last_lines()}")
            on_wait(elapsed_s)
            time.sleep(POLL_S)

    def check_alive(self) -> None:
        """Raise ServerError if the process has ended."""
        status = self._process.poll()
        if status is not None:
            raise ServerError(f"expected a running server, got one that ended with status {status}{self._last_lines()}")

    def info(self) -> dict[str, Any]:
        """Return what the server says about itself (`/server_info`).

        Raises: ServerError if it does not answer with a JSON object.
        """
        status, content = self._get("/server_info", timeout_s=30)
        if status != 200:
            self.check_alive()
            raise ServerError(f"expected /server_info of {self.url}, got HTTP status {status}{self._last_lines()}")
        try:
            return msgspec.json.decode(content, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise ServerError(f"expected a JSON object at /server_info of {self.url}, got: {error}") from error

    def stop(self, grace_s: float = 20.0) -> None:
        """End the server: SIGTERM to its leader, and after at most `grace_s` SIGKILL to whatever is left of it.

        A second Ctrl-C ends the wait, and nothing stays either.
        """
        try:
            if self._process.poll() is None:
                self._process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(grace_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _get(self, path: str, *, timeout_s: float) -> tuple[int, bytes]:
        """Return (status, content) of a GET; status 0 if nothing answers."""
        connection = http.client.HTTPConnection(_HOST, self._port, timeout=timeout_s)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException):
            return 0, b""
        finally:
            connection.close()

    def _last_lines(self, count: int = 12) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return f"; the last lines of {self.log}:\n" + "\n".join(f"  {line}" for line in lines[-count:])


def _end_with_parent() -> None:
    """Ask the kernel to send this process SIGTERM when its parent dies. Runs in the child before the server."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
