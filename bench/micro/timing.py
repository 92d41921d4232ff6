"""Time launches on the GPU: one CUDA graph of many launches per arm, the arms interleaved, raw samples kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

Step = Callable[[], object]

COPY_BYTES = 2**30
"""Bytes of each of the two buffers of the copy that stands for the memory's speed."""


class Recorded(NamedTuple):
    """A CUDA graph and the steps it was recorded from: they hold the tensors that its launches use."""

    graph: torch.cuda.CUDAGraph
    steps: Sequence[Step]

    def replay(self) -> None:
        """Launch all steps again; does not synchronize."""
        self.graph.replay()


def record(steps: Sequence[Step]) -> Recorded:
    """Record the steps in one CUDA graph. Runs the first one before, so that everything is compiled; synchronizes."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        steps[0]()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in steps:
            step()
    return Recorded(graph, steps)


def time_interleaved(
    arms: Mapping[str, Recorded], launches: int, *, rounds: int, sample_ms: float
) -> dict[str, list[float]]:
    """Return for every arm one sample per round: microseconds per launch over at least `sample_ms` of replays.

    The order of the arms rotates from round to round, so that no arm always follows the same other.
    """
    repeats = {}
    for name, arm in arms.items():
        arm.replay()
        repeats[name] = max(1, round(sample_ms / max(_elapsed_ms(arm.replay, 1), 1e-3)))
    samples: dict[str, list[float]] = {name: [] for name in arms}
    names = list(arms)
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            milliseconds = _elapsed_ms(arms[name].replay, repeats[name])
            samples[name].append(1e3 * milliseconds / (repeats[name] * launches))
    return samples


def copy_bandwidth(*, rounds: int) -> list[float]:
    """Return samples of the copy bandwidth in bytes read and written per second, device to device, 2 GiB each."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    return [2 * COPY_BYTES / (_elapsed_ms(lambda: target.copy_(source), 4) / 4e3) for _ in range(rounds)]


def _elapsed_ms(run: Step, repeats: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))
