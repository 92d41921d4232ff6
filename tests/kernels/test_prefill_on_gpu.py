"""SGLang's prefill kernels on the shapes of a model, against the torch operators, where there is a GPU:

pytest -m gpu tests/kernels/test_prefill_on_gpu.py
"""

from __future__ import annotations

from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch

from sgl_hybrid.seams.prefill_scans import Batch, Scans, TorchScans
from sgl_hybrid.seams.stock_scans import StockScans, stock_operators

# SGLang's imports and Triton's tuning warn of what concerns neither side of the comparison.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
H, P, N, G, TAPS, CHUNK, GRID = 24, 64, 128, 2, 4, 256, 512
CHANNELS = H * P + 2 * G * N
STARTS, LENGTHS = [0, 512, 700, 0], [700, 1100, 400, 3]
BATCH = Batch(STARTS, [0, *accumulate(LENGTHS)], [(0, 512), (1, 1536), (1, 1024), (2, 1024)])


@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float32])
def test_a_prefill_is_that_of_the_torch_operators(state_dtype: torch.dtype) -> None:
    """Four requests, chunks of others, boundaries inside chunks and at their ends, bfloat16 activations."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    device = torch.device("cuda")
    torch.manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device)

    mixed, dt = normal(BATCH.row_ends[-1], CHANNELS + H).bfloat16().split([CHANNELS, H], dim=-1)
    weight, bias = normal(CHANNELS, TAPS).bfloat16() / 2, normal(CHANNELS).bfloat16()
    mixer = SimpleNamespace(A=-normal(H).abs() - 0.1, D=normal(H), dt_bias=normal(H) - 2)
    states, windows = normal(len(STARTS), H, P, N).to(state_dtype), normal(len(STARTS), CHANNELS, TAPS - 1).bfloat16()
    for kept in (states, windows):
        kept[torch.tensor(STARTS, device=device) == 0] = 0

    def run(scans: Scans) -> list[torch.Tensor]:
        convolved = scans.convolve(mixed, weight, bias, silu=True, windows=windows.clone(), dtype=windows.dtype)
        x, B, C = convolved.out.split([H * P, G * N, G * N], dim=-1)
        x, B, C = x.view(-1, H, P), B.view(-1, G, N), C.view(-1, G, N)
        out = torch.full(x.shape, float("nan"), device=device).bfloat16()
        scanned = scans.scan(x, dt, B, C, mixer, states=states, dtype=state_dtype, out=out)
        return [*convolved, *scanned]

    found = run(StockScans(BATCH, stock_operators(), chunk_tokens=CHUNK, taps=TAPS, device=device))
    for tensor, wanted in zip(found, run(TorchScans(BATCH, grid_tokens=GRID)), strict=True):
        error = (tensor.float() - wanted.float()).norm() / wanted.float().norm()
        assert error < 2e-2, f"relative error {error:.1e} of {list(tensor.shape)}"
