"""The planner's answer as plain records: one per organization, plus the D0 split and the page search.

Records are what `--json` prints. Names end in their unit; `_plane_bytes` is one plane (the paper's layer scope),
`_total_bytes` all planes. A part that was not asked for is None.
"""

from __future__ import annotations

import msgspec

from sgl_hybrid.errors import SettingError
from sgl_hybrid.memory.budget import Budget, Units, admission_budget, plan_units
from sgl_hybrid.memory.cost import Mix, PoolFit, capacity, cost, pool_fits
from sgl_hybrid.memory.geometry import StateGeometry
from sgl_hybrid.memory.organization import ORGANIZATIONS, Layout, layout_for
from sgl_hybrid.memory.solver import Candidate, solve_pages
from sgl_hybrid.memory.split import PAPER_FRACTIONS, auto_fraction, mix_range, resolve_fraction, worst_stranded_share

SHOWN_CANDIDATES = 5


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked: a model and the optional budget, mix, context and overrides.

    Page and grid overrides change the shared organizations; they change a dual pool only when it is asked for alone.
    """

    geometry: StateGeometry
    organizations: tuple[str, ...]
    budget: Budget | None = None
    mix: Mix | None = None
    context_tokens: int | None = None
    page_tokens: int | None = None
    checkpoint_interval: int | None = None
    attention_fraction: str | None = None


class BoughtUnits(msgspec.Struct, frozen=True, kw_only=True):
    """Whole units of a budget and their bytes. Shared pools have pages, D0 attention pages and checkpoints."""

    num_pages: int | None
    num_attention_pages: int | None
    num_checkpoints: int | None
    attention_fraction: float | None
    plane_bytes: int
    total_bytes: int


class MixAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of the mix, and with a budget whether and how often it fits (ideal packing)."""

    plane_bytes: int
    total_bytes: int
    efficiency: float
    pools: tuple[PoolFit, ...] | None = None
    fits: bool | None = None
    capacity: int | None = None


class OrganizationAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One organization for this model; `refusal` says why it has no layout, and then the rest is absent."""

    organization: str
    refusal: str | None = None
    page_tokens: int | None = None
    checkpoint_interval: int | None = None
    attention_page_bytes: int | None = None
    recurrent_page_bytes: int | None = None
    attention_planes: int | None = None
    recurrent_planes: int | None = None
    groups: int | None = None
    members: int | None = None
    heads_per_member: int | None = None
    conv_placement: str | None = None
    slots_per_slab: int | None = None
    conv_stride_bytes: int | None = None
    object_total_bytes: int | None = None
    checkpoint_total_bytes: int | None = None
    units: BoughtUnits | None = None
    mix: MixAnswer | None = None
    minimum_total_bytes: int | None = None


class SplitAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """D0's attention fraction: the one used, the automatic one, the paper's, and their worst stranded shares."""

    used: float
    auto: float
    paper: float | None
    auto_minus_paper: float | None
    low_tokens_per_checkpoint: float
    high_tokens_per_checkpoint: float
    worst_stranded_used: float
    worst_stranded_auto: float
    worst_stranded_paper: float | None


class PageAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One page geometry and the payload efficiency of the mix in it."""

    page_tokens: int
    planes: int
    members: int
    slots_per_slab: int
    conv_stride_bytes: int
    page_bytes: int
    efficiency: float


class SearchAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Page search of one organization: the best few, and the organization's own page (None: it does not fit)."""

    organization: str
    best: tuple[PageAnswer, ...]
    preset: PageAnswer | None


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the planner says about one request.

    `fitting` are the organizations that hold the mix in the budget, most copies first, then fewest bytes; `leanest`
    takes the fewest bytes for the mix among those that hold it (among all when none does).
    """

    model: str
    family: str
    tp_size: int
    num_layers: int
    num_attention_layers: int
    num_recurrent_layers: int
    planes: int
    kv_token_bytes: int
    ssm_bytes: int
    conv_bytes: int
    composite_bytes: int
    budget_unit_bytes: int
    budget: str | None
    budget_plane_bytes: int | None
    budget_total_bytes: int | None
    organizations: tuple[OrganizationAnswer, ...]
    split: SplitAnswer | None
    searches: tuple[SearchAnswer, ...] | None
    fitting: tuple[str, ...] | None
    leanest: str | None


def answer(request: Request) -> Answer:
    """Compute the whole answer.

    An organization whose own page does not fit the model is reported as a refusal beside the others.

    Raises:
        SettingError: none of them fits, an override does not fit one of them, or the budget or mix cannot be used.
    """
    geometry = request.geometry
    organizations = tuple(_organization(request, name) for name in request.organizations)
    refusals = [entry.refusal for entry in organizations if entry.refusal]
    if len(refusals) == len(organizations):
        raise SettingError(refusals[0])
    mix, shared = request.mix, [name for name in request.organizations if ORGANIZATIONS[name].shared]
    return Answer(
        model=geometry.name,
        family=geometry.family,
        tp_size=geometry.tp_size,
        num_layers=geometry.num_layers,
        num_attention_layers=len(geometry.attention_layers),
        num_recurrent_layers=len(geometry.recurrent_layers),
        planes=geometry.planes,
        kv_token_bytes=geometry.kv_token_bytes,
        ssm_bytes=geometry.ssm_bytes,
        conv_bytes=geometry.conv_bytes,
        composite_bytes=geometry.composite_bytes,
        budget_unit_bytes=geometry.budget_unit_bytes,
        budget=request.budget.text if request.budget else None,
        budget_plane_bytes=request.budget.plane_bytes if request.budget else None,
        budget_total_bytes=request.budget.total_bytes if request.budget else None,
        organizations=organizations,
        split=_split(geometry, request.attention_fraction) if "d0" in request.organizations else None,
        searches=tuple(_search(name, geometry, mix) for name in shared) if mix else None,
        fitting=_fitting(organizations) if mix and request.budget else None,
        leanest=_leanest(organizations) if mix else None,
    )


def _fitting(organizations: tuple[OrganizationAnswer, ...]) -> tuple[str, ...]:
    ranks = {e.organization: (-(e.mix.capacity or 0), e.mix.total_bytes) for e in organizations if e.mix and e.mix.fits}
    return tuple(sorted(ranks, key=lambda name: ranks[name]))


def _leanest(organizations: tuple[OrganizationAnswer, ...]) -> str:
    costs = {e.organization: (not e.mix.fits, e.mix.total_bytes) for e in organizations if e.mix}
    return min(costs, key=lambda name: costs[name])


def _organization(request: Request, name: str) -> OrganizationAnswer:
    overridden = ORGANIZATIONS[name].shared or len(request.organizations) == 1
    try:
        layout = layout_for(
            name,
            request.geometry,
            page_tokens=request.page_tokens if overridden else None,
            checkpoint_interval=request.checkpoint_interval if overridden else None,
        )
    except SettingError as error:
        if request.page_tokens is not None or request.checkpoint_interval is not None:
            raise
        return OrganizationAnswer(organization=name, refusal=str(error))
    units = None
    if request.budget:
        units = plan_units(layout, request.budget, attention_fraction=request.attention_fraction)
    minimum = None
    if request.context_tokens is not None:
        minimum = admission_budget(
            layout, context_tokens=request.context_tokens, attention_fraction=request.attention_fraction
        )
    return OrganizationAnswer(
        organization=name,
        page_tokens=layout.page_tokens,
        checkpoint_interval=layout.checkpoint_interval,
        attention_page_bytes=layout.attention_page_bytes,
        recurrent_page_bytes=layout.recurrent_page_bytes,
        attention_planes=layout.attention_planes,
        recurrent_planes=layout.recurrent_planes,
        groups=layout.groups,
        members=layout.members,
        heads_per_member=layout.heads_per_member,
        conv_placement=layout.conv_placement,
        slots_per_slab=layout.slots_per_slab,
        conv_stride_bytes=layout.conv_stride_bytes,
        object_total_bytes=cost(layout, Mix(attention=1, checkpoints=0)).total_bytes,
        checkpoint_total_bytes=cost(layout, Mix(attention=0, checkpoints=1)).total_bytes,
        units=_bought(units) if units else None,
        mix=_mix(layout, units, request.mix) if request.mix else None,
        minimum_total_bytes=minimum.budget.total_bytes if minimum else None,
    )


def _bought(units: Units) -> BoughtUnits:
    shared = units.layout.shared
    return BoughtUnits(
        num_pages=units.num_pages if shared else None,
        num_attention_pages=None if shared else units.num_attention_pages,
        num_checkpoints=None if shared else units.num_checkpoints,
        attention_fraction=units.attention_fraction,
        plane_bytes=units.plane_bytes,
        total_bytes=units.total_bytes,
    )


def _mix(layout: Layout, units: Units | None, mix: Mix) -> MixAnswer:
    mix_cost = cost(layout, mix)
    pools = pool_fits(units, mix) if units else None
    return MixAnswer(
        plane_bytes=mix_cost.plane_bytes,
        total_bytes=mix_cost.total_bytes,
        efficiency=mix_cost.efficiency,
        pools=pools,
        fits=all(pool.fits for pool in pools) if pools else None,
        capacity=capacity(units, mix) if units else None,
    )


def _split(geometry: StateGeometry, setting: str | None) -> SplitAnswer:
    used, auto = resolve_fraction(geometry, setting), auto_fraction(geometry)
    paper = PAPER_FRACTIONS.get(geometry.family)
    low, high = mix_range(geometry)
    return SplitAnswer(
        used=float(used),
        auto=float(auto),
        paper=None if paper is None else float(paper),
        auto_minus_paper=None if paper is None else float(auto - paper),
        low_tokens_per_checkpoint=float(low),
        high_tokens_per_checkpoint=float(high),
        worst_stranded_used=float(worst_stranded_share(geometry, used)),
        worst_stranded_auto=float(worst_stranded_share(geometry, auto)),
        worst_stranded_paper=None if paper is None else float(worst_stranded_share(geometry, paper)),
    )


def _search(name: str, geometry: StateGeometry, mix: Mix) -> SearchAnswer:
    solution = solve_pages(name, geometry, mix)
    return SearchAnswer(
        organization=name,
        best=tuple(_page(candidate) for candidate in solution.candidates[:SHOWN_CANDIDATES]),
        preset=_page(solution.preset) if solution.preset else None,
    )


def _page(candidate: Candidate) -> PageAnswer:
    layout = candidate.layout
    return PageAnswer(
        page_tokens=layout.page_tokens,
        planes=layout.planes,
        members=layout.members,
        slots_per_slab=layout.slots_per_slab,
        conv_stride_bytes=layout.conv_stride_bytes,
        page_bytes=layout.page_bytes,
        efficiency=candidate.efficiency,
    )
