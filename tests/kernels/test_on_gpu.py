"""The gate of the kernel benchmark, on a CUDA device."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.gpu
def test_the_gate_is_open() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from bench.micro.gpu_gate import run_gate
    from bench.micro.shapes import FALCON_H1_7B

    checks = list(run_gate(FALCON_H1_7B, []))
    assert [check.name for check in checks if check.required and not check.passed] == []
