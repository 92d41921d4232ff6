"""Memory organizations as plain arithmetic: geometry, layouts, cost, capacity and budgets, without torch or SGLang."""

from sgl_hybrid.memory.budget import Budget, Units, minimum_budget, parse_budget, plan_units
from sgl_hybrid.memory.geometry import StateGeometry
from sgl_hybrid.memory.organization import ORGANIZATIONS, Layout, Organization, layout_for

__all__ = [
    "ORGANIZATIONS",
    "Budget",
    "Layout",
    "Organization",
    "StateGeometry",
    "Units",
    "layout_for",
    "minimum_budget",
    "parse_budget",
    "plan_units",
]
