"""What a run says of the machine it was made on."""

from typing import Any

import pytest

from bench.environment import describe_environment, statement

MACHINE = {"cpu": "AMD EPYC", "num_cores": 2, "memory_gib": 23.5}
WITH_GPU: dict[str, Any] = {"machine": {**MACHINE, "accelerators": ["NVIDIA H200"]}}


@pytest.mark.parametrize("device", ["cuda", None])
def test_an_accelerator_is_named(device: str | None) -> None:
    assert statement({**WITH_GPU, "device": device}) == "On a machine with NVIDIA H200 (AMD EPYC, 2 cores, 23.5 GiB)."


def test_a_run_on_the_cpu_beside_an_accelerator_is_a_cpu_run() -> None:
    said = statement({**WITH_GPU, "device": "cpu"})
    assert said.startswith("CPU run (AMD EPYC, 2 cores, 23.5 GiB)")
    assert "H200" not in said


def test_a_machine_without_an_accelerator_is_a_cpu_run() -> None:
    assert statement({"machine": {**MACHINE, "accelerators": []}, "device": None}).startswith("CPU run (AMD EPYC")


def test_the_environment_of_this_machine_has_a_statement() -> None:
    assert describe_environment()["machine"]["cpu"] in statement(describe_environment())
