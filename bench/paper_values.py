"""What the paper printed, to stand beside our own numbers: Falcon-H1-7B on one A100 in a modified vLLM.

Relative effects and token counts compare with a nano model on a CPU; seconds and tokens per second do not.
`tests/unit/test_bench_paper_values.py` holds these to the paper's tables. Source: arXiv:2610.15755v1.
"""

from __future__ import annotations

from typing import NamedTuple

from bench.outcome import Condition

HARDWARE = "Falcon-H1-7B, A100, modified vLLM"
CEILING_TOKENS_PER_S = 708.2
"""Highest mean throughput that the paper prints (S2, Table E-4): its ceiling is at least that."""
OUTPUT_TOKENS_PER_REQUEST = 72_908 / 300
"""Source: Table E-6, 72,608 decode tokens a run and a first token for each of its 300 requests."""


class PaperEffect(NamedTuple):
    """One printed effect: mean over seeds in percent (an interaction: points), interval and corrected p where printed.

    case, name: as in `bench.stats.rows.Row`. The rest is its condition, whole: the main load unless said otherwise.
    """

    case: str
    name: str
    budget: str
    effect: float
    source: str
    p: float | None = None
    low: float | None = None
    high: float | None = None
    q: float = 1.0
    rate: float = 3.0
    cap: int = 63
    headroom: float = 0.0
    variant: str = ""

    def matches(self, case: str, name: str, at: Condition) -> bool:
        """Return whether this is the paper's value of a contrast of ours."""
        own = Condition(self.case, self.budget, self.q, self.rate, self.cap, self.headroom, self.variant)
        return (self.case, self.name) == (case, name) and own == at


_LEAST_22, _LEAST_17 = 0.01074219, 0.00830078
_SPLITS = ("split=0.427383", "split=0.477383", "split=0.577383", "split=0.627383")
_PINNING, _REUSE = "D0/S2, pin K 1 instead of 3", "S2-retained/S2, share instead of isolate"

