"""SGLang's prefill kernels as the server calls them on a GPU, against the torch operators: outputs, final states and
windows, and those at boundaries inside sequences.

The kernels of the installed SGLang run in the interpreter with the first of the tiles between which they choose by
timing on a GPU. Inputs are float32: the interpreter has no products of bfloat16.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
from triton.runtime.autotuner import Autotuner

from bench.micro.rivals import without_device
from sgl_hybrid.memory.budget import Budget, Units
from sgl_hybrid.memory.state_memory import StateMemory
from sgl_hybrid.seams.decode_tables import Rows, split_rows
from sgl_hybrid.seams.mamba_layer import PrefillPlan
from sgl_hybrid.seams.prefill_scans import Batch, Scans, TorchScans
from sgl_hybrid.seams.stock_scans import StockScans, stock_operators
from tests.tiny_layouts import tiny_layout
from tests.tiny_mixer import layers_of

os.environ["SGLANG_PLATFORM"] = "sgl_hybrid_cpu"
with warnings.catch_warnings():
    # SGLang and its dependencies warn about missing accelerators while they are imported.
    warnings.simplefilter("ignore")
    from sglang.kernels.ops.mamba.triton_ops import ssd_bmm, ssd_chunk_scan, ssd_chunk_state, ssd_state_passing

CHUNK, TAPS = 16, 4
UNROUNDED = 1 << 20
"""A grid that no sequence reaches: the torch operators then round no state on their way, as SGLang's do not."""
P, N = 8, 16


