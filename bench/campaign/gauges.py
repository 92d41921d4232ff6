"""The poller: one sample a second of what a server says about itself while a load runs.

    gauges.jsonl   one `GaugeSample` a line: running, waiting, token counters, preemptions, units of every pool
    slabs.jsonl    one dump a line, where the organization has slabs: `at_ns` and the server's `slabs` as it gives them

A sample's time is when its answers were in. A sample that the server does not answer in time is left out, so gaps show;
the poller never waits for the load nor the load for it. Source of the names: SGLang 0.5.23, `entrypoints/v1_loads.py`,
`observability/metrics_collector.py`; vLLM 0.32, `v1/metrics/loggers.py`.
"""

from __future__ import annotations

import contextlib
import http.client
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from bench.campaign.host import host_ms
from bench.samples import GaugeSample

PERIOD_S = 1.0
TIMEOUT_S = 10.0
UNANSWERED = (OSError, http.client.HTTPException, ValueError, LookupError, TypeError)
"""No answer, or one of another shape than expected: the sample is left out."""


class Snapshot(msgspec.Struct, frozen=True):
    """What a server said at one moment, before it has a time."""

    sample: dict[str, Any]
    slabs: dict[str, Any] | None = None


DECODED, FIRST_TOKENS = "sglang:realtime_tokens_total/decode", "sglang:time_to_first_token_seconds_count"
"""SGLang counts what decode steps generate; a request's first token comes from its prefill, and is one TTFT.

A request that was taken back gets one more token from a prefill, which is in neither.
"""

Reader = Callable[[str], Snapshot]


class _InternalState(msgspec.Struct):
    memory_organization: dict[str, Any] | None = None


class _ServerInfo(msgspec.Struct):
    internal_states: list[_InternalState] = []


class _Load(msgspec.Struct):
    num_running_reqs: float
    num_waiting_reqs: float


class _Loads(msgspec.Struct):
    loads: list[_Load]


def read_sglang(url: str) -> Snapshot:
    """Ask an SGLang server. Raises: OSError or ValueError if it does not answer as expected."""
    loads = msgspec.json.decode(_get(url, "/v1/loads?include=core"), type=_Loads).loads
    totals = _totals(_get(url, "/metrics").decode())
    info = msgspec.json.decode(_get(url, "/server_info"), type=_ServerInfo)
    memory = next((state.memory_organization for state in info.internal_states if state.memory_organization), None)
    sample: dict[str, Any] = {
        "running": sum(load.num_running_reqs for load in loads),
        "waiting": sum(load.num_waiting_reqs for load in loads),
        "input_tokens": totals.get("sglang:realtime_tokens_total/prefill_compute"),
        "output_tokens": _sum(totals, DECODED, FIRST_TOKENS),
        "steps": ((memory or {}).get("work") or {}).get("records"),  # this project's arms count their batches
        "preemptions": totals.get("sglang:num_retracted_requests_total"),
        "other": {
            **{name: totals[name] for name in ("sglang:full_token_usage", "sglang:mamba_usage") if name in totals},
            **numbers(memory or {}),
        },
    }
    return Snapshot(sample, (memory or {}).get("slabs"))


def read_vllm(url: str) -> Snapshot:
    """Ask a vLLM server. Raises: as `read_sglang`.

    Its prompt tokens less its prefix cache hits are no count: a hit is noted at every try to schedule a request, its
    prompt when the prefill ends.
    """
    totals = _totals(_get(url, "/metrics").decode())
    return Snapshot(
        {
            "running": totals.get("vllm:num_requests_running"),
            "waiting": totals.get("vllm:num_requests_waiting"),
            "input_tokens": totals.get("vllm:prompt_tokens_by_source_total/local_compute"),
            "output_tokens": totals.get("vllm:generation_tokens_total"),
            "preemptions": totals.get("vllm:num_preemptions_total"),
            "other": {name: totals[name] for name in ("vllm:kv_cache_usage_perc",) if name in totals},
        }
    )


READERS: dict[str, Reader] = {"sglang": read_sglang, "vllm": read_vllm}


def numbers(nested: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers of a nested report under dotted names; texts and lists are left out."""
    found: dict[str, float] = {}
    for key, value in nested.items():
        if isinstance(value, dict):
            found |= numbers(value, f"{prefix}{key}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[f"{prefix}{key}"] = float(value)
    return found


@contextlib.contextmanager
def polling(read: Reader, url: str, folder: Path, start_ns: int, period_s: float = PERIOD_S) -> Iterator[None]:
    """Poll `url` every `period_s` until left, into `folder`. `start_ns`: the run's zero on the monotonic clock."""
    stop = threading.Event()
    thread = threading.Thread(
        target=_poll, args=(read, url, folder, start_ns, period_s, stop), name="poller", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(2 * TIMEOUT_S)


def _poll(read: Reader, url: str, folder: Path, start_ns: int, period_s: float, stop: threading.Event) -> None:
    encode = msgspec.json.Encoder().encode
    with open(folder / "gauges.jsonl", "ab") as gauges, contextlib.ExitStack() as stack:
        slabs = None
        tick = 0
        while True:
            with contextlib.suppress(*UNANSWERED):
                snapshot = read(url)
                at_ns = time.monotonic_ns() - start_ns
                gauges.write(encode(GaugeSample(at_ns=at_ns, host_ms=host_ms(), **snapshot.sample)) + b"\n")
                gauges.flush()
                if snapshot.slabs is not None:
                    slabs = slabs or stack.enter_context(open(folder / "slabs.jsonl", "ab"))
                    slabs.write(encode({"at_ns": at_ns, **snapshot.slabs}) + b"\n")
                    slabs.flush()
            # The next whole period that is still ahead: a slow answer skips ticks, it does not bunch them.
            elapsed_s = (time.monotonic_ns() - start_ns) / 1e9
            tick = max(tick + 1, int(elapsed_s / period_s) + 1)
            if stop.wait(max(0.0, tick * period_s - elapsed_s)):
                return


def read_samples(folder: Path) -> list[GaugeSample]:
    """Return the samples of a run in order of time; none if it has no file. A line cut off by a crash is left out."""
    try:
        content = (folder / "gauges.jsonl").read_bytes()
    except FileNotFoundError:
        return []
    decoder = msgspec.json.Decoder(GaugeSample)
    return [decoder.decode(line) for line in content.split(b"\n")[:-1]]


def _sum(totals: dict[str, float], *names: str) -> float | None:
    """Return the sum of the metrics, or None if one is not reported."""
    return sum(totals[name] for name in names) if totals.keys() >= {*names} else None


def _totals(text: str) -> dict[str, float]:
    """Return each metric's value summed over its labels; a label `mode` or `source` stays apart, as `name/mode`."""
    totals: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            apart = sample.labels.get("mode") or sample.labels.get("source")
            totals[f"{sample.name}/{apart}" if apart else sample.name] += sample.value
    return dict(totals)


def _get(url: str, path: str) -> bytes:
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "127.0.0.1", address.port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        content = response.read()
    finally:
        connection.close()
    if response.status != 200:
        raise ValueError(f"expected HTTP 200 from {url}{path}, got {response.status}")
    return content
