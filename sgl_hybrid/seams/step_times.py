"""What one decode step costs the scheduler's processor, with or without a memory organization: for `bench micro step`.

With `SGLANG_HYBRID_STEP_TIMES=FILE` the scheduler of any arm appends a line of JSON for each decode step: its batch and
the nanoseconds of its parts. Times are those of the scheduler's own thread (`CLOCK_THREAD_CPUTIME_ID`): what other
processes take from it does not count, nor does waiting.

    schedule   choosing the batch: filtering, memory checks, allocation, preparing inputs
    launch     `run_batch` outside the two below: the forward batch, sampling, copies
    metadata   the attention backend's plan of the step: tables, indices
    model      the model's forward
    process    the results: output ids, finishing, publishing, streaming

All but `model` is host cost: on a GPU it is what the processor does beside launching kernels.

Source: SGLang 0.5.23, `Scheduler.event_loop_overlap` and `event_loop_normal`; `model_executor/runner/eager_runner.py`.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sgl_hybrid.seams.hooks import Seam

VARIABLE = "SGLANG_HYBRID_STEP_TIMES"
PARTS = ("schedule", "launch", "metadata", "model", "process")


class StepTimes:
    """Times the parts of one scheduler's steps. Parts may nest: the time of an inner one is not the outer one's."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._spent = dict.fromkeys(PARTS, 0)
        self._inner = 0

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call`, its own time added to a part."""

        @functools.wraps(call)
        def timed_call(*args: Any, **kwargs: Any) -> Any:
            outer, self._inner = self._inner, 0
            begun = time.thread_time_ns()
            try:
                return call(*args, **kwargs)
            finally:
                total = time.thread_time_ns() - begun
                self._spent[part] += total - self._inner
                self._inner = outer + total

        return timed_call

    def step_done(self, batch: Any) -> None:
        """Write the parts since the last step if this one decoded, and start anew."""
        if batch is not None and batch.forward_mode.is_decode():
            # Opened each time, between the parts that are timed: what a killed server has measured is there.
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"batch": batch.batch_size(), **self._spent}) + "\n")
        self._spent = dict.fromkeys(PARTS, 0)


def watch(result: None, self: Any, *args: Any, **kwargs: Any) -> None:
    """After `Scheduler.__init__`: time this scheduler's steps. One step begins where the next batch is chosen, so with
    the overlap schedule a step's `process` is that of the batch before it."""
    times = StepTimes(Path(os.environ[VARIABLE]))
    runner = self.tp_worker.model_runner
    runner.model.forward = times.timed("model", runner.model.forward)
    backend = runner.attn_backend
    backend.init_forward_metadata = times.timed("metadata", backend.init_forward_metadata)
    self.run_batch = times.timed("launch", self.run_batch)
    self.process_batch_result = times.timed("process", self.process_batch_result)
    choose = times.timed("schedule", self.get_next_batch_to_run)
    last: list[Any] = [None]

    @functools.wraps(choose)
    def next_step(*args: Any, **kwargs: Any) -> Any:
        times.step_done(last[0])
        plan = choose(*args, **kwargs)
        last[0] = plan.batch_to_run
        return plan

    self.get_next_batch_to_run = next_step


SEAMS: tuple[Seam, ...] = (
    Seam(
        "sglang.srt.managers.scheduler.Scheduler.__init__",
        "after",
        watch,
        (),
        "with SGLANG_HYBRID_STEP_TIMES only: decode steps are timed",
    ),
)
