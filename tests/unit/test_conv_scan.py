"""The packed convolution equals the definition, and is bit-identical behind a boundary."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from triton_ops.conv_scan.api import conv_scan
from triton_ops.conv_scan.reference import convolve_sequence

DTYPES = (torch.float32, torch.bfloat16)
pytestmark = pytest.mark.usefixtures("threads")


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(actual: torch.Tensor, expected: np.ndarray, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(actual.float(), torch.from_numpy(expected), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("taps", [2, 3, 4])
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("lengths", [[1], [0, 2, 0, 1, 40], [16, 17]])
def test_convolution_equals_the_definition(taps: int, silu: bool, with_bias: bool, lengths: list[int]) -> None:
    rows = [0, *np.cumsum(lengths).tolist()]
    x, weight = random(rows[-1], 24, seed=0)[:, 1:], random(23, taps, seed=1)
    bias = random(23, seed=2) if with_bias else None
    initial = random(len(lengths), 23, taps - 1, seed=3)
    result = conv_scan(
        x,
        weight,
        bias,
        query_start_loc=rows,
        window_dtype=torch.float32,
        silu=silu,
        initial_windows=initial,
        chunk_tokens=16,
        out=torch.full(x.shape, float("nan")),
    )
    for sequence, (first, last) in enumerate(pairwise(rows)):
        y, windows = convolve_sequence(
            x[first:last].numpy(),
            weight.numpy(),
            None if bias is None else bias.numpy(),
            silu=silu,
            initial_window=initial[sequence].numpy(),
        )
        close(result.out[first:last], y)
        assert np.array_equal(result.final_windows[sequence].numpy(), windows[-1])


def test_channel_first_input_and_default_windows() -> None:
    x, weight = random(8, 30, seed=0), random(8, 4, seed=1)
    result = conv_scan(x.t(), weight, query_start_loc=[0, 30], window_dtype=torch.float32, chunk_tokens=7)
    y, _ = convolve_sequence(x.t().numpy(), weight.numpy(), None, silu=True)
    close(result.out, y)
    assert torch.equal(result.final_windows[0], x[:, -3:])


@pytest.mark.parametrize(("start", "grid", "chunk"), [(0, 16, 8), (5, 12, 8), (12, 12, 16), (4, 2, 16), (3, 1, 16)])
def test_windows_are_rounded_at_boundaries_only(start: int, grid: int, chunk: int) -> None:
    x, weight, initial = random(40, 6, seed=0), random(6, 4, seed=1), random(1, 6, 3, seed=2)
    captures = [(0, position) for position in range(start, start + 41)]
    options: dict[str, Any] = {"query_start_loc": [0, 40], "initial_windows": initial, "start_positions": [start]}
    options |= {"chunk_tokens": chunk, "window_dtype": torch.bfloat16, "captures": captures}
    result = conv_scan(x, weight, grid_tokens=grid, **options)
    y, windows = convolve_sequence(
        x.numpy(),
        weight.numpy(),
        None,
        silu=True,
        initial_window=initial[0].numpy(),
        start_position=start,
        grid_tokens=grid,
        storage=lambda window: torch.from_numpy(window).bfloat16().float().numpy(),
    )
    close(result.out, y)
    assert torch.equal(result.captured_windows, torch.from_numpy(windows).bfloat16())
    assert not torch.equal(conv_scan(x, weight, **options).out, result.out)


@pytest.mark.parametrize("window_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("channels", "taps", "grid", "chunk", "threads"),
    [(1280, 2, 256, 128, 1), (1280, 4, 224, 128, 2), (13, 4, 37, 16, 1)],
    indirect=["threads"],
)
def test_b20_resumed_at_a_boundary_is_bit_identical(
    channels: int, taps: int, grid: int, chunk: int, dtype: torch.dtype, window_dtype: torch.dtype
) -> None:
    x, weight, bias = (
        random(601, channels, seed=0, dtype=dtype),
        random(channels, taps, seed=1),
        random(channels, seed=2),
    )
    options: dict[str, Any] = {"grid_tokens": grid, "chunk_tokens": chunk, "window_dtype": window_dtype}
    boundaries = range(grid, 601, grid)
    cold = conv_scan(x, weight, bias, query_start_loc=[0, 601], captures=[(0, b) for b in boundaries], **options)
    for index, boundary in enumerate(boundaries):
        warm = conv_scan(
            x[boundary:],
            weight,
            bias,
            query_start_loc=[0, 601 - boundary],
            start_positions=[boundary],
            initial_windows=cold.captured_windows[index : index + 1],
            **options,
        )
        assert torch.equal(warm.out, cold.out[boundary:])
        assert torch.equal(warm.final_windows, cold.final_windows)


@pytest.mark.parametrize("threads", [1, 2], indirect=True)
def test_a_sequence_does_not_depend_on_its_batch() -> None:
    rows, starts = [0, 1, 90, 200, 203, 400], [511, 0, 512, 30, 1000]
    x, weight, windows = random(400, 77, seed=0), random(77, 4, seed=1), random(5, 77, 3, seed=2)
    options: dict[str, Any] = {"grid_tokens": 512, "window_dtype": torch.bfloat16}
    packed = conv_scan(x, weight, query_start_loc=rows, start_positions=starts, initial_windows=windows, **options)
    for sequence, (first, last) in enumerate(pairwise(rows)):
        alone = conv_scan(
            x[first:last],
            weight,
            query_start_loc=[0, last - first],
            start_positions=starts[sequence : sequence + 1],
            initial_windows=windows[sequence : sequence + 1],
            **options,
        )
        assert torch.equal(alone.out, packed.out[first:last])
        assert torch.equal(alone.final_windows[0], packed.final_windows[sequence])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_start_loc": [0, 7]}, "end at 8 tokens, got 7"),
        ({"bias": torch.zeros(5)}, r"bias \(6,\), got \(5,\)"),
        ({"weight": torch.zeros(6, 1)}, "at least 2 taps, got 1"),
        ({"weight": torch.zeros(7, 4)}, r"weight \(6, 4\), got \(7, 4\)"),
        ({"initial_windows": torch.zeros(1, 6, 4)}, r"initial_windows \(1, 6, 3\), got \(1, 6, 4\)"),
        ({"out": torch.zeros(8, 6, dtype=torch.int64)}, "floating point type, got torch.int64"),
        ({"bias": torch.zeros(6, device="meta")}, "bias on cpu, got meta"),
        ({"captures": [(0, 9)]}, r"position in \[0, 8\] of sequence 0, got 9"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "x": random(8, 6, seed=0),
        "weight": random(6, 4, seed=1),
        "query_start_loc": [0, 8],
        "window_dtype": torch.float32,
    }
    with pytest.raises(ValueError, match=message):
        conv_scan(**(arguments | change))
