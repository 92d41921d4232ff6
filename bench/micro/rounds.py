"""What the comparisons of single parts share: the order of arms, the folder of a run, what is written at its end."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.environment import describe_environment
from bench.stats.intervals import Interval, paired_t_percent
from sgl_hybrid.errors import SettingError


def turn_order(names: Sequence[str], number: int) -> list[str]:
    """Return the order of round `number`: each rotation once, and once turned round, so that no arm runs first more
    often than another, or always after the same one."""
    first = number // 2 % len(names)
    order = [*names[first:], *names[:first]]
    return order[::-1] if number % 2 else order


def over(values: Sequence[float], baseline: Sequence[float]) -> Interval:
    """Return what `values` are above `baseline` in percent, with the 95 % interval, paired by round."""
    return paired_t_percent([math.log(value / base) for value, base in zip(values, baseline, strict=True)])


def percent(interval: Interval | None) -> str:
    """Return an interval as text, nothing for the baseline itself."""
    return "" if interval is None else f"{interval.estimate:+.1f} [{interval.low:+.1f}, {interval.high:+.1f}]"


def new_folder(folder: Path) -> Path:
    """Make the folder of a run. Raises: SettingError if there is something already."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise SettingError(f"--out: expected a new folder, got {folder}, which exists") from None
    return folder


def write_result(folder: Path, name: str, case: Any, results: Any, table: str) -> None:
    """Write NAME.json (the case, where it ran, the results) and NAME.md (the table). case, results: plain values."""
    record = {"case": case, "environment": describe_environment(), "results": results}
    (folder / f"{name}.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    (folder / f"{name}.md").write_text(table + "\n", encoding="utf-8")
