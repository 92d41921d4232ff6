"""The main job: 300 requests that share eight contexts, at a saturating rate, on a small budget."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from bench.arrivals import AtOnce
from bench.load import LoadSettings
from bench.session import LoadCase, run_load
from bench.workloads import Lengths, make_workload
from tests.e2e import client
from tests.e2e.conftest import GRIDS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.mark.parametrize("organization", ["d0", "s2"])
def test_300_of_300_complete_and_every_ledger_balances(servers, tmp_path: Path, organization: str) -> None:
    """The paper's workload at 62 % of its lengths with short outputs, so that the test ends in a minute or two: a
    context of 1,934 tokens still passes the boundary at 1,792. All at once, 63 in flight."""
    server = servers(organization)
    client.flush(server.url)
    output = Lengths(median_tokens=10, sigma=0.8, low_tokens=2, high_tokens=40)
    workload = msgspec.structs.replace(make_workload("paper", num_requests=300).scaled(0.62), output=output)
    result = run_load(
        LoadCase(workload=workload, arrivals=AtOnce(), seed=42000),
        LoadSettings(url=server.url, max_concurrency=63),
        tmp_path / "run",
        command=["pytest"],
        progress=False,
    )
    assert result.ended == "complete"
    assert (result.summary.num_ok, result.summary.num_failed, result.summary.num_short) == (300, 0, 0)
    # 292 requests come after the first of their context; most of them find a state in its 1,934 tokens.
    assert result.summary.cached_tokens > 200 * (1934 // GRIDS[organization] * GRIDS[organization])
    found = client.memory(server.url)
    assert found["counters"]["checks"]["attention"]["granted"] >= 300
    assert found["ledger_checks"] >= 300
    client.assert_nothing_held(server.url)
    assert "leak" not in server.log.read_text().lower()
