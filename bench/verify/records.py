"""Records of a verification: every answer with its token ids and log-probabilities, and what the comparisons came to.

The result file is one JSON document, a `VerifyResult`. It holds what is needed to repeat every comparison without the
server: a log-probability is written as the shortest decimal of its float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.atomic import write_whole
from bench.verify.compare import Scores, Verdict, worst
from sgl_hybrid.errors import SettingError

SCHEMA_VERSION = 1


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked: the tokens, where scoring of the prompt begins, and how many tokens were to come."""

    prompt_ids: list[int]
    first_scored: int
    max_new_tokens: int
    ignore_eos: bool = True


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One answered request. request: its index in `ArmResult.requests`. step: what the path did at this point."""

    path: str
    step: str
    request: int
    cached_tokens: int
    num_retractions: int
    finish_reason: str
    scores: Scores


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One comparison of one answer with the reference.

    request, run: indices in `ArmResult.requests` and `ArmResult.runs`, None where there was none, as for a state that
    could not be brought about. wanted_tokens: the hit depth that the step prepares, None where any depth serves.
    position: the first that differs, `kind` what differs there. max_logprob_difference: before the first other token;
    None without a comparison, or if a number was missing.
    """

    path: str
    step: str
    request: int | None
    run: int | None
    verdict: Verdict
    wanted_tokens: int | None
    cached_tokens: int | None
    position: int | None = None
    kind: str | None = None
    max_logprob_difference: float | None = None
    reason: str | None = None


class PathResult(msgspec.Struct, frozen=True, kw_only=True):
    """One path in numbers. verdict: the worst of its comparisons; not exercised only if no comparison was made."""

    path: str
    verdict: Verdict
    counts: dict[str, int]
    max_logprob_difference: float | None
    first_difference: Finding | None
    reason: str | None


class ArmResult(msgspec.Struct, frozen=True, kw_only=True):
    """One server through all paths. organization: None for stock SGLang. grid_tokens: distance of two boundaries."""

    arm: str
    organization: str | None
    grid_tokens: int
    batch_bound: float
    server: dict[str, Any]
    paths: list[PathResult]
    findings: list[Finding]
    requests: list[Request]
    runs: list[Run]

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of the paths that were exercised, those that measure the reference left out;
        `NOT_EXERCISED` if nothing differs and no answer that used the cache was compared."""
        counted = [f for f in self.findings if f.path not in REFERENCE and f.verdict is not Verdict.NOT_EXERCISED]
        found = worst(finding.verdict for finding in counted)
        hit = any(finding.cached_tokens for finding in counted)
        return found if hit or found is Verdict.DIFFERENT else Verdict.NOT_EXERCISED


class VerifyResult(msgspec.Struct, frozen=True, kw_only=True):
    """A whole verification. verdict: the worst of the arms that count; `beside` names those that do not."""

    schema_version: int = SCHEMA_VERSION
    command: list[str]
    started_utc: str
    seconds: float
    environment: dict[str, Any]
    settings: dict[str, Any]
    verdict: Verdict
    beside: list[str]
    arms: list[ArmResult]


COLD, COLD_CONCURRENT = "cold", "cold, concurrent"
REFERENCE = (COLD, COLD_CONCURRENT)
"""Names of the paths that measure the reference itself: nothing is reused there."""


def summarize_path(path: str, findings: Sequence[Finding]) -> PathResult:
    """Return one path in numbers from its findings, which may be none."""
    made = [finding for finding in findings if finding.verdict is not Verdict.NOT_EXERCISED]
    missed = [finding for finding in findings if finding.verdict is Verdict.NOT_EXERCISED]
    unequal = [finding for finding in made if finding.verdict is not Verdict.EQUAL]
    verdict = worst(finding.verdict for finding in made)
    sizes = [finding.max_logprob_difference for finding in made]
    return PathResult(
        path=path,
        verdict=verdict,
        counts={v.value: sum(finding.verdict is v for finding in findings) for v in Verdict},
        max_logprob_difference=max((size for size in sizes if size is not None), default=None),
        first_difference=next((finding for finding in unequal if finding.verdict is verdict), None),
        reason=next((finding.reason for finding in missed), None) if missed else None,
    )


def write_result(result: VerifyResult, path: Path) -> None:
    """Write the result file, whole or not at all. Raises: SettingError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, msgspec.json.encode(result) + b"\n")
    except OSError as error:
        raise SettingError(f"expected a result file that can be written, got {path}: {error.strerror}") from error


def summary(result: VerifyResult) -> dict[str, Any]:
    """Return the result without requests, answers and single findings, as plain values."""
    plain: dict[str, Any] = msgspec.to_builtins(result)
    for arm, source in zip(plain["arms"], result.arms, strict=True):
        arm["verdict"] = source.verdict.value
        arm["num_runs"] = len(arm.pop("runs"))
        for bulky in ("requests", "findings", "server"):
            del arm[bulky]
    return plain
