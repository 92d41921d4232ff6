"""Everything a report says, as plain values: read from the folders of one or more campaigns, computed once.

`gather` takes the folder of a campaign, or a folder of such folders; several campaigns of one case are pooled only if
they served the same model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench.campaign.calibration import Calibration, read_calibrations
from bench.campaign.folder import read_manifest, read_rows, read_sessions
from bench.campaign.gate import Answers
from bench.campaign.manifest import CampaignManifest, CellManifest, Session
from bench.cases import CASES
from bench.outcome import CellOutcome, Condition, adopted
from bench.paper_values import PaperEffect, paper_effect
from bench.records import read_records
from bench.report.limits import limits
from bench.report.sensitivity import Records, Sensitivity, sensitivity
from bench.stats.conditions import labels
from bench.stats.rows import Row, Share, analyse, shares_of_ceiling
from bench.stats.targets import Reached, reached
from bench.stats.verdicts import Verdict, verdict
from sgl_hybrid.errors import SettingError

SHOWN_METRICS = (
    "output_tokens_per_s",
    "ttft_p50_ms",
    "ttft_p99_ms",
    "tpot_p50_ms",
    "tpot_p99_ms",
    "e2e_p99_ms",
    "queue_p50_ms",
    "running_mean",
    "waiting_mean",
    "cached_share",
    "preemptions",
)
"""Columns of the table of arms: means over seeds of each run's number."""
VIEW_METRICS = (
    "output_tokens_per_s",
    "ledger_output_tokens_per_s",
    "central_output_tokens_per_s",
    "poller_output_tokens_per_s",
    "host_ms",
    "central_drift",
    "recorded_tokens",
    "c_once_tokens",
    "recorded_steps",
    "adopted_tokens_per_request",
    "goodput_tokens_per_s",
    "goodput_share",
)
"""Columns of the table of views and work: the same runs over other windows, and what the server counted."""


class ArmLine(msgspec.Struct, frozen=True, kw_only=True):
    """One arm at one condition: means over its measured seeds, and what it reaches of its ceiling.

    where: the condition's label among all of its case. units, flags: of the servers of exactly this arm and condition.
    """

    case: str
    at: Condition
    where: str
    arm: str
    num_seeds: int
    num_failed: int
    means: dict[str, float]
    share_of_ceiling: float | None
    units: str
    flags: str


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """One contrast of ours and what the paper prints for it."""

    ours: Row
    paper: PaperEffect | None


class CaseReport(msgspec.Struct, frozen=True, kw_only=True):
    """One case of a report."""

    case: str
    question: str
    source: str
    metric: str
    verdict: Verdict
    effects: list[Compared]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a report says. outcomes: every attempt; the numbers are those of the adopted ones."""

    folders: list[str]
    manifests: list[CampaignManifest]
    sessions: list[Session]
    calibrations: list[Calibration]
    cases: list[CaseReport]
    arms: list[ArmLine]
    goals: list[Reached]
    sensitivity: Sensitivity
    limits: list[str]
    tree_cores: dict[str, str]
    gate: str
    lost: list[CellOutcome]
    outcomes: list[CellOutcome]


def gather(folder: Path) -> Report:
    """Read the campaigns in `folder` and compute what there is to say.

    Raises: SettingError if there is no campaign with a finished cell, if campaigns of one case served different models,
    or as `read_outcomes`.
    """
    folders = campaign_folders(folder)
    manifests = [read_manifest(path) for path in folders]
    _require_one_model(manifests)
    outcomes = read_outcomes(folders)
    cells = [_cell_manifest(path) for path in folders]
    environments = [manifest.environment for found in cells for manifest in found.values()]
    sessions = [session for path in folders for session in read_sessions(path)]
    plans = {key: manifest for found in cells for key, manifest in found.items()}
    return Report(
        folders=[path.name for path in folders],
        manifests=manifests,
        sessions=sessions,
        calibrations=[found for path in folders for found in read_calibrations(path).values()],
        cases=[_case(name, outcomes) for name in dict.fromkeys(outcome.case for outcome in outcomes)],
        arms=_arm_lines(outcomes, plans),
        goals=reached(outcomes),
        sensitivity=sensitivity(outcomes, _records(folders)),
        limits=limits(
            environments or [session.environment for session in sessions],
            outcomes,
            {manifest.case: manifest.pace for manifest in manifests},
        ),
        gate=_gate([path for folder in folders for path in _gates(folder)]),
        tree_cores={manifest.cell.arm: manifest.tree_core for manifest in plans.values()},
        lost=[outcome for outcome in outcomes if outcome.status != "ok"],
        outcomes=outcomes,
    )


def campaign_folders(folder: Path) -> list[Path]:
    """Return `folder` if it is a campaign's, else those directly in it that are. Raises: SettingError if none is."""
    if (folder / "campaign.json").is_file():
        return [folder]
    found = sorted(path.parent for path in folder.glob("*/campaign.json"))
    if not found:
        raise SettingError(f"expected a campaign's folder with campaign.json, or a folder of them, got {folder}")
    return found


