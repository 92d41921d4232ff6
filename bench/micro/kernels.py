"""Time the kernels on a GPU, or print the static table where there is none.

    python -m bench.micro.kernels [--quick] [--output FILE]

On a GPU the gate runs first (`gpu_gate`); where it is closed, no time is printed. Then every arm is timed on the same
pool of pages, arms interleaved, next to the copy bandwidth of the same run. The table is Markdown; the raw samples go
to a JSON-lines file beside it. Needs torch, triton and numpy; a kernel of another project that is not there is a row
with the reason.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.environment import describe_environment
from bench.micro.gpu_gate import STATES, run_gate
from bench.micro.gpu_pool import Pool, WorkingSet, allocate_pool, working_sets
from bench.micro.rivals import Rival, load_rivals
from bench.micro.shapes import FALCON_H1_7B, Shape, SsmArguments, ssm_arguments
from bench.micro.static_compile import ARCHITECTURES
from bench.micro.static_table import static_table
from bench.micro.timing import Recorded, Step, copy_bandwidth, record, time_interleaved
from bench.micro.timing_table import BASELINE, EARLY, Measurement, timing_table
from bench.micro.traffic import ssm_update_traffic
from triton_ops.ssm_update.kernel import prepare, tile_rows

MEASUREMENTS = Path(__file__).resolve().parents[2] / "docs" / "measurements"
ORDERS = ("sequential", "random")
ALL_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
QUICK_BATCHES = (1, 8, 64)
UNCACHED_BYTES = 2**30
"""State bytes that a graph works on at least: many times a last-level cache."""
SAMPLE_MS = 10.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 1 where the gate is closed."""
    options = _parse(arguments)
    if options.static or not torch.cuda.is_available():
        if not options.static:
            print("No CUDA device: nothing is timed. The static table of the compiled kernels follows.\n", flush=True)
        table = static_table(ARCHITECTURES, options.stock_file)
        print(table)
        _write(options.output or MEASUREMENTS / "kernels_static.md", table)
        return 0
    return _run_on_gpu(options)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.micro.kernels", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help=f"batches {QUICK_BATCHES} only")
    parser.add_argument("--seconds", type=float, default=3600.0, help="start no new case after this time")
    parser.add_argument("--rounds", type=int, default=9, help="samples per arm")
    parser.add_argument("--static", action="store_true", help="print the static table, GPU or not")
    parser.add_argument("--stock-file", type=Path, help="SGLang's mamba_ssm.py, where sglang is not installed")
    parser.add_argument("--output", type=Path, help="file of the table (default: under docs/measurements)")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds: expected at least 1, got {options.rounds}")
    return options


def _run_on_gpu(options: argparse.Namespace) -> int:
    start = time.monotonic()
    torch.manual_seed(0)
    environment, shape = describe_environment(), FALCON_H1_7B
    rivals = load_rivals(options.stock_file)
    report = [f"# Kernels on {torch.cuda.get_device_name()}", "", *_environment_lines(environment), "", "## Gate", ""]
    open_gate = True
    for check in run_gate(shape, rivals):
        state = "ok" if check.passed else "FAILED" if check.required else "differs (informs only)"
        report.append(f"- {check.name}: {state}")
        open_gate = open_gate and (check.passed or not check.required)
    print("\n".join(report), flush=True)
    output = options.output or MEASUREMENTS / "kernels_gpu.md"
    if not open_gate:
        report += ["", "The gate is closed: no times."]
        print(report[-1])
        _write(output, "\n".join(report) + "\n")
        return 1
    copies = copy_bandwidth(rounds=5)
    measurements: list[Measurement] = []
    skipped = 0
    for state, dtype in STATES.items():
        pool = allocate_pool(shape, dtype)
        for batch, order in product(QUICK_BATCHES if options.quick else ALL_BATCHES, ORDERS):
            if time.monotonic() - start > options.seconds:
                skipped += 1
                continue
            measurements += _measure(shape, pool, rivals, state, batch, order, options.rounds)
            print(f"measured: {state}, batch {batch}, {order} pages", flush=True)
            # A run that is killed keeps what it measured.
            _save(output, report, measurements, copies, environment)
        del pool
    copies += copy_bandwidth(rounds=5)
    if skipped:
        report += ["", f"Stopped after {options.seconds:.0f} s: {skipped} cases were not measured."]
    print(_save(output, report, measurements, copies, environment))
    return 0


