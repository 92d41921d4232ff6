"""The benchmark where there is no GPU: a clear line, the static table, and rows for what is absent."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.micro import kernels
from bench.micro.rivals import RetunedKernel, load_rivals, load_stock


def test_without_a_device_it_says_so_and_prints_the_static_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(kernels, "ARCHITECTURES", (90,))
    output = tmp_path / "static.md"
    assert kernels.main(["--stock-file", str(tmp_path / "absent.py"), "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("No CUDA device: nothing is timed.")
    assert output.read_text().strip() in printed
    assert "No entry is a time." in printed
    for row in (
        "ssm_update | bf16 | paged, 4",
        "ssm_update | fp32 | contiguous, 8",
        "conv_update | fp32",
        "state_copy",
    ):
        assert f"| {row}" in printed
    assert printed.count("| ssm_update | bf16 | paged") == printed.count("| ssm_update | bf16 | contiguous") == 4
    assert "| ssm_update | fp32 | stock, 4 rows, 8 warps | absent: no file absent.py" in printed


def test_a_stock_kernel_that_cannot_be_loaded_is_absent_with_the_reason(tmp_path: Path) -> None:
    broken = tmp_path / "mamba_ssm.py"
    broken.write_text("import no_such_package\n")
    module, reason = load_stock(broken)
    assert module is None
    assert "ModuleNotFoundError" in reason
    absent = {rival.name: rival.absent for rival in load_rivals(broken) if rival.bind is None}
    assert "no_such_package" in absent["stock"]
    assert "no_such_package" in absent["stock re-tuned"]


def test_the_stock_file_gets_its_one_import_from_sglang_and_leaves_no_stub(tmp_path: Path) -> None:
    import sys

    stock = tmp_path / "mamba_ssm.py"
    stock.write_text("from sglang.kernels.jit.utils import is_arch_support_pdl\n")
    before = "sglang" in sys.modules
    module, reason = load_stock(stock)
    assert reason == ""
    assert callable(module.is_arch_support_pdl)
    assert ("sglang" in sys.modules) == before


def test_a_retuned_kernel_is_launched_with_its_own_tile() -> None:
    launches = []

    class Kernel:
        def __getitem__(self, grid: object) -> object:
            return lambda *args, **options: launches.append((grid, args, options))

    RetunedKernel(Kernel(), 8, 1)["grid"]("state", 4, num_warps=8)
    RetunedKernel(Kernel(), None, None)["grid"]("state", 4, num_warps=8)
    assert launches == [("grid", ("state", 8), {"num_warps": 1}), ("grid", ("state", 4), {"num_warps": 8})]


def test_zero_rounds_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        kernels.main(["--rounds", "0"])
    assert "--rounds: expected at least 1, got 0" in capsys.readouterr().err