def read_outcomes(folders: Sequence[Path]) -> list[CellOutcome]:
    """Return every attempt of the campaigns. Raises: SettingError if two of them have a cell in common."""
    rows = [(path, row) for path in folders for row in read_rows(path)]
    owners: dict[tuple[Condition, str, int], Path] = {}
    for path, row in rows:
        cell = (row.outcome.condition, row.outcome.arm, row.outcome.seed)
        owner = owners.setdefault(cell, path)
        if owner != path:
            raise SettingError(
                f"expected campaigns without a cell in common, got {row.key} in {owner.name} and {path.name}: report "
                "one of them, or move it away"
            )
    return [row.outcome for _, row in rows]


def _require_one_model(manifests: Sequence[CampaignManifest]) -> None:
    by_case: dict[str, CampaignManifest] = {}
    for manifest in manifests:
        first = by_case.setdefault(manifest.case, manifest)
        for name in ("model_sha256", "dtype", "num_requests", "scale", "pace", "dataset_sha256"):
            if getattr(first, name) != getattr(manifest, name):
                raise SettingError(
                    f"expected campaigns of {manifest.case} with one {name}, got {getattr(first, name)} and "
                    f"{getattr(manifest, name)}"
                )


def _records(folders: Sequence[Path]) -> Records:
    """Return the request records of every `ok` attempt that counts and whose file is there."""
    found = {}
    for folder in folders:
        rows = {id(row.outcome): row for row in read_rows(folder)}
        for outcome in adopted(row.outcome for row in rows.values()):
            load = folder / "cells" / rows[id(outcome)].key / f"attempt-{outcome.attempt}" / "load"
            if outcome.status == "ok" and (load / "requests.jsonl").is_file():
                found[outcome.condition, outcome.arm, outcome.seed] = read_records(load)
    return found


def _cell_manifest(folder: Path) -> dict[tuple[str, str], CellManifest]:
    """Return the manifest of the last attempt at each cell, by campaign folder and cell."""
    decoder = msgspec.json.Decoder(CellManifest)
    found = {}
    for path in sorted(folder.glob("cells/*/attempt-*/cell.json")):
        found[folder.name, path.parent.parent.name] = decoder.decode(path.read_bytes())
    return found


def _gates(folder: Path) -> list[Path]:
    """Return the answers of every gate, with those of the servers that a calibration started."""
    return [path for part in ("cells", "calibration") for path in folder.glob(f"{part}/*/attempt-*/gate.json")]


def _gate(paths: Sequence[Path]) -> str:
    """Say whether all servers that passed a gate gave the same tokens to its prompts."""
    decoder = msgspec.json.Decoder(Answers)
    answers = Counter(msgspec.json.encode(decoder.decode(path.read_bytes()).output_ids) for path in paths)
    if not answers:
        return "No server passed a gate."
    if len(answers) == 1:
        return f"All {answers.total()} servers that passed the gate gave the same tokens to its prompts."
    most = answers.most_common(1)[0][1]
    return (
        f"{answers.total() - most} of {answers.total()} servers that passed the gate gave other tokens to its prompts "
        "than the most; each answered the same when a prompt was cached."
    )


def _case(name: str, outcomes: Sequence[CellOutcome]) -> CaseReport:
    case = CASES[name]
    held = [outcome for outcome in outcomes if outcome.case == name]
    rows = analyse(held, case.metric)
    return CaseReport(
        case=name,
        question=case.question,
        source=case.source,
        metric=case.metric,
        verdict=verdict(
            name,
            rows,
            metric=case.metric,
            beside={said: analyse(held, metric) for said, metric in case.beside.items()},
        ),
        effects=[Compared(ours=row, paper=paper_effect(row.case, row.name, row.at)) for row in rows],
    )


def _arm_lines(outcomes: Sequence[CellOutcome], manifests: dict[tuple[str, str], CellManifest]) -> list[ArmLine]:
    shares = {(share.case, share.where, share.arm): share for share in shares_of_ceiling(outcomes)}
    plans = {(manifest.cell.condition, manifest.cell.arm): manifest.plan for manifest in manifests.values()}
    held = adopted(outcomes)
    names = labels(outcome.condition for outcome in held)
    groups: dict[Condition, dict[str, list[CellOutcome]]] = {condition: {} for condition in names}
    for outcome in held:
        groups[outcome.condition].setdefault(outcome.arm, []).append(outcome)
    lines = []
    for condition, arm, runs in ((condition, *pair) for condition, arms in groups.items() for pair in arms.items()):
        ok = [run for run in runs if run.status == "ok"]
        share: Share | None = shares.get((condition.case, names[condition], arm))
        plan = plans.get((condition, arm))
        lines.append(
            ArmLine(
                case=condition.case,
                at=condition,
                where=names[condition],
                arm=arm,
                num_seeds=len(ok),
                num_failed=len(runs) - len(ok),
                means=_means(run.metrics for run in ok),
                share_of_ceiling=None if share is None else share.share,
                units=plan.describe() if plan is not None else "",
                flags=" ".join(plan.flags) if plan is not None else f"arm {arm}",
            )
        )
    return lines


def _means(metrics: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Return the mean of each shown metric over the runs that have it."""
    held = list(metrics)
    shown = dict.fromkeys((*SHOWN_METRICS, *VIEW_METRICS))
    values = {name: [run[name] for run in held if name in run] for name in shown}
    return {name: float(np.mean(found)) for name, found in values.items() if found}