def _save(
    output: Path,
    report: Sequence[str],
    measurements: Sequence[Measurement],
    copies: Sequence[float],
    environment: dict[str, Any],
) -> str:
    """Write the report with the table of times, and the raw samples beside it; return the table."""
    table = timing_table(measurements, median(copies))
    _write(output, "\n".join([*report, "", table]))
    raw = [m._asdict() for m in measurements]
    records = [{"environment": environment, "copy_bytes_per_second": list(copies)}, *raw]
    _write(output.with_suffix(".jsonl"), "".join(json.dumps(record) + "\n" for record in records))
    return table


def _measure(
    shape: Shape, pool: Pool, rivals: list[Rival], state: str, batch: int, order: str, rounds: int
) -> list[Measurement]:
    """Time all arms of one case: a graph of many launches, each on its own working set, far more than a cache holds."""
    set_bytes = batch * pool.slots[0].numel() * pool.slots.element_size()
    num_launches = max(shape.num_layers, UNCACHED_BYTES // set_bytes)
    sets = working_sets(pool, batch, num_launches, order)
    sets = [sets[i % len(sets)] for i in range(num_launches)]
    paged = ssm_arguments(shape, pool.pages, sets[0].pages, sets[0].pages, gate=False)
    slots = ssm_arguments(shape, pool.slots, sets[0].slots, None, gate=False)
    default = tile_rows(batch, shape.P, shape.N, pool.pages.element_size())
    other = 4 if default == 8 else 8

    def on_pages(ids: WorkingSet) -> SsmArguments:
        return paged._replace(src_table=ids.pages, dst_table=ids.pages.clone())

    binders: dict[str, Callable[[WorkingSet], Step]] = {
        "paged": lambda ids: prepare(*on_pages(ids), BM=default).run,
        BASELINE: lambda ids: prepare(*slots._replace(src_table=ids.slots), BM=default).run,
        EARLY: lambda ids: prepare(*on_pages(ids), BM=default, may_start_early=True).run,
        f"paged, {other} rows": lambda ids: prepare(*on_pages(ids), BM=other).run,
    }
    absent = []
    for rival in rivals:
        if rival.bind is None:
            absent.append(Measurement(rival.name, state, batch, order, [], 0, rival.absent))
        else:
            binders[rival.name] = _binder(rival.bind, slots)
    graphs: dict[str, Recorded] = {}
    for name, bind in binders.items():
        try:
            graphs[name] = record([bind(ids) for ids in sets])
        except Exception as error:
            if name in ("paged", BASELINE):
                raise
            absent.append(Measurement(name, state, batch, order, [], 0, f"{type(error).__name__}: {error}"))
    samples = time_interleaved(graphs, num_launches, rounds=rounds, sample_ms=SAMPLE_MS)
    total = ssm_update_traffic(paged).total
    return [Measurement(name, state, batch, order, samples[name], total) for name in graphs] + absent


def _binder(bind: Callable[[SsmArguments], Callable[[], object]], slots: SsmArguments) -> Callable[[WorkingSet], Step]:
    return lambda ids: bind(slots._replace(src_table=ids.slots))


def _environment_lines(environment: dict[str, Any]) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    git = environment["git"]
    commit = "unknown" if git is None else git["commit"] + (" (dirty)" if git["dirty"] else "")
    return [f"Commit {commit}. {versions}."]


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
