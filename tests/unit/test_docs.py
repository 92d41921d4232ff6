"""The documents say what the source says: seams, flags, counters, version. Links resolve and the site builds."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from radix.eviction import Kind
from sgl_hybrid import metrics
from sgl_hybrid.config import FLAGS, ORGANIZATION_NAMES
from sgl_hybrid.memory.dual_pool import PoolCounts
from sgl_hybrid.platforms import ATTENTION_BACKENDS, Platform
from sgl_hybrid.seams import process
from sgl_hybrid.seams.compat import SGLANG_VERSION
from sgl_hybrid.seams.gpu_arguments import REFUSED
from sgl_hybrid.seams.hooks import Seam
from tests.tiny_server import server_report

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SEAMS = ROOT / "sgl_hybrid" / "seams"
README = ROOT / "README.md"
PAGES = [README, *sorted(DOCS.rglob("*.md"))]


def table(page: Path, *header: str) -> list[tuple[str, ...]]:
    """The rows of the first table of a page with this header."""
    lines = page.read_text(encoding="utf-8").splitlines()
    begin = lines.index("| " + " | ".join(header) + " |") + 2
    rows = []
    for line in lines[begin:]:
        if not line.startswith("|"):
            break
        rows.append(tuple(cell.strip() for cell in line.strip("|").split("|")))
    return rows


def text_of(node: ast.expr, names: Mapping[str, str]) -> str:
    """The value of a string expression made of literals, f-strings and known names."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.FormattedValue):
        return text_of(node.value, names)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(value, names) for value in node.values)
    raise ValueError(f"expected a string of literals and module constants, got {ast.unparse(node)}")


def constants(tree: ast.Module) -> dict[str, str]:
    """The module's names that are bound to strings."""
    names: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                names[node.targets[0].id] = text_of(node.value, names)
            except ValueError:
                continue
    return names


def is_seam(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Seam"


def seam_calls(node: ast.AST, names: Mapping[str, str]) -> Iterator[tuple[ast.Call, Mapping[str, str]]]:
    """Every `Seam(...)` under a node, once for each turn of a comprehension over literals around it."""
    if isinstance(node, ast.GeneratorExp | ast.ListComp) and any(map(is_seam, ast.walk(node.elt))):
        [loop] = node.generators
        assert isinstance(loop.target, ast.Name)
        for value in ast.literal_eval(loop.iter):
            yield from seam_calls(node.elt, {**names, loop.target.id: value})
        return
    if isinstance(node, ast.Call) and is_seam(node):
        yield node, names
    for child in ast.iter_child_nodes(node):
        yield from seam_calls(child, names)


def seams_of(source: str) -> list[tuple[str, str, str]]:
    """(target, kind, reason) of every seam of a source text."""
    tree = ast.parse(source)
    found = []
    for call, names in seam_calls(tree, constants(tree)):
        given = dict(zip(Seam._fields, call.args, strict=False)) | {word.arg: word.value for word in call.keywords}
        target, kind, reason = (text_of(given[field], names) for field in ("target", "kind", "reason"))
        found.append((target, kind, reason))
    return found


def test_the_reader_of_seams_resolves_prefixes_and_loops() -> None:
    source = '_A = "x.y"\n_B = f"{_A}.Z"\nSEAMS = (Seam(f"{_B}.f", "after", hook, (), "why"),\n'
    loop = '    *(Seam(f"{_B}.{n}", kind="around", hook=h, parameters=(), reason="r") for n in ("g", "h")))\n'
    assert seams_of(source + loop) == [
        ("x.y.Z.f", "after", "why"),
        ("x.y.Z.g", "around", "r"),
        ("x.y.Z.h", "around", "r"),
    ]
    with pytest.raises(ValueError, match="_UNKNOWN"):
        seams_of('Seam(_UNKNOWN + ".f", "after", hook, (), "why")')


def test_every_seam_stands_in_the_table() -> None:
    found = {
        (f"`{target}`", kind, f"`{path.stem}`", reason)
        for path in sorted(SEAMS.glob("*.py"))
        for target, kind, reason in seams_of(path.read_text(encoding="utf-8"))
    }
    rows = table(DOCS / "seams.md", "target", "kind", "file", "reason")
    assert len(found) > 10
    assert len(rows) == len(set(rows))
    missing = [f"| {' | '.join(row)} |" for row in sorted(found - set(rows))]
    stale = [row[0] for row in rows if row not in found]
    assert not missing + stale, "\n".join(["missing:", *missing, "stale:", *stale])


def test_every_bound_operator_stands_in_the_table() -> None:
    tree = ast.parse((SEAMS / "cpu_platform.py").read_text(encoding="utf-8"))
    [operators] = [
        node.value
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "OPERATORS"
    ]
    assert isinstance(operators, ast.Dict)
    bound = [f"`{text_of(key, constants(tree))}`" for key in operators.keys if key is not None]
    assert [name for name, _ in table(DOCS / "seams.md", "name", "replacement")] == bound


def sglang_bases(source: str) -> set[str]:
    """Dotted names of SGLang's classes that the classes of a source text extend."""
    tree = ast.parse(source)
    origins = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang.")
        for alias in node.names
    }
    bases = [base for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for base in node.bases]
    return {origins[base.id] for base in bases if isinstance(base, ast.Name) and base.id in origins}