@pytest.fixture(autouse=True)
def untuned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One tile per kernel and no device to enter."""
    kernels = [
        kernel
        for module in (ssd_bmm, ssd_chunk_scan, ssd_chunk_state, ssd_state_passing)
        for kernel in vars(module).values()
        if isinstance(kernel, Autotuner)
    ]
    assert len(kernels) == 6
    for kernel in kernels:
        monkeypatch.setattr(kernel, "configs", kernel.configs[:1])
    with without_device():
        yield


def batch_of(starts: list[int], lengths: list[int], captures: list[tuple[int, int]]) -> Batch:
    return Batch(starts, [0, *accumulate(lengths)], captures)


def stock(batch: Batch, taps: int = TAPS) -> StockScans:
    return StockScans(batch, stock_operators(), chunk_tokens=CHUNK, taps=taps, device=torch.device("cpu"))


BATCHES = {
    "fresh, at chunk ends and its own": batch_of([0], [40], [(0, 32), (0, 16), (0, 40)]),
    "fresh, inside chunks": batch_of([0], [36], [(0, 7), (0, 35), (0, 1)]),
    "several fresh, in chunks of others": batch_of([0, 0, 0], [7, 20, 12], [(2, 8), (1, 9), (1, 20), (0, 7)]),
    "one token each": batch_of([5, 0, 31], [1, 1, 1], [(2, 32), (1, 1)]),
    "continued, cut anywhere": batch_of([21, 0, 5], [20, 9, 14], [(0, 24), (0, 40), (2, 8), (2, 16), (0, 32)]),
    "continued on the grid": batch_of([32, 16], [16, 17], [(0, 48), (1, 32)]),
    "three in one chunk": batch_of([0, 24, 8, 0], [5, 3, 4, 20], [(1, 26), (2, 9), (3, 16)]),
}


class Inputs:
    """Random float32 inputs of a batch, cut from wider rows as in the model, and what its sequences continue from.

    Two heads for each group of B and C. dtype: of states and windows.
    """

    def __init__(self, batch: Batch, groups: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(7)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        tokens, sequences, H = batch.row_ends[-1], len(batch.starts), 2 * groups
        channels = H * P + 2 * groups * N
        projected = normal(tokens, channels + H + 3)[:, 3:]
        self.mixed, self.dt = projected.split([channels, H], dim=-1)
        x, B, C = self.mixed.split([H * P, groups * N, groups * N], dim=-1)
        self.x, self.B, self.C = x.view(tokens, H, P), B.view(tokens, groups, N), C.view(tokens, groups, N)
        self.mixer = SimpleNamespace(A=-normal(H).abs() - 0.1, D=normal(H), dt_bias=normal(H))
        self.weight, self.bias = normal(channels, TAPS), normal(channels)
        self.states = self.windows = None
        if any(batch.starts):
            self.states = normal(sequences, H, P, N).to(dtype)
            self.windows = normal(sequences, channels, TAPS - 1).to(dtype)
            for kept in (self.states, self.windows):
                kept[torch.tensor(batch.starts) == 0] = 0
        self.dtype = dtype

    def scan(self, scans: Scans) -> list[torch.Tensor]:
        out = torch.full(self.x.shape, float("nan"))
        found = scans.scan(self.x, self.dt, self.B, self.C, self.mixer, states=self.states, dtype=self.dtype, out=out)
        return [out, found.final_states, found.captured_states]

    def convolve(self, scans: Scans, *, silu: bool) -> list[torch.Tensor]:
        windows = None if self.windows is None else self.windows.clone()
        return [*scans.convolve(self.mixed, self.weight, self.bias, silu=silu, windows=windows, dtype=self.dtype)]


@pytest.mark.parametrize(("name", "groups"), [(name, 1 + index % 2) for index, name in enumerate(BATCHES)])
def test_the_scan_is_that_of_the_torch_operators(name: str, groups: int) -> None:
    batch = BATCHES[name]
    inputs = Inputs(batch, groups, torch.float32)
    found, expected = (inputs.scan(scans) for scans in (stock(batch), TorchScans(batch, grid_tokens=8)))
    for tensor, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(tensor, wanted, rtol=1e-4, atol=1e-4)
    assert found[2].shape[0] == len(batch.captures)


@pytest.mark.parametrize("name", ["several fresh, in chunks of others", "continued, cut anywhere"])
def test_states_in_bfloat16_are_rounded_where_a_chunk_or_a_sequence_ends(name: str) -> None:
    """Two roundings lie between a state and the exact one: that before its chunk, and its own."""
    batch = BATCHES[name]
    inputs = Inputs(batch, 1, torch.bfloat16)
    found, expected = (inputs.scan(scans) for scans in (stock(batch), TorchScans(batch, grid_tokens=UNROUNDED)))
    assert found[1].dtype == found[2].dtype == torch.bfloat16
    for tensor, wanted in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(tensor.float(), wanted.float(), rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(found[0], expected[0], rtol=2**-7, atol=2**-4)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in BATCHES), ("one token each", torch.bfloat16)],
)
def test_the_convolution_is_that_of_the_torch_operators(name: str, dtype: torch.dtype) -> None:
    batch = BATCHES[name]
    inputs, silu = Inputs(batch, 1, dtype), dtype is torch.float32
    found, expected = (
        inputs.convolve(scans, silu=silu) for scans in (stock(batch), TorchScans(batch, grid_tokens=UNROUNDED))
    )
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-5)
    assert torch.equal(found[1], expected[1])
    assert torch.equal(found[2], expected[2])


def test_a_captured_state_is_the_final_one_of_a_sequence_that_ends_there() -> None:
    """To the bit, as long as the sequence lies where it lay: chunks begin at the first row."""
    whole, cut = batch_of([5, 21], [9, 20], [(1, 40)]), batch_of([5, 21], [9, 19], [])
    inputs = Inputs(whole, 1, torch.bfloat16)
    captured = inputs.scan(stock(whole))[2][0]
    for name in ("x", "dt", "B", "C"):
        setattr(inputs, name, getattr(inputs, name)[: cut.row_ends[-1]])
    assert torch.equal(inputs.scan(stock(cut))[1][1], captured)


def memory_of(org: str) -> StateMemory:
    """Two recurrent layers in groups of their own, ten checkpoints of float32, everything random."""
    layout = tiny_layout(org, groups=2, conv_channels=48, ssm_itemsize=4)
    sizes = {"num_pages": 120} if layout.shared else {"num_attention_pages": 4, "num_checkpoints": 10}
    units = Units(layout=layout, budget=Budget(text="tiny", total_bytes=0, planes=1), **sizes)
    dtypes = {"kv_dtype": torch.bfloat16, "ssm_dtype": torch.float32, "conv_dtype": torch.bfloat16}
    memory = StateMemory(units, device="cpu", **dtypes)
    memory.store.allocate_many(8)
    memory.pool.update_tables(memory.store)
    generator = torch.Generator().manual_seed(3)
    for views in (memory.pool.member_planes(), *(memory.pool.conv_planes(group) for group in range(layout.groups))):
        views.copy_(torch.randn(views.shape, generator=generator).to(views.dtype))
    return memory


@pytest.mark.parametrize("org", ["s2", "d0"])
def test_a_layer_gathers_and_scatters_the_same_pages(org: str) -> None:
    """A fresh request whose slot holds another's state, one from an adopted state, one in place; two boundaries."""
    memory = memory_of(org)
    pool, before = memory.pool, memory.pool.recurrent_planes.clone()
    batch = batch_of([0, 16, 21], [18, 2, 12], [(0, 16), (2, 32)])
    fresh = torch.tensor([True, False, False])
    layer = layers_of(memory)[1]
    channels, heads = layer.mixer.conv1d.weight.shape[0], layer.mixer.num_heads
    inputs = torch.randn(batch.row_ends[-1], channels + heads, generator=torch.Generator().manual_seed(5))
    mixed, dt = inputs.split([channels, heads], dim=-1)

    def rows(*slots: int) -> Rows:
        return split_rows(pool.table_rows(torch.tensor(slots)), memory.layout.member_pages)

    written = rows(1, 2, 3, 8, 6)

    def prefill(scans: Scans) -> list[torch.Tensor]:
        """The output, the states and windows written, and which pages have changed."""
        pool.recurrent_planes.copy_(before)
        out = torch.full((len(mixed), layer.mixer.intermediate_size), float("nan"))
        layer.prefill(PrefillPlan(scans, rows(1, 7, 3), fresh, rows(1, 2, 3), rows(8, 6)), mixed, dt, out)
        states = layer.members[written.members[:, layer.columns]]
        windows = layer.lines[written.lines[:, layer.line_column]]
        return [out, states, windows, (pool.recurrent_planes != before).any(-1)]

    found = prefill(stock(batch, memory.layout.geometry.d_conv))
    expected = prefill(TorchScans(batch, grid_tokens=UNROUNDED))
    for tensor, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(tensor, wanted, rtol=1e-4, atol=1e-4)
    assert torch.equal(found[2], expected[2])
    assert found[3].any()
