"""The page search: it finds what brute force finds, and its preset row is the organization's own page."""

from __future__ import annotations

import pytest

from sgl_hybrid.errors import SettingError
from sgl_hybrid.memory import layout_for
from sgl_hybrid.memory.cost import Mix, cost
from sgl_hybrid.memory.presets import model_geometry
from sgl_hybrid.memory.solver import plane_choices, solve_pages

MIX = Mix(attention=120, checkpoints=16)


@pytest.mark.parametrize("org", ["s0", "s1", "s2", "d0"])
@pytest.mark.parametrize("model", ["falcon-h1-7b", "nemotron-nano-9b-v2", "zamba2-2.7b"])
def test_no_valid_page_beats_the_first_candidate(org: str, model: str) -> None:
    geometry, mix = model_geometry(model), Mix(attention=33, checkpoints=5, requests=4)
    solution = solve_pages(org, geometry, mix, max_tokens=640)
    totals = []
    for tokens in range(16, 641, 16):
        for planes in plane_choices(geometry):
            try:
                totals.append(cost(layout_for(org, geometry, page_tokens=tokens, planes=planes), mix).total_bytes)
            except SettingError:
                continue
    assert solution.best.cost.total_bytes == min(totals)
    efficiencies = [candidate.efficiency for candidate in solution.candidates]
    assert efficiencies == sorted(efficiencies, reverse=True)
    assert len({candidate.layout.page_tokens for candidate in solution.candidates}) == len(efficiencies)


def test_the_papers_page_is_shown_beside_the_best() -> None:
    geometry = model_geometry("falcon-h1-7b")
    solution = solve_pages("s2", geometry, MIX)
    assert solution.preset is not None
    assert solution.preset.layout == layout_for("s2", geometry)
    payload, allocated = 120 * 512 + 16 * 1557, 120 * 512 + 16 * 1536 + 512
    assert solution.preset.efficiency == payload / allocated
    assert solution.best.efficiency >= solution.preset.efficiency


@pytest.mark.parametrize(
    ("model", "page_tokens", "at_least", "preset_below"),
    [("nemotron-nano-9b-v2", 640, 0.995, 0.77), ("falcon-h1-0.5b", 768, 0.999, 0.95), ("zamba2-2.7b", 32, 0.999, 0.6)],
)
def test_models_whose_heads_do_not_fill_512_tokens_gain(
    model: str, page_tokens: int, at_least: float, preset_below: float
) -> None:
    solution = solve_pages("s2", model_geometry(model), MIX)
    assert solution.best.layout.page_tokens == page_tokens
    assert solution.best.efficiency > at_least
    assert solution.preset is not None
    assert solution.preset.efficiency < preset_below


def test_half_empty_last_blocks_favour_small_pages() -> None:
    geometry = model_geometry("granite-4.0-h-micro")
    full = solve_pages("s2", geometry, MIX).best.layout.page_tokens
    ragged = solve_pages("s2", geometry, Mix(attention=120, checkpoints=16, requests=64)).best.layout.page_tokens
    assert ragged < full == 512


def test_a_preset_that_does_not_fit_is_absent() -> None:
    solution = solve_pages("s2", model_geometry("nemotron-nano-9b-v2", ssm_dtype="float32"), MIX)
    assert solution.preset is None
    assert solution.best.layout.page_tokens in (640, 1280)


def test_an_empty_mix_or_range_is_refused() -> None:
    geometry = model_geometry("falcon-h1-7b")
    with pytest.raises(SettingError, match="at least one attention object or checkpoint, got an empty mix"):
        solve_pages("s2", geometry, Mix(attention=0, checkpoints=0))
    with pytest.raises(
        SettingError, match="expected a page of at most 48 tokens that fits falcon-h1-7b in s2, got none"
    ):
        solve_pages("s2", geometry, MIX, max_tokens=48)