def test_every_base_class_of_sglang_stands_in_the_table() -> None:
    found = {
        (f"`{base}`", f"`{path.stem}`")
        for path in SEAMS.glob("*.py")
        for base in sglang_bases(path.read_text(encoding="utf-8"))
    }
    rows = [(base, file) for base, file, _ in table(DOCS / "seams.md", "base class", "file", "for")]
    assert len(found) > 5
    assert sorted(rows) == sorted(found)


def arguments_set(source: str) -> set[str]:
    """SGLang's arguments that `flags._require` sets or refuses, as options."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.For) and "_require" in ast.unparse(node):
            names.update(ast.literal_eval(node.iter))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "_require":
            names.update(arg.value for arg in node.args[1:2] if isinstance(arg, ast.Constant))
    return {f"--{name.replace('_', '-')}" for name in names}


def test_every_argument_that_is_set_stands_in_the_table() -> None:
    cells = [cell for cell, _ in table(DOCS / "flags.md", "argument of SGLang", "with `--memory-org`")]
    documented = {name for cell in cells for name in re.findall(r"`(--[^`]+)`", cell)}
    assert documented == arguments_set((SEAMS / "flags.py").read_text(encoding="utf-8"))


def test_documents_name_the_version_of_sglang() -> None:
    assert f"SGLang **{SGLANG_VERSION}**" in (DOCS / "seams.md").read_text(encoding="utf-8")
    assert f"SGLang {SGLANG_VERSION}" in README.read_text(encoding="utf-8")
    assert f'"sglang=={SGLANG_VERSION}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_the_page_on_gpus_lists_backends_and_what_is_refused() -> None:
    backends = [
        (f"`{org}`", *(", ".join(f"`{name}`" for name in row[platform]) for platform in Platform))
        for org, row in ATTENTION_BACKENDS.items()
    ]
    assert table(DOCS / "gpu.md", "organization", "on `cpu`", "on `cuda`") == backends
    refused = [(f"`--{row.argument.replace('_', '-')}`", row.reason) for row in REFUSED]
    assert table(DOCS / "gpu.md", "argument of SGLang", "why")[: len(refused)] == refused
    for page in (README, DOCS / "gpu.md"):
        assert "no run on a gpu has been recorded" in page.read_text(encoding="utf-8").lower()


def test_flag_tables_equal_the_flags() -> None:
    options = [f"`{flag.usage}`" for flag in FLAGS]
    helps = [flag.help for flag in FLAGS]
    environments = [f"`{flag.environment}`" for flag in FLAGS]
    assert table(README, "flag", "meaning") == list(zip(options, helps, strict=True))
    flags_page = table(DOCS / "flags.md", "flag", "environment form", "meaning")
    assert flags_page == list(zip(options, environments, helps, strict=True))


def test_every_metric_says_what_it_counts_and_what_not() -> None:
    rows = table(DOCS / "counters.md", "metric", "labels", "counts", "does not count")
    labels = {f"`{metric.name}`": ", ".join(f"`{label}`" for label in metric.labels) for metric in metrics.METRICS}
    assert {name: cell for name, cell, _, _ in rows} == labels
    assert all(counts and does_not for _, _, counts, does_not in rows)


def test_every_kind_of_check_is_explained() -> None:
    rows = table(DOCS / "counters.md", "kind", "when")
    assert [kind for kind, _ in rows] == [f"`{name}`" for name in PoolCounts.__struct_fields__]


def names_of(report: Mapping[str, Any]) -> set[str]:
    """Names of the fields of a report; those of a field of fields with a dot."""
    names = set()
    for name, value in report.items():
        names |= {f"{name}.{inner}" for inner in value} if isinstance(value, dict) and value else {name}
    return names


def test_every_field_of_server_info_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_served", None)
    fields = set[str]().union(*(names_of(server_report(name)) for name in ORGANIZATION_NAMES))
    cells = [cell for cell, _ in table(DOCS / "counters.md", "field", "meaning")]
    assert {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)} == fields


def test_every_kind_of_eviction_is_explained() -> None:
    rows = table(DOCS / "counters.md", "kind", "one decision")
    assert [kind for kind, _ in rows] == [f"`{kind.value}`" for kind in Kind]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_resolve(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    relative = [target for target in targets if not re.match(r"[a-z]+:", target)]
    assert [target for target in relative if not (page.parent / target).is_file()] == []


def test_readme_commands_are_targets_of_make() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", README.read_text(encoding="utf-8"), re.MULTILINE))
    assert {"demo", "test"} <= named <= set(targets)


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [str(page.relative_to(DOCS)) for page in PAGES[1:] if "measurements" not in page.parts]
    assert [page for page in pages if f": {page}\n" not in navigation] == []


def test_the_site_builds_strictly(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    front = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "transformers' own forward" in front.replace("&#39;", "'")  # the status table of README
