"""A campaign: all cells of a case, in balanced random order, one server at a time, kept cell by cell.

Nothing that is finished is lost: each attempt has a folder of its own and its row is on the disk before the next one
begins. Run again on the same folder, a campaign goes on where it stopped.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.markup import escape
from tqdm import tqdm

from bench.arm_plan import ArmPlan, Policy, plan_arm, shares_with_room
from bench.arms import arm_of
from bench.campaign.calibration import (
    QUICK_SHARE,
    Calibration,
    Trials,
    calibrate,
    points_to_tune,
    read_calibrations,
    write_calibration,
)
from bench.campaign.cell import CellRunner, Conditions, Launcher, load_case
from bench.campaign.estimate import Estimator, duration
from bench.campaign.folder import INTERRUPTED, CampaignFolder, Row, outcome_of
from bench.campaign.host import HOST_ATTEMPTS, judge_host
from bench.campaign.manifest import TOKENIZER, WEIGHTS, CampaignManifest, Session, hash_files
from bench.campaign.order import interleave
from bench.cases import Case, Point
from bench.cells import Cell, Changes, cells_of
from bench.environment import describe_environment
from bench.outcome import CellOutcome
from sgl_hybrid.errors import SettingError


class CampaignResult(NamedTuple):
    """How an invocation ended: rows of all its cells by what they came to, and whether it was stopped."""

    num_ok: int
    num_failed: int
    num_left: int
    interrupted: bool


class Campaign:
    """One invocation of `bench run`."""

    def __init__(
        self,
        case: Case,
        changes: Changes,
        conditions: Conditions,
        launch: Launcher,
        folder: Path,
        *,
        console: Console,
        retry_failed: bool = False,
        order_seed: int = 0,
    ) -> None:
        """Plan everything that can be wrong before a server starts. Raises: SettingError."""
        self._case, self._conditions, self._console = case, conditions, console
        self._quick, self._retry_failed = changes.quick, retry_failed
        self._cells = cells_of(case, changes)
        if conditions.dataset is not None:
            load_case(
                self._cells[0], conditions
            ).requests()  # a data set that cannot be used is said before anything runs
        self._plans = {
            cell.key: self._plan(cell, self._quick_share(cell) if arm_of(cell.arm).tuned else None)
            for cell in self._cells
        }
        self._runner = CellRunner(conditions, launch, folder / "workloads")
        self._estimator = Estimator()
        self._order_seed = order_seed
        self._folder = CampaignFolder(folder, self._manifest())
        self._tuned: dict[Point, Calibration] = {}

    def run(self) -> CampaignResult:
        """Run what is not finished yet. Raises: SettingError if the folder cannot be used; nothing has run then."""
        with self._folder as folder:
            pending = folder.pending(interleave(self._cells, self._order_seed), retry_failed=self._retry_failed)
            self._announce(pending)
            folder.begin_session(
                Session(
                    started_utc=datetime.now(UTC).isoformat(timespec="milliseconds"),
                    command=list(self._conditions.command),
                    environment=describe_environment(),
                    num_cells=len(pending),
                )
            )
            interrupted = False
            try:
                self._tune(pending)
                self._run_cells(pending)
            except KeyboardInterrupt:
                interrupted = True
            return self._result(interrupted)

    def _plan(self, cell: Cell, share: float | None = None) -> ArmPlan:
        policy = Policy(cap=cell.cap, headroom=cell.headroom, variant=cell.variant, mamba_share=share)
        return plan_arm(arm_of(cell.arm), cell.budget, self._conditions.serving, policy)

    def _manifest(self) -> CampaignManifest:
        serving, dataset = self._conditions.serving, self._conditions.dataset
        return CampaignManifest(
            case=self._case.name,
            model=serving.model.name,
            dtype=serving.dtype,
            model_sha256=hash_files(serving.model, WEIGHTS),
            tokenizer_sha256=hash_files(serving.model, TOKENIZER),
            num_requests=self._cells[0].num_requests,
            scale=self._conditions.scale,
            pace=self._conditions.pace,
            dataset_sha256=None if dataset is None else hash_files(dataset.parent, (dataset.name,)),
            order_seed=self._order_seed,
            limits=self._conditions.limits,
            host_limit_ms=self._conditions.host_limit_ms,
        )

    def _announce(self, pending: Sequence[Cell]) -> None:
        """Print units and rounding of every arm, what is left to do, and how long it should take."""
        say = self._console.print
        say(f"[bold]{self._case.name}[/bold]: {escape(self._case.question)}")
        shown = set()
        for cell in self._cells:
            plan = self._plans[cell.key]
            if (cell.budget, cell.arm) not in shown and not arm_of(cell.arm).tuned:
                shown.add((cell.budget, cell.arm))
                say(f"  {cell.budget:>6} {cell.arm:<14} {escape(plan.describe())}", highlight=False)
        for row in self._folder.rows:
            if row.outcome.status == "ok":
                self._estimator.observe(row.outcome.arm, self._cells[0].num_requests, row.seconds)
        done = len(self._cells) - len(pending)
        left = duration(self._estimator.seconds(pending))
        say(f"{len(pending)} of {len(self._cells)} cells to run ({done} done), about {left}; into {self._folder.path}")

    def _tune(self, pending: Sequence[Cell]) -> None:
        self._tuned = read_calibrations(self._folder.path)
        trials = Trials(self._folder.path, self._try_share, retry_failed=self._retry_failed)
        for point, like in points_to_tune(pending).items():
            found = self._tuned.get(point)
            if found is None or self._is_open(found):
                if self._quick:
                    found = Calibration(
                        budget=point.budget, share=self._quick_share(like), rate=point.rate, cap=point.cap
                    )
                else:
                    at = point.describe()
                    self._console.print(f"looking for the best share of recurrent memory for {like.arm} at {at}")
                    found = calibrate(like, trials.measure)
                write_calibration(self._folder.path, found)
                self._tuned[point] = found
            self._console.print(escape(found.describe()), highlight=False)
            if found.share is not None:
                self._console.print(f"  {escape(self._plan(like, found.share).describe())}", highlight=False)

    def _is_open(self, found: Calibration) -> bool:
        """Return whether this invocation has to look for a share although an earlier one left a finding."""
        return not (found.searched or self._quick) or (found.share is None and self._retry_failed)

    def _quick_share(self, cell: Cell) -> float:
        """Return the share that a quick run takes without a search, as near to the usual one as the budget allows."""
        shares = shares_with_room(arm_of(cell.arm), cell.budget, self._conditions.serving)
        return min(shares, key=lambda share: abs(share - QUICK_SHARE))

    def _try_share(self, cell: Cell, share: float, attempt: int, folder: Path) -> CellOutcome:
        try:
            plan = self._plan(cell, share)
        except SettingError as error:
            return outcome_of(cell, attempt, "refused", str(error))
        return self._runner.run(cell, plan, attempt, folder).outcome

    def _run_cells(self, pending: Sequence[Cell]) -> None:
        shown = None if self._conditions.progress else True  # None: where stderr is a terminal
        with tqdm(total=len(pending), unit="cell", dynamic_ncols=True, disable=shown) as bar:
            for index, cell in enumerate(pending):
                bar.set_description(f"{cell.arm} {cell.budget} seed {cell.seed}")
                row = self._run_cell(cell)
                for _ in range(HOST_ATTEMPTS - 1):
                    if row.outcome.status != "slow":
                        break
                    with bar.external_write_mode():
                        self._say(f"{cell.key}: {_came_to(row)}; again")
                    row = self._run_cell(cell)
                if row.outcome.status == "ok":
                    self._estimator.observe(cell.arm, cell.num_requests, row.seconds)
                bar.update()
                left = duration(self._estimator.seconds(pending[index + 1 :]))
                with bar.external_write_mode():
                    self._say(f"[{index + 1}/{len(pending)}] {cell.key}: {_came_to(row)}; about {left} left")

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False)

    def _run_cell(self, cell: Cell) -> Row:
        """Run one attempt and keep its row, also when the user stops it."""
        attempt, folder = self._folder.begin(cell)
        begun = time.monotonic()
        try:
            row = judge_host(self._attempt(cell, attempt, folder), self._conditions.host_limit_ms)
        except KeyboardInterrupt:
            outcome = outcome_of(cell, attempt, "failed", INTERRUPTED)
            self._folder.finish(Row(key=cell.key, seconds=time.monotonic() - begun, outcome=outcome))
            raise
        self._folder.finish(row)
        return row

    def _attempt(self, cell: Cell, attempt: int, folder: Path) -> Row:
        if not arm_of(cell.arm).tuned:
            return self._runner.run(cell, self._plans[cell.key], attempt, folder)
        tuned = self._tuned[cell.point]
        if tuned.share is None:
            return Row(key=cell.key, seconds=0.0, outcome=outcome_of(cell, attempt, "refused", tuned.describe()))
        row = self._runner.run(cell, self._plan(cell, tuned.share), attempt, folder)
        counters = {**row.outcome.counters, "mamba_share": tuned.share}
        return msgspec.structs.replace(row, outcome=msgspec.structs.replace(row.outcome, counters=counters))

    def _result(self, interrupted: bool) -> CampaignResult:
        keys = {cell.key for cell in self._cells}
        ok, failed = (keys & ended for ended in self._folder.ended())
        return CampaignResult(len(ok), len(failed), len(keys - ok - failed), interrupted)


def _came_to(row: Row) -> str:
    outcome = row.outcome
    if outcome.status != "ok":
        return f"{outcome.status}: {outcome.reason}"
    lacks = f" ({outcome.reason})" if outcome.reason else ""
    return f"{outcome.metrics['output_tokens_per_s']:.1f} tokens/s in {duration(row.seconds)}{lacks}"
