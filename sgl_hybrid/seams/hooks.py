"""The table of places where SGLang is touched, and the one function that applies it.

A `Seam` names a target in SGLang, how it is hooked, why, and the parameters that the hook relies on. `apply` checks the
signature of every target first, applies all hooks through SGLang's registry, and reports any that did not take: SGLang
itself logs such a failure and goes on, which would silently serve another memory organization than the one asked for.

Source: SGLang 0.5.23, `sglang/srt/plugins/hook_registry.py`.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from sgl_hybrid.errors import SettingError


class Seam(NamedTuple):
    """One hook. `target`: dotted path. `kind`: after, around, before or replace. `parameters`: names the target must
    accept, in order (empty for a class). `reason`: one phrase for the documentation."""

    target: str
    kind: str
    hook: Callable[..., Any] | type
    parameters: tuple[str, ...]
    reason: str


_applied: dict[str, Seam] = {}


def applied() -> tuple[Seam, ...]:
    """All seams that took in this process, in the order in which they were applied."""
    return tuple(_applied.values())


def apply(seams: Iterable[Seam]) -> None:
    """Check and apply the seams that this process has not applied yet.

    Raises:
        SettingError: a target is missing, has another signature than expected or another hook, or SGLang refused it.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    pending = []
    for seam in seams:
        if seam.target not in _applied:
            _check_signature(seam)
            pending.append(seam)
        elif _applied[seam.target].hook is not seam.hook:
            raise SettingError(f"expected one hook at the seam {seam.target}, got another one beside it")
    for seam in pending:
        HookRegistry.register(seam.target, seam.hook, HookType(seam.kind))
    HookRegistry.apply_hooks()
    for seam in pending:
        if seam.target not in HookRegistry._patched:
            raise SettingError(f"expected the seam {seam.target} to apply, got a refusal (see SGLang's log above)")
        _applied[seam.target] = seam


def _check_signature(seam: Seam) -> None:
    try:
        target = pkgutil.resolve_name(seam.target)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingError(f"expected the seam {seam.target} in SGLang, got {type(error).__name__}: {error}") from error
    if not callable(target):
        raise SettingError(f"expected the seam {seam.target} to be callable, got {type(target).__name__}")
    if isinstance(target, type):
        return
    accepted = tuple(name for name in inspect.signature(target).parameters if name not in ("self", "cls"))
    if accepted[: len(seam.parameters)] != seam.parameters:
        raise SettingError(
            f"expected the seam {seam.target}({', '.join(seam.parameters)}), got ({', '.join(accepted)})"
        )
