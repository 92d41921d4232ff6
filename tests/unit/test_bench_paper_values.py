"""The paper's values that stand beside ours, held to the paper's tables."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from bench import paper_values
from bench.outcome import Condition
from bench.paper_values import EFFECTS, PaperEffect, paper_effect
from bench.stats.contrasts import PRESELECTED_HEADROOM

PAPER = Path(__file__).parents[1] / "data" / "paper"


def rows(table: str) -> list[dict[str, str]]:
    with (PAPER / f"{table}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def effect(case: str, name: str, budget: str, **condition: Any) -> PaperEffect:
    at = Condition(case, budget, q=1.0, rate=3.0, cap=63, headroom=0.0, variant="")._replace(**condition)
    found = paper_effect(case, name, at)
    assert found is not None, (case, name, at)
    return found


def test_every_value_is_reached_by_its_own_condition_and_none_twice() -> None:
    assert len(set(EFFECTS)) == len(EFFECTS)
    keys = [(e.case, e.name, e.budget, e.q, e.rate, e.cap, e.headroom, e.variant) for e in EFFECTS]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("row", rows("b5_steps"), ids=lambda row: f"{row['budget']}-{row['contrast']}")
def test_table_b5(row: dict[str, str]) -> None:
    found = effect("q1", row["contrast"], row["budget"])
    assert (found.effect, found.p) == (float(row["mean_change_pct"]), float(row["holm_p"]))


def b7_name(row: dict[str, str]) -> tuple[str, dict[str, float]]:
    """The name that our contrast has, and the headroom of its condition."""
    numerator, denominator = float(row["numerator_f"]), float(row["denominator_f"])
    if row["numerator_org"] == row["denominator_org"]:
        return f"{row['numerator_org']}, headroom {numerator:g} instead of 0", {"headroom": numerator}
    if row["legacy_contrast_id"].startswith("PT"):
        return f"D0/S2, headroom {numerator:g} and {denominator:g}", {}
    return "D0/S2", {"headroom": numerator}


@pytest.mark.parametrize("row", rows("b7_confirmation"), ids=lambda row: row["legacy_contrast_id"])
def test_table_b7(row: dict[str, str]) -> None:
    name, condition = b7_name(row)
    found = effect("q6", name, row["budget"], **condition)
    assert (found.effect, found.low, found.high, found.p) == tuple(
        float(row[key]) for key in ("mean_change_pct", "ci95_low_pct", "ci95_high_pct", "holm_p")
    )


@pytest.mark.parametrize("row", rows("b7_confirmation"), ids=lambda row: row["legacy_contrast_id"])
def test_preselected_headroom_is_that_of_table_b7(row: dict[str, str]) -> None:
    chosen = PRESELECTED_HEADROOM[row["budget"]]
    if row["legacy_contrast_id"].startswith("PT"):
        assert chosen == {"d0": float(row["numerator_f"]), "s2": float(row["denominator_f"])}
    if row["legacy_contrast_id"].startswith("I"):
        assert chosen[row["numerator_org"].lower()] == float(row["numerator_f"])


@pytest.mark.parametrize("row", rows("e12_split_sweep"), ids=lambda row: f"{row['budget']}-{row['setting']}")
def test_table_e12(row: dict[str, str]) -> None:
    variant = f"split={row['attention_fraction']}"
    found = effect("split", f"D0, {variant} instead of the default", row["budget"], variant=variant)
    assert (found.effect, found.p) == (float(row["mean_relative_effect_pct"]), float(row["holm_p"]))


def test_table_e5() -> None:
    table = {row["row"]: row for row in rows("e5_original_five")}
    for number, found in {
        "1": effect("q5", "D0/S2", "b63"),
        "2": effect("q5", "D0/S2", "b108", rate=4.5, cap=109),
        "3": effect("caps", "D0/S2", "b63", rate=1.7, cap=8),
        "4": effect("bursts", "D0/S2", "b63", rate=1.7, variant="onoff"),
    }.items():
        assert found.effect == float(table[number]["mean_d0_gap_pct"])
        assert found.p == float(table[number]["holm_p"])


PINNED: dict[str, dict[str, Any]] = {"b108": {"rate": 4.5, "cap": 109}, "b63": {}}
"""What sets the load of the pinning runs apart from the main one. Source: section B.2."""


def test_table_e16() -> None:
    for row in rows("e16_pinning_interaction"):
        name = "D0/S2, pin K 1 instead of 3"
        found = effect("pinning", name, row["budget"], **PINNED[row["budget"]], variant="pin=1")
        assert (found.effect, found.p) == (float(row["mean_change_pp"]), float(row["holm_p"]))


def test_gaps_by_cap_and_pinning() -> None:
    """Tables E-11 and E-15. At b63 the cap of 8 has its value from Table E-5, which pairs nine seeds and not three."""
    for row in rows("e11_cap_response"):
        found = effect("caps", "D0/S2", row["budget"], rate=1.7, cap=int(row["cap"]))
        assert found.effect == float(row["mean_d0_s2_gap_pct"]) or (row["budget"], row["cap"]) == ("b63", "8")
    columns = {"off": "roff_pct", "3": "r0_k3_pct", "2": "r1_k2_pct", "1": "r2_k1_pct"}
    for row in rows("e15_pinning_gaps"):
        for k, column in columns.items():
            found = effect("pinning", "D0/S2", row["budget"], **PINNED[row["budget"]], variant=f"pin={k}")
            assert found.effect == float(row[column])


def test_table_e2() -> None:
    for row in rows("e2_anchor_paired_changes"):
        name = {"S0->S1": "S1/S0", "S1->S2": "S2/S1"}[row["step"]]
        cap = {"b63": 63, "b108": 109}[row["budget"]]
        found = effect("q2", name, row["budget"], rate=float(row["arrival_req_s"]), cap=cap)
        assert found.effect == float(row["throughput_pct"])


def test_table_g2_and_the_endpoint_interactions() -> None:
    columns = {"S1/S0": "s1_over_s0", "S2/S1": "s2_over_s1", "D0/S2": "d0_over_s2"}
    for row in rows("g2_sharing_levels"):
        for name, column in columns.items():
            found = effect("q3", name, "b83", q=float(row["q_fraction"]))
            assert found.effect == float(row[f"mean_{column}_minus_1_pct"])
            if row["q_fraction"] == "0" and name != "D0/S2":
                assert effect("q2", name, "b83", q=0.0).effect == found.effect
    printed = {
        (row["organization_or_contrast"], row["metric"]): float(row["value_low"])
        for row in rows("fig4_q3")
        if row["q_fraction"] == "1-0"
    }
    for name in columns:
        found = effect("q3", f"{name}, q 1 instead of 0", "b83")
        assert found.effect == printed[name, "endpoint interaction"]
        assert found.p == printed[name, "endpoint interaction Holm p"]


def test_table_g7() -> None:
    table = {row["estimand"]: row for row in rows("g7_q9_effects") if row["timebase"] == "ledger"}
    for estimand, found in {
        "K_ret": effect("q9", "S2-retained/S2, share instead of isolate", "b83", variant="share"),
        "delta_SHARE": effect("q9", "S2-retained/S2", "b83", variant="share"),
        "delta_ISOLATE": effect("q9", "S2-retained/S2", "b83", variant="isolate"),
    }.items():
        keys = ("effect_pct", "ci95_low_pct", "ci95_high_pct")
        assert (found.effect, found.low, found.high) == tuple(float(table[estimand][key]) for key in keys)


def test_section_5_3() -> None:
    """Mean paired D0/S2 at 3 requests/s without headroom, and over six seeds of the load curve at b108."""
    for case in ("q1", "q4"):
        assert [effect(case, "D0/S2", budget).effect for budget in ("b63", "b83", "b108")] == [4.978, -1.728, -12.556]
    [row] = [
        row for row in rows("fig5_q5") if (row["budget"], row["arrival_req_s"], row["seed"]) == ("b108", "3.0", "0-5")
    ]
    assert effect("q5", "D0/S2", "b108", cap=109).effect == float(row["value_low"])


@pytest.mark.parametrize("other", [{"q": 0.0}, {"cap": 109}, {"headroom": 0.19}, {"variant": "onoff"}, {"rate": 0.8}])
def test_a_value_stands_beside_its_own_condition_only(other: dict[str, Any]) -> None:
    at = Condition("q1", "b63", 1.0, 3.0, 63, 0.0, "")
    assert paper_effect("q1", "S1/S0", at) is not None
    assert paper_effect("q1", "S1/S0", at._replace(**other)) is None
    assert paper_effect("q3", "D0/S2", at._replace(case="q3", budget="b83", rate=0.8)) is None


def test_no_value_for_what_the_paper_does_not_print() -> None:
    assert paper_effect("q1", "S1/S0", Condition("q1", "b63", 1.0, 0.8, 63, 0.0, "")) is None
    assert paper_effect("q1", "S1/S0", Condition("q1", "512MiB", 1.0, 3.0, 63, 0.0, "")) is None
    assert paper_effect("q1", "S1/stock-tuned", Condition("q1", "b63", 1.0, 3.0, 63, 0.0, "")) is None


def test_table_b8() -> None:
    for row in rows("b8_latency"):
        place = paper_values.HEADROOMS.index(float(row["f"]))
        rates = paper_values.HEADROOM_REQUESTS_PER_S[row["budget"]][row["organization"].lower()]
        assert rates[place] == float(row["request_rate_req_s"])


def test_table_e1() -> None:
    for row in rows("e1_high_load_anchors"):
        tokens = paper_values.C_ONCE_TOKENS[row["budget"]][row["organization"].lower()]
        assert tokens == float(row["c_once_tok_per_run"])


def test_tables_g3_and_g6() -> None:
    arms = {"S2": "s2", "S2+Retention": "s2-retained"}
    for printed, arm in arms.items():
        depths = [float(row["j_adopt_tok_per_req"]) for row in rows("g3_q8_depths") if row["arm"] == printed]
        assert list(paper_values.RETENTION_DEPTH_TOKENS[arm]) == depths
    for row in rows("g6_q9_geomeans"):
        means = paper_values.RETENTION_GEOMEANS[row["mode"].lower()]
        assert list(means.values()) == [float(row["s2_geomean_tok_s"]), float(row["s2_retention_geomean_tok_s"])]


def test_figure_2_and_figure_7a() -> None:
    for row in rows("fig2_q1"):
        arm = row["organization_or_contrast"].lower()
        if row["metric"] == "mean run-level TTFT p99":
            assert paper_values.LOW_LOAD_TTFT_P99_S[row["budget"]][arm] == float(row["value_low"])
        if row["metric"] == "sampled run-level maximum waiting requests":
            found = paper_values.LOW_LOAD_WAITING_MAX[row["budget"]][arm]
            assert found == (float(row["value_low"]), float(row["value_high"]))
    depths = [row for row in rows("fig7_q7_q9") if (row["panel"], row["metric"]) == ("a", "J_adopt = R_max")]
    for headroom, values in paper_values.HEADROOM_DEPTH_TOKENS.items():
        printed = [float(row["value_low"]) for row in depths if row["organization_or_contrast"] == f"S2 f={headroom:g}"]
        assert list(values) == printed


def test_table_e13() -> None:
    falcon = [row for row in rows("e13_slo_goodput") if row["model"] == "Falcon"]
    table = {
        (row["budget"], float(row["arrival_req_s"]), int(row["cap"]), "" if row["arrival"] == "Poisson" else "onoff"): (
            float(row["comparator_threshold_effect_pct"]),
            float(row["union_threshold_effect_pct"]),
        )
        for row in falcon
    }
    assert table == paper_values.LATENCY_QUALIFIED_PCT
