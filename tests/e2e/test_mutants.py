"""A broken build is caught by `bench verify`, and a sound one is not accused: servers of their own, with one fault."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from bench.cli import main
from bench.verify.compare import Verdict
from bench.verify.records import ArmResult, VerifyResult

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

FOLDER = Path(__file__).parent / "mutants"
# A state in bfloat16 beside a float32 model: what is rounded at a boundary shows in the log-probabilities.
SERVE = "--memory-org s2 --mamba-ssm-dtype bfloat16"
PATHS = ("cold", "warm", "restore", "resume")


def verify(monkeypatch: pytest.MonkeyPatch, folder: Path, mutant: str | None) -> tuple[int, ArmResult]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")]).rstrip(":"))
    monkeypatch.delenv("SGL_HYBRID_MUTANT", raising=False)
    if mutant is not None:
        monkeypatch.setenv("SGL_HYBRID_MUTANT", mutant)
    file = folder / "result.json"
    only = [option for path in PATHS for option in ("--only", path)]
    status = main(
        ["verify", "--serve", SERVE, "--quick", *only, "--models", str(folder / "models"), "--out", str(file)]
    )
    assert status in (0, 1)  # a verdict: the server came up and answered
    return status, msgspec.json.decode(file.read_bytes(), type=VerifyResult).arms[0]


def test_a_sound_build_is_equal(monkeypatch, tmp_path: Path) -> None:
    status, arm = verify(monkeypatch, tmp_path, None)
    assert {path.path: path.verdict for path in arm.paths} == dict.fromkeys(PATHS, Verdict.EQUAL)
    assert status == 0


@pytest.mark.parametrize(
    ("mutant", "path"),
    [
        ("rounding skipped", "warm"),
        ("wrong depth published", "warm"),
        ("slot reused early", "restore"),
        ("resumed in the prefill", "resume"),
        ("replayed one position late", "resume"),
    ],
)
def test_a_broken_build_is_different(monkeypatch, tmp_path: Path, mutant: str, path: str) -> None:
    status, arm = verify(monkeypatch, tmp_path, mutant)
    assert status == 1
    verdicts = {found.path: found.verdict for found in arm.paths}
    assert verdicts["cold"] is Verdict.EQUAL  # the fault is in what is reused, not in the reference
    assert verdicts[path] is Verdict.DIFFERENT
