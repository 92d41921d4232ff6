"""SGLang's prefill kernels compile for A100 and H100 from what the server gives them: bfloat16 activations, states and
windows of Falcon-H1-7B, sequences with and without states. And how many launches a layer takes."""

from __future__ import annotations

import os
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from bench.micro.rivals import without_device
from bench.micro.static_compile import MachineCode, compile_with
from sgl_hybrid.memory.presets import model_geometry
from sgl_hybrid.seams.prefill_scans import Batch
from sgl_hybrid.seams.stock_scans import StockScans, stock_operators

os.environ["SGLANG_PLATFORM"] = "sgl_hybrid_cpu"
with warnings.catch_warnings():
    # SGLang and its dependencies warn about missing accelerators while they are imported.
    warnings.simplefilter("ignore")
    from sglang.kernels.ops.mamba.triton_ops import ssd_bmm, ssd_chunk_scan, ssd_chunk_state, ssd_state_passing

BATCH = Batch([0, 512, 700], [0, 700, 1800, 2200], [(0, 512), (1, 1024), (1, 1536)])
CHUNK = 256
KERNELS = [
    "_causal_conv1d_fwd_kernel",
    "_chunk_cumsum_fwd_kernel",
    "_chunk_state_fwd_kernel",
    "_state_passing_fwd_kernel",
    "_bmm_chunk_fwd_kernel",
    "_chunk_scan_fwd_kernel",
    "_chunk_state_varlen_kernel",
]
"""Of one layer, in order; then `_chunk_state_varlen_kernel` once more for each boundary of the sequence with most."""


@pytest.mark.parametrize(("capability", "continues"), [(80, False), (90, True)])
def test_a_layer_compiles_and_takes_seven_launches_and_one_per_boundary(
    capability: int, continues: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[tuple[str, MachineCode]] = []
    run = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        code = compile_with(lambda: run(kernel, *args, grid=grid, warmup=True, **options), capability)
        compiled.append((kernel.fn.__name__, code))

    monkeypatch.setattr(JITFunction, "run", compile_only)
    for module in (ssd_bmm, ssd_chunk_scan, ssd_chunk_state, ssd_state_passing):
        for kernel in vars(module).values():
            if isinstance(kernel, Autotuner):
                monkeypatch.setattr(kernel, "configs", kernel.configs[:1])

    geometry = model_geometry("falcon-h1-7b")
    H, P, N, channels = geometry.ssm_heads, geometry.ssm_head_dim, geometry.d_state, geometry.conv_channels
    groups, tokens, sequences = (channels - H * P) // (2 * N), BATCH.row_ends[-1], len(BATCH.starts)

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    device = torch.device("meta")
    scans = StockScans(BATCH, stock_operators(), chunk_tokens=CHUNK, taps=geometry.d_conv, device=device)
    mixed, dt = empty(tokens, channels + H).split([channels, H], dim=-1)
    windows = empty(sequences, channels, geometry.d_conv - 1) if continues else None
    mixer = SimpleNamespace(**{name: empty(H, dtype=torch.float32) for name in ("A", "D", "dt_bias")})
    with without_device():
        convolved = scans.convolve(
            mixed,
            empty(channels, geometry.d_conv),
            empty(channels),
            silu=True,
            windows=windows,
            dtype=torch.bfloat16,
        )
        x, B, C = convolved.out.split([H * P, groups * N, groups * N], dim=-1)
        scanned = scans.scan(
            x.view(tokens, H, P),
            dt,
            B.view(tokens, groups, N),
            C.view(tokens, groups, N),
            mixer,
            states=empty(sequences, H, P, N) if continues else None,
            dtype=torch.bfloat16,
            out=empty(tokens, H, P),
        )
    assert [name for name, _ in compiled] == [*KERNELS, KERNELS[-1], KERNELS[-1]]
    assert all(code.instructions for _, code in compiled)
    assert scanned.captured_states.shape == (3, H, P, N)
    assert scanned.final_states.dtype == scanned.captured_states.dtype == torch.bfloat16
