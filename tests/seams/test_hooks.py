"""A seam that does not fit the installed SGLang is an error before anything is served."""

from __future__ import annotations

import importlib
from pkgutil import iter_modules

import pytest

from sgl_hybrid import seams
from sgl_hybrid.errors import SettingError
from sgl_hybrid.seams import compat, hooks
from sgl_hybrid.seams.hooks import Seam


def _unused(result: object, *args: object) -> None:
    return None


@pytest.mark.parametrize(
    ("target", "parameters", "words"),
    [
        ("sglang.srt.server_args.ServerArgs.no_such_method", (), "no_such_method"),
        ("sglang.no_such_module.function", (), "no_such_module"),
        ("sglang.srt.server_args.ServerArgs.url", ("socket",), r"url\(socket\)"),
    ],
)
def test_a_seam_that_does_not_fit_is_refused(target: str, parameters: tuple[str, ...], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        hooks.apply([Seam(target, "after", _unused, parameters, "test")])
    assert target not in {seam.target for seam in hooks.applied()}


def test_every_seam_fits_the_pinned_version() -> None:
    compat.check_version()
    modules = [importlib.import_module(f"{seams.__name__}.{found.name}") for found in iter_modules(seams.__path__)]
    found = [seam for module in modules for seam in getattr(module, "SEAMS", ()) + getattr(module, "POOL_SEAMS", ())]
    assert len(found) > 30
    for seam in found:
        hooks._check_signature(seam)
        assert seam.reason


def test_a_second_hook_at_a_seam_is_refused_and_the_same_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    seam = Seam("sglang.srt.server_args.ServerArgs.url", "after", _unused, (), "test")
    monkeypatch.setitem(hooks._applied, seam.target, seam)
    hooks.apply([seam])
    with pytest.raises(SettingError, match="expected one hook"):
        hooks.apply([seam._replace(hook=lambda result, *args: None)])


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "version", lambda name: "0.5.24")
    with pytest.raises(SettingError, match=r"sglang==0\.5\.23, got 0\.5\.24"):
        compat.check_version()
