"""Search for the page geometry that wastes least for a model and a mix.

The paper took its 512-token grid over from an earlier path and did not tune it (section 3.2). Searched here: tokens
per page and planes. The other two sizes follow from those without loss: members per checkpoint are the fewest pages
that hold the heads, the slot stride is the shortest that divides a page. The measure is payload / allocated bytes of
the mix; `Mix.requests` adds the half-empty last block of each sequence, without which small pages look free.
"""

from __future__ import annotations

import msgspec

from sgl_hybrid.errors import SettingError
from sgl_hybrid.memory.cost import Cost, Mix, cost
from sgl_hybrid.memory.geometry import StateGeometry
from sgl_hybrid.memory.organization import Layout, Organization, organization_of, valid_layouts

STEP_TOKENS = 16
MAX_TOKENS = 2048


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One valid page geometry and what the mix costs in it."""

    layout: Layout
    cost: Cost

    @property
    def efficiency(self) -> float:
        """Payload bytes / allocated bytes."""
        return self.cost.efficiency


class PageSolution(msgspec.Struct, frozen=True, kw_only=True):
    """Candidates, least waste first, and the organization's own page (None where it does not fit the model)."""

    candidates: tuple[Candidate, ...]
    preset: Candidate | None

    @property
    def best(self) -> Candidate:
        return self.candidates[0]


def solve_pages(
    org: str | Organization, geometry: StateGeometry, mix: Mix, *, max_tokens: int = MAX_TOKENS
) -> PageSolution:
    """Rank every valid page of 16, 32, ... `max_tokens` tokens by payload efficiency for the mix.

    One candidate per page size, with its best planes; of equally efficient pages the larger comes first, because it
    needs fewer page ids per checkpoint.

    Raises:
        SettingError: an empty mix, or no page in the range fits the model.
    """
    organization = organization_of(org) if isinstance(org, str) else org
    if mix.attention == 0 and mix.checkpoints == 0:
        raise SettingError("expected a mix with at least one attention object or checkpoint, got an empty mix")
    sizes = range(STEP_TOKENS, max_tokens + 1, STEP_TOKENS)
    best: dict[int, Candidate] = {}
    for planes in plane_choices(geometry) if organization.shared else [geometry.planes]:
        for layout in valid_layouts(organization, geometry, sizes, planes=planes):
            candidate = Candidate(layout=layout, cost=cost(layout, mix))
            known = best.get(layout.page_tokens)
            if known is None or _rank(candidate) < _rank(known):
                best[layout.page_tokens] = candidate
    if not best:
        raise SettingError(
            f"expected a page of at most {max_tokens} tokens that fits {geometry.name} in {organization.name}, "
            "got none; nearest: a larger max_tokens"
        )
    own = range(organization.page_tokens, organization.page_tokens + 1)
    preset = next(valid_layouts(organization, geometry, own, planes=geometry.planes), None)
    return PageSolution(
        candidates=tuple(sorted(best.values(), key=_rank)),
        preset=None if preset is None else Candidate(layout=preset, cost=cost(preset, mix)),
    )


def plane_choices(geometry: StateGeometry) -> list[int]:
    """Return the plane counts worth trying: divisors of either layer count, where one kind pads nothing."""
    counts = (len(geometry.attention_layers), len(geometry.recurrent_layers))
    return [planes for planes in range(max(counts), 0, -1) if any(count % planes == 0 for count in counts)]


def _rank(candidate: Candidate) -> tuple[int, int, int]:
    layout = candidate.layout
    return candidate.cost.total_bytes, -layout.page_tokens, -layout.planes
