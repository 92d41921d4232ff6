"""A small campaign with real servers: an organization, SGLang, and SGLang's unified pool, at the same bytes."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from bench.arm_plan import Serving
from bench.campaign.cell import Conditions, real_launcher
from bench.campaign.folder import read_rows
from bench.campaign.gauges import read_samples
from bench.campaign.run import Campaign, CampaignResult
from bench.cases import case_of
from bench.cells import Changes
from bench.report.gather import gather
from bench.report.render import write_report

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

ARMS = ("s2", "stock", "stock-unified")
REQUESTS = 8


def test_every_kind_of_server_is_measured_behind_its_gate(nano_models: dict[str, Path], tmp_path: Path) -> None:
    serving = Serving(model=nano_models["falcon-h1-nano"])
    changes = Changes(arms=ARMS, budgets=("b63",), num_requests=REQUESTS, rate=4.0, quick=True)
    campaign = Campaign(
        case_of("q1"),
        changes,
        Conditions(serving=serving, scale=0.6, command=("pytest",), progress=False),
        real_launcher(serving),
        tmp_path / "q1",
        console=Console(file=io.StringIO()),
    )
    assert campaign.run() == CampaignResult(len(ARMS), 0, 0, False)
    rows = {row.outcome.arm: row for row in read_rows(tmp_path / "q1")}
    gates = []
    for arm, row in rows.items():
        folder = tmp_path / "q1" / "cells" / row.key / "attempt-1"
        samples = read_samples(folder)
        assert any(sample.running for sample in samples), arm
        assert samples[-1].input_tokens, arm
        assert "Traceback" not in (folder / "server.log").read_text(), arm
        gates.append(json.loads((folder / "gate.json").read_text()))
        assert row.outcome.counters["num_ok"] == REQUESTS
        assert 0 < row.outcome.metrics["queue_p50_ms"] < row.outcome.metrics["e2e_p50_ms"]
    # The same model whoever serves it, and each of them finds a state of a prompt that it has seen.
    assert all(gate["output_ids"] == gates[0]["output_ids"] for gate in gates)
    assert all(min(gate["cached_tokens"]) >= 512 for gate in gates)
    assert rows["s2"].outcome.counters["pools.shared.total"] == 193
    assert (tmp_path / "q1" / "cells" / rows["s2"].key / "attempt-1" / "slabs.jsonl").is_file()
    # Equal bytes run more requests at once where a request holds two states and not five.
    assert rows["s2"].outcome.counters["running_requests_cap"] > rows["stock"].outcome.counters["running_requests_cap"]
    paths = write_report(gather(tmp_path / "q1"), tmp_path / "report")
    assert "S2/stock" in paths[0].read_text()
