"""What a campaign and each of its cells were run with: commit, versions, hashes of model and tokenizer, flags, machine.

campaign.json    `CampaignManifest`: what makes two invocations the same campaign
sessions.jsonl   one `Session` a line: every `bench run` that worked on the folder
cells/*/attempt-*/cell.json   `CellManifest`
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from bench.arm_plan import ArmPlan
from bench.cells import Cell
from bench.metrics.latency import Limits
from sgl_hybrid.errors import SettingError

SCHEMA_VERSION = 1
WEIGHTS = ("config.json", "*.safetensors")
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


class CampaignManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of a campaign. Another case, model, dtype, data set or other limits are another campaign; arms,
    budgets, seeds, rates and sharing levels may be added to one. A manifest without limits is of a folder without.

    host_limit_ms: the largest `host_ms` of a cell that counts; part of the identity, so it cannot be changed after
    numbers have been seen.
    """

    schema_version: int = SCHEMA_VERSION
    case: str
    model: str
    dtype: str
    model_sha256: str
    tokenizer_sha256: str
    num_requests: int
    scale: float = 1.0
    pace: float = 1.0
    dataset_sha256: str | None = None
    order_seed: int = 0
    limits: Limits | None = None
    host_limit_ms: float | None = None


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """One invocation of `bench run`."""

    started_utc: str
    command: list[str]
    environment: dict[str, Any]
    num_cells: int


class CellManifest(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at one cell: what was started how, on what, and what the gate saw. Paths are those of this machine's
    own layout and are left out: `command` begins with the module that is run.

    environment_variables: those that the server was given, and what was set of OpenMP's and MKL's.
    """

    cell: Cell
    attempt: int
    started_utc: str
    plan: ArmPlan
    tree_core: str
    command: list[str]
    environment_variables: dict[str, str]
    environment: dict[str, Any]


def hash_files(folder: Path, patterns: tuple[str, ...]) -> str:
    """Return the SHA-256 over names and contents of the files that match, in order of name.

    Raises: SettingError if there is none.
    """
    files = sorted({file for pattern in patterns for file in folder.glob(pattern)})
    if not files:
        raise SettingError(f"expected a model folder with {', '.join(patterns)}, got {folder}")
    hasher = hashlib.sha256()
    for file in files:
        hasher.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return hasher.hexdigest()


def differences(wanted: CampaignManifest, found: CampaignManifest) -> list[str]:
    """Return the fields in which two campaigns differ, as `name: found, not wanted`."""
    return [
        f"{name}: {getattr(found, name)}, not {getattr(wanted, name)}"
        for name in CampaignManifest.__struct_fields__
        if getattr(wanted, name) != getattr(found, name)
    ]
