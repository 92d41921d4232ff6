"""From outcomes to contrasts, families, sentences and goals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pytest

from bench.cases import CASES
from bench.outcome import CellOutcome
from bench.stats.adoption import rerun_sensitivity
from bench.stats.contrasts import arm_title, find
from bench.stats.rows import analyse, shares_of_ceiling
from bench.stats.verdicts import phrase, strength, verdict
from tests.unit.outcomes import METRIC, cells, row_of

TWO = cells("q1", {"s0": [100, 200], "s1": [150, 280], "ceiling": [200, 400]})


def test_a_row_by_hand() -> None:
    row = row_of(analyse(TWO), "S1/S0")
    assert (row.num_seeds, row.num_planned, row.unit) == (2, 2, "%")
    assert row.effect == pytest.approx(45.0)  # +50 and +40
    assert (row.lowest, row.highest) == pytest.approx((40.0, 50.0))
    assert (row.num_positive, row.num_negative) == (2, 0)
    assert row.p == row.p_relative == 0.5  # two seeds: 2 of 4 assignments
    assert row.display is not None
    assert (row.display.low, row.display.high) == pytest.approx((40.0, 50.0))
    assert row.interval is not None
    assert row.interval.estimate == pytest.approx(100 * ((1.5 * 1.4) ** 0.5 - 1))


def test_shares_of_the_ceiling_are_means_of_ratios() -> None:
    found = {share.arm: share for share in shares_of_ceiling(TWO)}
    assert found.keys() == {"s0", "s1"}
    assert found["s1"].share == pytest.approx((150 / 200 + 280 / 400) / 2)
    vllm = cells("q1", {"vllm": [90.0], "vllm-ceiling": [100.0], "ceiling": [300.0]})
    assert [(share.arm, share.ceiling, round(share.share, 6)) for share in shares_of_ceiling(vllm)] == [
        ("vllm", "vllm-ceiling", 0.9)
    ]


def test_pairs_are_found_within_a_condition_only() -> None:
    outcomes = cells("q1", {"s0": [1.0]}) + cells("q1", {"s1": [1.0]}, budget="b83")
    assert find(outcomes, METRIC) == []


def test_failed_cells_and_zeros_have_no_pair_and_stay_planned() -> None:
    outcomes = cells("q1", {"s0": [1.0, 1.0, None, 1.0], "s1": [1.5, None, 1.0, 0.0]})
    row = row_of(analyse(outcomes), "S1/S0")
    assert (row.num_seeds, row.num_planned, row.effect) == (1, 4, pytest.approx(50.0))
    assert row.interval is None
    lost = row_of(analyse(cells("q1", {"s0": [None], "s1": [1.0]})), "S1/S0")
    assert (lost.num_seeds, lost.num_planned, lost.effect, lost.p) == (0, 1, None, None)
    assert lost.decision is not None  # planned, so it counts in its family
    assert (lost.decision.adjusted_p, lost.decision.rejected) == (1.0, False)


def test_the_family_of_q1_has_steps_dual_pool_and_budget_interactions() -> None:
    arms = {"s0": [1.0], "s1": [2.0], "s2": [3.0], "d0": [2.0], "stock-tuned": [1.0]}
    outcomes = [outcome for budget in ("b63", "b83", "b108") for outcome in cells("q1", arms, budget=budget)]
    rows = analyse(outcomes)
    own = [row for row in rows if row.family == "q1"]
    assert len(own) == 6 + 3 + 2  # the paper's: steps, D0/S2 by budget, budget interactions
    assert {row.family_size for row in own} == {11}
    assert {row.name for row in own if row.kind == "budget"} == {
        "D0/S2, b83 instead of b63",
        "D0/S2, b108 instead of b63",
    }
    rivals = [row for row in rows if row.kind == "rival"]
    assert len(rivals) == 4 * 3
    assert {(row.family, row.family_size) for row in rivals} == {("q1, against other servers", 12)}


def test_sharing_is_tested_at_its_endpoints() -> None:
    outcomes = [
        *cells("q3", {"s0": [100.0, 100.0], "s1": [110.0, 120.0]}, q=0.0),
        *cells("q3", {"s0": [100.0, 100.0], "s1": [130.0, 130.0]}, q=0.5),
        *cells("q3", {"s0": [100.0, 100.0], "s1": [150.0, 140.0]}, q=1.0),
    ]
    rows = analyse(outcomes)
    [tested] = [row for row in rows if row.family is not None]
    assert (tested.name, tested.where, tested.unit) == ("S1/S0, q 1 instead of 0", "b63", "pp")
    assert tested.effect == pytest.approx(30.0)  # +40 and +20 points
    assert {row.where for row in rows if row.kind == "arms"} == {"b63, q 0", "b63, q 0.5", "b63, q 1"}


def test_headroom_is_tested_where_it_was_chosen_before() -> None:
    outcomes = [
        outcome
        for f, s2 in ((0.0, 100.0), (0.19, 110.0), (0.27, 120.0))
        for outcome in cells("q6", {"d0": [90.0, 90.0], "s2": [s2, s2]}, headroom=f)
    ]
    rows = analyse(outcomes)
    assert {(row.kind, row.name, row.where) for row in rows if row.family} == {
        ("arms", "D0/S2", "b63, f 0"),
        ("arms", "D0/S2", "b63, f 0.19"),
        ("headroom", "S2, headroom 0.27 instead of 0", "b63"),
        ("preselected", "D0/S2, headroom 0 and 0.27", "b63"),
    }
    assert row_of(rows, "D0/S2, headroom 0 and 0.27").effect == pytest.approx(-25.0)
    assert row_of(rows, "S2, headroom 0.27 instead of 0").effect == pytest.approx(20.0)


def test_the_confirmation_compares_the_budget_endpoints_only() -> None:
    arms = {"d0": [1.0], "s2": [2.0]}
    outcomes = [outcome for budget in ("b63", "b83", "b108") for outcome in cells("q6", arms, budget=budget)]
    assert [row.name for row in analyse(outcomes) if row.kind == "budget"] == ["D0/S2, b108 instead of b63"]


@pytest.mark.parametrize("order", [("b108", "b63", "b83"), ("b83", "b108", "b63")])
def test_the_smallest_budget_is_the_baseline_whatever_ran_first(order: tuple[str, ...]) -> None:
    arms = {"d0": [1.0], "s2": [2.0]}
    main, confirmation = (
        [outcome for budget in order for outcome in cells(case, arms, budget=budget)] for case in ("q4", "q6")
    )
    assert [row.name for row in analyse(main) if row.family] == [
        *["D0/S2"] * 3,
        "D0/S2, b83 instead of b63",
        "D0/S2, b108 instead of b63",
    ]
    assert [row.name for row in analyse(confirmation) if row.kind == "budget"] == ["D0/S2, b108 instead of b63"]
    sizes = [outcome for budget in ("2GiB", "512MiB") for outcome in cells("q4", arms, budget=budget)]
    assert [row.name for row in analyse(sizes) if row.kind == "budget"] == ["D0/S2, 2GiB instead of 512MiB"]


def test_the_reuse_interaction_is_a_ratio_of_ratios() -> None:
    """K_ret of one seed: (300/200) / (110/100) - 1."""
    outcomes = [
        *cells("q9", {"s2": [200.0, 200.0], "s2-retained": [300.0, 300.0]}, variant="share"),
        *cells("q9", {"s2": [100.0, 100.0], "s2-retained": [110.0, 110.0]}, variant="isolate"),
    ]
    row = row_of(analyse(outcomes), "S2-retained/S2, share instead of isolate")
    assert (row.unit, row.family) == ("%", "q9")
    assert row.effect == pytest.approx(100 * (1.5 / 1.1 - 1))


@pytest.mark.parametrize(
    ("case", "variants", "arms", "name"),
    [
        ("split", ("", "split=0.477383"), {"d0": [2.0]}, "D0, split=0.477383 instead of the default"),
        ("pinning", ("pin=3", "pin=1"), {"d0": [2.0], "s2": [1.0]}, "D0/S2, pin K 1 instead of 3"),
        ("bursts", ("", "onoff"), {"d0": [2.0], "s2": [1.0]}, "D0/S2"),
    ],
)
def test_what_the_auxiliary_cases_test(
    case: str, variants: tuple[str, ...], arms: Mapping[str, Sequence[float]], name: str
) -> None:
    outcomes = [outcome for variant in variants for outcome in cells(case, arms, variant=variant)]
    assert [row.name for row in analyse(outcomes) if row.family] == [name]


def test_load_curves_are_tested_at_the_highest_rate_and_caps_at_eight() -> None:
    arms = {"d0": [2.0], "s2": [1.0]}
    loads = [outcome for rate in (0.8, 3.0) for outcome in cells("q5", arms, rate=rate)]
    assert [row.where for row in analyse(loads) if row.family] == ["b63, 3 req/s"]
    caps = [outcome for cap in (5, 8, 63) for outcome in cells("caps", arms, cap=cap)]
    assert [row.where for row in analyse(caps) if row.family] == ["b63, cap 8"]


def test_the_sentence_says_who_is_ahead_where_by_how_much_and_how_sure() -> None:
    steady = {"s0": [100.0, 101.0, 99.0], "s1": [150.0, 152.0, 148.0]}
    noisy = {"s0": [100.0, 100.0, 100.0], "s1": [90.0, 120.0, 101.0]}
    found = verdict("q1", analyse(cells("q1", steady) + cells("q1", noisy, budget="b83")))
    assert found.strength == "seen"
    assert found.sentence.startswith("S1 is ahead of S0 at b63 (+50.0 %, +")
    assert "and is not told apart from S0 at b83 (+3.7 %, -" in found.sentence
    assert found.sentence.endswith(
        "; 95 % intervals over 3 paired seeds, too few for the sign-flip test (least p 0.25, 2 tests)."
    )


def test_twelve_seeds_can_be_confirmed() -> None:
    arms = {"s0": [100.0] * 12, "s1": [150.0 + seed for seed in range(12)]}
    found = verdict("q1", analyse(cells("q1", arms)))
    assert found.strength == "confirmed"
    assert found.sentence.endswith("; 95 % intervals over 12 paired seeds, the sign-flip test holds.")
    behind = verdict("q1", analyse(cells("q1", {"s0": arms["s1"], "s1": arms["s0"]})))
    assert behind.sentence.startswith("S1 is behind S0 at b63 (-")


def test_one_seed_is_an_example_and_none_is_not_measured() -> None:
    once = verdict("q1", analyse(cells("q1", {"s0": [100.0], "s1": [150.0]})))
    assert once.strength == "single"
    assert once.sentence == (
        "S1 ran once beside S0 at b63 (+50.0 %, one seed); 1 paired seed: an example, no interval and no test."
    )
    for outcomes in ([], cells("q1", {"s0": [None], "s1": [1.0]})):
        none = verdict("q1", analyse(outcomes))
        assert (none.strength, none.sentence) == (
            "absent",
            "Not measured: no seed has both sides of a comparison.",
        )


def test_lost_pairs_are_told() -> None:
    arms = {"s0": [100.0, 100.0, None], "s1": [150.0, 151.0, 1.0]}
    assert "2 paired seeds, 1 planned pair without a measurement" in verdict("q1", analyse(cells("q1", arms))).sentence


def test_lower_is_better_turns_ahead_around() -> None:
    outcomes = [
        CellOutcome(case="q1-low", arm=arm, budget="b63", seed=seed, q=1.0, rate=0.8, metrics={"ttft_p99_ms": value})
        for arm, value in (("s0", 3687.0), ("s1", 578.0))
        for seed in (0, 1, 2)
    ]
    found = verdict("q1-low", analyse(outcomes, "ttft_p99_ms"), metric="ttft_p99_ms")
    assert found.sentence.startswith("S1 is ahead of S0 at b63 (-84.3 %")
    assert found.sentence.endswith("over 3 paired seeds, descriptive.")


def test_interactions_and_policies_are_told_as_changes() -> None:
    outcomes = [
        *cells("q3", {"s0": [100.0, 100.0], "s1": [110.0, 112.0]}, q=0.0),
        *cells("q3", {"s0": [100.0, 100.0], "s1": [150.0, 152.0]}, q=1.0),
    ]
    sentence = verdict("q3", analyse(outcomes)).sentence
    assert sentence.startswith("With q 1 instead of 0, the ratio S1/S0 changes by +40.0 points (")
    assert " at b63; " in sentence


def test_q2_says_with_which_input_work_the_gain_goes() -> None:
    outcomes = [
        CellOutcome(
            case="q2",
            arm=arm,
            budget="b83",
            seed=seed,
            q=q,
            rate=3.0,
            metrics={METRIC: tokens + seed, "c_once_tokens": work},
        )
        for q, works in ((0.0, (1000.0, 1000.0)), (1.0, (900.0, 450.0)))
        for arm, tokens, work in (("s0", 100.0, works[0]), ("s1", 150.0, works[1]))
        for seed in (1, 2)
    ]
    said = "recorded input (C_once)"
    work = analyse(outcomes, CASES["q2"].beside[said])
    sentence = verdict("q2", analyse(outcomes), beside={said: work}).sentence
    assert (
        "; recorded input (C_once) changes S1/S0 by +0.0 % (+0.0 to +0.0) at b83, q 0 and "
        "-50.0 % (-50.0 to -50.0) at b83, q 1; 95 % intervals" in sentence
    )
    assert "recorded input" not in verdict("q2", analyse(outcomes), beside={said: analyse([], METRIC)}).sentence


def test_exact_continuation_has_a_price_in_throughput_and_in_first_tokens() -> None:
    case = CASES["exact"]
    outcomes = [
        CellOutcome(
            case="exact",
            arm=arm,
            budget="b83",
            seed=seed,
            q=1.0,
            rate=3.0,
            metrics={METRIC: tokens, **dict.fromkeys(case.beside.values(), wait)},
        )
        for arm, tokens, wait in (("s2", 95.0, 120.0), ("s2-inexact", 100.0, 100.0))
        for seed in (1, 2)
    ]
    rows = {said: analyse(outcomes, metric) for said, metric in case.beside.items()}
    sentence = verdict("exact", analyse(outcomes), beside=rows).sentence
    assert sentence.startswith(
        "S2 is behind S2-inexact at b83 (-5.0 %, -5.0 to -5.0); median TTFT changes S2/S2-inexact by"
    )
    assert "TTFT p99 changes S2/S2-inexact by +20.0 % (+20.0 to +20.0) at b83" in sentence


def test_phrases() -> None:
    row = row_of(analyse(TWO), "S1/S0")
    assert row.interval is not None
    assert phrase(row) == f"+45.0 % ({row.interval.low:+.1f} to {row.interval.high:+.1f})"
    assert phrase(row_of(analyse(cells("q1", {"s0": [None], "s1": [1.0]})), "S1/S0")) == "not measured"
    assert strength(row) == "open"  # two seeds: t(0.975, 1) is 12.7
    assert [arm_title(arm) for arm in ("s2", "d0-m512", "stock-tuned", "vllm")] == [
        "S2",
        "D0-m512",
        "stock-tuned",
        "vllm",
    ]


def rerun(outcomes: Sequence[CellOutcome], arm: str, seed: int) -> list[CellOutcome]:
    """The same outcomes with one cell that failed first and came from its second attempt."""
    kept = []
    for outcome in outcomes:
        if (outcome.arm, outcome.seed) == (arm, seed):
            values = {field: getattr(outcome, field) for field in outcome.__struct_fields__}
            kept.append(CellOutcome(**{**values, "status": "failed", "metrics": {}}))
            kept.append(CellOutcome(**{**values, "attempt": 2}))
        else:
            kept.append(outcome)
    return kept


def test_a_rerun_is_judged_three_ways_over_the_whole_family() -> None:
    arms = {
        "s0": [100.0] * 8,
        "s1": [150.0 + seed for seed in range(8)],
        "s2": [160.0 + 2 * seed for seed in range(8)],
    }
    outcomes = cells("q1", arms)
    assert rerun_sensitivity(outcomes) == {}
    [(family, scenarios)] = rerun_sensitivity(rerun(outcomes, "s2", 3)).items()
    assert family == "q1"
    a, b, c = (scenario.decisions for scenario in scenarios)
    assert a["S2/S1 at b63"].p == 2 / 2**8
    assert b["S2/S1 at b63"].p == 2 / 2**7  # one seed less
    assert c["S2/S1 at b63"].p == 1.0
    assert a["S1/S0 at b63"].p == b["S1/S0 at b63"].p == c["S1/S0 at b63"].p  # not affected
    assert [scenario.num_rejected for scenario in scenarios] == [2, 2, 1]


def test_level_is_said_where_the_interval_lies_within_the_margin() -> None:
    """100 ln of the ratios: -1, 0, 1, so 0 +- 2.92 / sqrt(3) = 1.69; five times as far apart, 8.43."""
    s0 = [100.0, 100.0, 100.0]
    near, far = ([100 * math.exp(step * size) for step in (-1, 0, 1)] for size in (0.01, 0.05))
    rows = analyse(cells("q1", {"s0": s0, "s1": near}) + cells("q1", {"s0": s0, "s1": far}, budget="b83"))
    assert [row_of(rows, "S1/S0", where).contained for where in ("b63", "b83")] == [True, False]
    sentence = verdict("q1", rows).sentence
    assert sentence.startswith("S1 is within 3 % of S0 by the 90 % interval at b63 (+0.0 %, -2.5 to +2.5)")
    assert "and is not told apart from S0 at b83 (+0.1 %, -11.7 to +13.2)" in sentence
    assert analyse(cells("q1", {"s0": [100.0], "s1": [100.0]}))[0].contained is None


# --- two looks: cases whose seeds were looked at after six, then nine ------------------------------------------------

NINE = [98.0, 97.0, 99.0, 96.0, 98.5, 97.5, 99.5, 96.5, 98.0]


@pytest.mark.parametrize(
    ("d0", "p"),
    [
        (NINE, 2 * 2 / 512),  # all nine below: the second look is the smaller
        (NINE[:6], 2 * 2 / 64),  # no second look was made
        (NINE[:3], 2 * 2 / 8),
        ([*NINE[:6], 130.0, 131.0, 132.0], 2 * 2 / 64),  # the first look was the smaller
    ],
)
def test_tests_of_the_original_five_pay_for_two_looks(d0: list[float], p: float) -> None:
    for case, changes in (("q5", {}), ("bursts", {"variant": "onoff"}), ("caps", {"cap": 8})):
        [row] = analyse(cells(case, {"d0": d0, "s2": [100.0] * len(d0)}, **changes))
        assert (row.p, row.num_looks) == (p, 2)
        assert row.decision is not None
        assert row.decision.adjusted_p == p
    [row] = analyse(cells("q4", {"d0": NINE, "s2": [100.0] * 9}))
    assert (row.p, row.num_looks) == (2 / 512, 1)


def test_the_first_look_is_at_the_seeds_that_were_planned_for_it() -> None:
    """Seed 2 has failed: the first look has five seeds and not seed 7 in its place."""
    [row] = analyse(cells("q5", {"d0": [98.0, None, *NINE[2:6], 130.0], "s2": [100.0] * 7}))
    assert row.p == 2 * 2 / 32


def test_six_seeds_are_too_few_for_a_test_with_two_looks() -> None:
    sentence = verdict("q5", analyse(cells("q5", {"d0": NINE[:6], "s2": [100.0] * 6}))).sentence
    assert sentence.endswith("6 paired seeds, too few for the sign-flip test (least p 0.062, 1 tests).")