EFFECTS = (
    PaperEffect("q1", "S1/S0", "b63", 51.784, "Table B-5", _LEAST_22),
    PaperEffect("q1", "S1/S0", "b83", 47.568, "Table B-5", _LEAST_22),
    PaperEffect("q1", "S1/S0", "b108", 56.235, "Table B-5", _LEAST_22),
    PaperEffect("q1", "S2/S1", "b63", 8.929, "Table B-5", _LEAST_22),
    PaperEffect("q1", "S2/S1", "b83", 12.628, "Table B-5", _LEAST_22),
    PaperEffect("q1", "S2/S1", "b108", 9.972, "Table B-5", 0.03662109),
    PaperEffect("q2", "S1/S0", "b63", 51.4997, "Table E-2"),
    PaperEffect("q2", "S2/S1", "b63", 9.4512, "Table E-2"),
    PaperEffect("q2", "S1/S0", "b108", 46.6513, "Table E-2", rate=4.5, cap=109),
    PaperEffect("q2", "S2/S1", "b108", 9.2296, "Table E-2", rate=4.5, cap=109),
    PaperEffect("q2", "S1/S0", "b83", 37.945, "Table G-2", q=0.0),
    PaperEffect("q2", "S2/S1", "b83", 2.586, "Table G-2", q=0.0),
    *(
        PaperEffect(case, "D0/S2", budget, effect, "section 5.3", p)
        for case in ("q1", "q4")
        for budget, effect, p in (("b63", 4.978, 0.01074), ("b83", -1.728, None), ("b108", -12.556, 0.01074))
    ),
    PaperEffect("q3", "S1/S0", "b83", 37.945, "Table G-2", q=0.0),
    PaperEffect("q3", "S1/S0", "b83", 38.797, "Table G-2", q=0.5),
    PaperEffect("q3", "S1/S0", "b83", 47.568, "Table G-2"),
    PaperEffect("q3", "S2/S1", "b83", 2.586, "Table G-2", q=0.0),
    PaperEffect("q3", "S2/S1", "b83", 4.150, "Table G-2", q=0.5),
    PaperEffect("q3", "S2/S1", "b83", 12.628, "Table G-2"),
    PaperEffect("q3", "D0/S2", "b83", -3.294, "Table G-2", q=0.0),
    PaperEffect("q3", "D0/S2", "b83", 3.291, "Table G-2", q=0.5),
    PaperEffect("q3", "D0/S2", "b83", -1.728, "Table G-2"),
    PaperEffect("q3", "S1/S0, q 1 instead of 0", "b83", 9.623, "section 5.2", 0.01074),
    PaperEffect("q3", "S2/S1, q 1 instead of 0", "b83", 10.043, "section 5.2", 0.01074),
    PaperEffect("q3", "D0/S2, q 1 instead of 0", "b83", 1.566, "sections E.6, G.1", 0.41113),
    PaperEffect("q5", "D0/S2", "b63", 3.64, "Table E-5", 0.3750),
    PaperEffect("q5", "D0/S2", "b108", -13.17, "section 5.3, six seeds", cap=109),
    PaperEffect("q5", "D0/S2", "b108", -5.97, "Table E-5", 0.0391, rate=4.5, cap=109),
    PaperEffect("q6", "D0/S2", "b63", 4.431, "Table B-7", _LEAST_17, 2.911, 5.944),
    PaperEffect("q6", "D0/S2", "b63", -8.420, "Table B-7", _LEAST_17, -9.836, -6.756, headroom=0.19),
    PaperEffect("q6", "D0/S2, headroom 0 and 0.27", "b63", -8.013, "Table B-7", _LEAST_17, -9.863, -6.147),
    PaperEffect("q6", "D0/S2", "b83", -3.269, "Table B-7", 0.30761719, -7.084, -0.023),
    PaperEffect("q6", "D0/S2", "b83", -16.348, "Table B-7", _LEAST_17, -17.783, -14.731, headroom=0.19),
    PaperEffect("q6", "D0/S2, headroom 0.1 and 0.35", "b83", -16.218, "Table B-7", _LEAST_17, -17.395, -15.095),
    PaperEffect("q6", "D0/S2", "b108", -14.070, "Table B-7", _LEAST_17, -16.428, -11.842),
    PaperEffect("q6", "D0/S2", "b108", -11.993, "Table B-7", _LEAST_17, -14.429, -9.644, headroom=0.19),
    PaperEffect("q6", "D0/S2, headroom 0.1 and 0", "b108", -11.936, "Table B-7", _LEAST_17, -14.211, -9.697),
    *(
        PaperEffect(
            "q6", f"{arm}, headroom {f:g} instead of 0", budget, effect, "Table B-7", _LEAST_17, low, high, headroom=f
        )
        for arm, budget, f, effect, low, high in (
            ("S2", "b63", 0.27, 13.613, 11.658, 15.393),
            ("D0", "b83", 0.10, 2.857, 2.559, 3.139),
            ("S2", "b83", 0.35, 18.808, 14.047, 23.214),
            ("D0", "b108", 0.10, 2.501, 1.789, 3.231),
        )
    ),
    PaperEffect("caps", "D0/S2", "b63", -8.34, "Table E-5", 0.0391, rate=1.7, cap=8),
    *(
        PaperEffect("caps", "D0/S2", budget, gap, "Table E-11", rate=1.7, cap=cap)
        for budget, gaps in (
            ("b63", {63: -0.98, 3: -3.48, 5: -5.88, 6: -9.06}),
            ("b108", {109: -0.43, 5: -8.59, 8: -7.82, 10: -4.22, 13: -2.66}),
        )
        for cap, gap in gaps.items()
    ),
    PaperEffect("bursts", "D0/S2", "b63", -0.37, "Table E-5", 0.5469, rate=1.7, variant="onoff"),
    *(
        PaperEffect("split", f"D0, {split} instead of the default", budget, effect, "Table E-12", p, variant=split)
        for budget, settings in (
            ("b63", ((-2.480, 0.01074), (0.850, 0.03955), (-4.311, 0.01074), (-10.959, 0.01074))),
            ("b108", ((0.867, 0.03662), (1.854, 0.01074), (-6.150, 0.01074), (-13.779, 0.01074))),
        )
        for split, (effect, p) in zip(_SPLITS, settings, strict=True)
    ),
    *(
        PaperEffect("pinning", "D0/S2", budget, gap, "Table E-15", rate=rate, cap=cap, variant=f"pin={k}")
        for budget, rate, cap, gaps in (
            ("b108", 4.5, 109, {"off": -4.74, "3": -4.46, "2": -4.74, "1": -4.87}),
            ("b63", 3.0, 63, {"off": 3.62, "3": 3.24, "2": 3.64, "1": 3.68}),
        )
        for k, gap in gaps.items()
    ),
    PaperEffect("pinning", _PINNING, "b108", -0.4097, "Table E-16", 0.875, rate=4.5, cap=109, variant="pin=1"),
    PaperEffect("pinning", _PINNING, "b63", 0.4425, "Table E-16", 0.875, variant="pin=1"),
    PaperEffect("q9", _REUSE, "b83", 14.3043, "Table G-7", None, -0.1057, 30.7930, variant="share"),
    PaperEffect("q9", "S2-retained/S2", "b83", 15.2563, "Table G-7", None, 0.7993, 31.7867, variant="share"),
    PaperEffect("q9", "S2-retained/S2", "b83", 0.8328, "Table G-7", None, -1.3181, 3.0306, variant="isolate"),
)


