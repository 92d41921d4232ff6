"""The servers that a verification starts itself: nano models with little memory, on a CPU or a GPU."""

from __future__ import annotations

import shlex
from pathlib import Path

import msgspec

from bench.nano import DTYPES, write_model
from bench.server import ServerProcess, cpu_environment, free_port, gpu_environment, sglang_command
from sgl_hybrid.errors import SettingError

OURS = ("--model-path", "--model", "--host", "--port", "--device", "--dtype")
"""Flags that verify sets itself."""

SMALL: dict[str, dict[str, str]] = {
    "s0": {"float32": "--memory-budget 18MiB", "bfloat16": "--memory-budget 18MiB"},
    "s1": {"float32": "--memory-budget 10MiB", "bfloat16": "--memory-budget 6MiB"},
    "s2": {"float32": "--memory-budget 10MiB", "bfloat16": "--memory-budget 6MiB"},
    "d0": {
        "float32": "--memory-budget 34MiB --d0-attention-fraction 0.15",
        "bfloat16": "--memory-budget 17MiB --d0-attention-fraction 0.15",
    },
    "stock": dict.fromkeys(DTYPES, "--page-size 16 --max-total-tokens 16384 --max-mamba-cache-size 60"),
}
"""Memory for an arm that names none, by organization and dtype of the model: room for one request of a nano model's
8,192 tokens, too little for ten, so that states are evicted and requests retracted within seconds."""


class Arm(msgspec.Struct, frozen=True, kw_only=True):
    """One server to start. name: the organization, or stock."""

    name: str
    arguments: list[str]


def make_arm(given: str, dtype: str) -> Arm:
    """Return the arm of a `--serve` text such as "--memory-org s2"; `stock` alone is SGLang without an organization.

    Where the text names no memory, it gets that of `SMALL`; unless it says otherwise, SGLang admits requests as if
    their outputs were short, which makes it retract some. Raises: SettingError for a flag that verify sets itself.
    """
    arguments = [] if given.strip() == "stock" else shlex.split(given)
    for flag in OURS:
        if _value(arguments, flag) is not None:
            raise SettingError(f"expected flags that verify does not set itself in --serve, got {flag}")
    name = _value(arguments, "--memory-org") or "stock"
    sized = ("--memory-budget", "--max-total-tokens", "--max-mamba-cache-size")
    if not any(_value(arguments, flag) is not None for flag in sized):
        arguments += SMALL.get(name, {}).get(dtype, "").split()
    if _value(arguments, "--schedule-conservativeness") is None:
        arguments += ["--schedule-conservativeness", "0.01"]
    if name != "stock" and _value(arguments, "--admission-headroom") is None:
        arguments += ["--admission-headroom", "0"]
    return Arm(name=name, arguments=arguments)


DEVICES = ("cpu", "cuda")


def start_arm(
    arm: Arm, *, model: str, dtype: str, models_folder: Path, log: Path, device: str = "cpu"
) -> ServerProcess:
    """Make the model if it is missing and return the server of an arm, not yet started. device: of `DEVICES`."""
    folder = models_folder / f"{model}-{dtype}"
    write_model(model, folder, dtype=dtype)
    port = free_port()
    common = ["--device", device, "--dtype", dtype, "--sleep-on-idle"]
    if _value(arm.arguments, "--attention-backend") is None:
        # On a GPU stock SGLang would choose by the chip; both sides of a comparison get the same.
        common += ["--attention-backend", "torch_native" if device == "cpu" else "triton"]
    command = sglang_command(folder, port, [*common, *arm.arguments])
    environment = cpu_environment(dtype) if device == "cpu" else gpu_environment(dtype)
    return ServerProcess(command, port=port, log=log, environment=environment)


def _value(arguments: list[str], flag: str) -> str | None:
    """Return the value of a flag in either spelling, empty if it has none, None if it is not given."""
    for index, argument in enumerate(arguments):
        if argument == flag:
            return arguments[index + 1] if index + 1 < len(arguments) else ""
        if argument.startswith(f"{flag}="):
            return argument.removeprefix(f"{flag}=")
    return None
