"""Campaigns on stand-in servers for tests: a model folder without weights, a launcher, one call that runs a campaign.

Imports no torch, so a process that runs a campaign starts in a second.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.arm_plan import ArmPlan, Serving
from bench.arms import Arm
from bench.campaign.cell import Conditions, Launch, Launcher
from bench.campaign.run import Campaign, CampaignResult
from bench.cases import case_of
from bench.cells import Changes
from bench.metrics.latency import Limits
from bench.nano import FALCON_CONFIG
from bench.tokenizer import make_tokenizer

REQUESTS = 6


def write_shapes(folder: Path) -> Path:
    """Write a model folder that has shapes and hashes but cannot be served."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(FALCON_CONFIG))
    (folder / "tokenizer.json").write_text(make_tokenizer().to_str())
    return folder


class StandIn:
    """Starts fake servers; `extra` flags by arm make them misbehave."""

    def __init__(self, **extra: str) -> None:
        self.extra = extra
        self.started: list[str] = []

    def __call__(self, arm: Arm, plan: ArmPlan, cap: int, port: int) -> Launch:
        self.started.append(arm.name)
        command = [sys.executable, "-m", "tests.unit.fake_server", "--port", str(port), *plan.flags]
        command += ["--total-bytes", str(plan.total_bytes), *self.extra.get(arm.name, "").split()]
        return Launch(command, {})


def campaign(
    model: Path,
    folder: Path,
    launch: Launcher,
    *,
    arms: str = "s2",
    seeds: int = 1,
    requests: int = REQUESTS,
    dataset: Path | None = None,
    budget: str = "b63",
    quick: bool = True,
    limits: Limits | None = None,
    host_limit_ms: float | None = None,
    **options: Any,
) -> CampaignResult:
    """Run case q1 on stand-ins, with prompts of 2 % of the paper's lengths at 200 requests/s."""
    changes = Changes(
        arms=tuple(arms.split()), budgets=(budget,), num_seeds=seeds, num_requests=requests, rate=200.0, quick=quick
    )
    conditions = Conditions(
        serving=Serving(model=model),
        scale=0.02,
        dataset=dataset,
        limits=limits,
        host_limit_ms=host_limit_ms,
        command=("test",),
        progress=False,
        period_s=0.02,
    )
    console = Console(file=io.StringIO())
    return Campaign(case_of("q1"), changes, conditions, launch, folder, console=console, **options).run()


if __name__ == "__main__":
    campaign(Path(sys.argv[1]), Path(sys.argv[2]), StandIn(s1="--token-s 0.5"), arms="s2 s1", order_seed=3)