def paper_effect(case: str, name: str, at: Condition) -> PaperEffect | None:
    """Return what the paper printed for a contrast of ours, or None if it printed nothing for it."""
    return next((effect for effect in EFFECTS if effect.matches(case, name, at)), None)


LATENCY_QUALIFIED_PCT: dict[tuple[str, float, int | None, str], tuple[float, float]] = {
    ("b63", 3.0, 63, ""): (3.57, 5.08),
    ("b108", 4.5, 109, ""): (-27.63, -17.43),
    ("b63", 1.7, 8, ""): (-58.93, -29.33),
    ("b63", 1.7, 63, "onoff"): (-17.45, -8.48),
}
"""D0 over S2 within limits of S2 and of the union, by budget, rate, cap and variant. Source: Table E-13."""

LOW_LOAD_TTFT_P99_S = {
    "b63": {"s0": 3.687, "s1": 0.578, "s2": 0.686},
    "b108": {"s0": 0.500, "s1": 0.430, "s2": 0.657},
}
"""Mean of run-level p99 at 0.8 requests/s. Source: section 5.1, Figure 2(c, d)."""

LOW_LOAD_WAITING_MAX = {
    "b63": {"s0": (3, 5), "s1": (0, 0), "s2": (0, 1)},
    "b108": dict.fromkeys(("s0", "s1", "s2"), (0, 0)),
}
"""Range over runs of the largest sampled number of waiting requests. Source: Figure 2, micro-tables."""

C_ONCE_TOKENS = {
    "b63": {"s0": 766_252.3, "s1": 702_764.3, "s2": 612_481.7},
    "b108": {"s0": 697_815.0, "s1": 498_476.3, "s2": 430_039.0},
}
"""Recorded input tokens a run, at 3 and 4.5 requests/s. Source: Table E-1, Figure 3(a)."""

NO_SHARING_INDEX = {"s0": 1.0, "s1": 1.379451456, "s2": 1.415129435}
"""Throughput normalized to S0 within the seed, b83, q = 0. Source: section G.1, Figure 3(b)."""

HEADROOM_REQUESTS_PER_S = {
    "b63": {"d0": (1.9182, 1.9249, 1.8764, 1.8149, 1.7103), "s2": (1.8381, 1.9704, 2.0506, 2.0877, 2.0430)},
    "b83": {"d0": (2.1671, 2.2290, 2.2074, 2.1352, 2.0261), "s2": (2.2514, 2.4400, 2.6413, 2.6961, 2.6620)},
    "b108": {"d0": (2.4063, 2.4665, 2.4636, 2.4126, 2.3280), "s2": (2.8055, 2.8056, 2.8043, 2.8049, 2.8047)},
}
"""At headroom 0, 0.10, 0.19, 0.27, 0.35. Source: Table B-8; the throughputs of Figure 6 are only drawn."""
HEADROOMS = (0.0, 0.10, 0.19, 0.27, 0.35)

HEADROOM_DEPTH_TOKENS = {0.0: (1_338.0, 1_583.8, 1_705.0), 0.19: (2_123.1, 2_234.0, 2_259.6)}
"""J_adopt = R_max of S2 at b83 by headroom, seeds 76600 to 76602, tokens/request. Source: section G.2, Figure 7(a)."""

RETENTION_DEPTH_TOKENS = {"s2": (2_266.45, 1_472.85, 1_846.61), "s2-retained": (2_969.60, 2_911.57, 2_938.88)}
"""J_adopt, seeds 79010 to 79012, tokens/request. Source: Table G-3, Figure 7(b)."""

RETENTION_GEOMEANS = {"isolate": {"s2": 371.42, "s2-retained": 374.52}, "share": {"s2": 513.70, "s2-retained": 592.07}}
"""Ledger throughput, geometric mean over six seeds, tokens/s. Source: Table G-6, Figure 7(c)."""
