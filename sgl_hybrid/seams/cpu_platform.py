"""The CPU reference platform: an out-of-tree SGLang platform for machines without an accelerator.

Attention runs in SGLang's torch-native backend with the products of `attention_cpu`, Mamba2 through the vectorized
torch operators of `triton_ops`. It exists so that the real server can be run and checked anywhere; it is chosen with
`SGLANG_PLATFORM=sgl_hybrid_cpu` and never by itself.

Source: SGLang 0.5.23, `sglang/srt/platforms/interface.py`.
"""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Callable

import psutil
import torch
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from sgl_hybrid.errors import SettingError
from sgl_hybrid.seams import attention_cpu, mamba_ops_cpu
from sgl_hybrid.seams.hooks import Seam


class CpuReferencePlatform(SRTPlatform):
    """CPU tensors, torch operators, no graphs, no pinned memory."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities(supports_triton=False)

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def support_mamba_cache_extra_buffer(self) -> bool:
        return True

    def is_pin_memory_available(self, device: object = None) -> bool:
        return False

    def get_device_total_memory(self, device_id: int = 0) -> int:
        return int(psutil.virtual_memory().total)

    def get_current_memory_usage(self, device: object = None) -> float:
        memory = psutil.virtual_memory()
        return float(memory.total - memory.available)

    def get_device(self, device_id: int = 0) -> torch.device:
        return torch.device("cpu")

    def get_device_name(self, device_id: int = 0) -> str:
        return "sgl_hybrid CPU reference"


def _stay_pageable(tensor: torch.Tensor, device: object = None) -> torch.Tensor:
    """Return the tensor itself: there is no driver to pin memory, and SGLang pins unasked at a decode step."""
    return tensor


_MIXER = "sglang.srt.layers.attention.mamba.mamba"
_BACKEND = "sglang.srt.layers.attention.hybrid_linear_attn_backend"
_ATTENTION = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"

OPERATORS: dict[str, object] = {
    f"{_MIXER}.causal_conv1d_fn": mamba_ops_cpu.causal_conv1d_fn,
    f"{_MIXER}.causal_conv1d_fn_triton": mamba_ops_cpu.causal_conv1d_fn,
    f"{_MIXER}.causal_conv1d_update": mamba_ops_cpu.causal_conv1d_update,
    f"{_MIXER}.causal_conv1d_update_triton": mamba_ops_cpu.causal_conv1d_update,
    f"{_MIXER}.selective_state_update": mamba_ops_cpu.selective_state_update,
    f"{_MIXER}.mamba_chunk_scan_combined": mamba_ops_cpu.mamba_chunk_scan_combined,
    f"{_BACKEND}.track_mamba_states_if_needed": mamba_ops_cpu.track_mamba_states_if_needed,
    f"{_ATTENTION}._run_sdpa_forward_extend": attention_cpu.run_extend,
    f"{_ATTENTION}._run_sdpa_forward_decode": attention_cpu.run_decode,
    "torch.Tensor.pin_memory": _stay_pageable,
}
"""What stock SGLang's layers look up and needs Triton or a driver, or is slow on a CPU, with its replacement. On a
machine without CUDA the four conv names are not bound at all, so they are set, not hooked."""


DECODE_THREADS = "SGLANG_HYBRID_DECODE_THREADS"
"""Environment variable: threads that compute decode steps. Unset: as many as prefills."""


def decode_threads() -> int | None:
    """Return what `SGLANG_HYBRID_DECODE_THREADS` says. Raises: SettingError for anything but a number of threads."""
    wanted = os.environ.get(DECODE_THREADS)
    if wanted is not None and not (wanted.isdecimal() and int(wanted)):
        raise SettingError(f"{DECODE_THREADS}: expected a number of threads, got {wanted!r}; nearest: 1")
    return None if wanted is None else int(wanted)


def decode_with_few_threads(original: Callable[..., object], self: object, *arguments: object) -> object:
    """Around `EagerRunner._execute_decode`: compute the step with as many threads as the environment says."""
    wanted, before = decode_threads(), torch.get_num_threads()
    if wanted is None:
        return original(self, *arguments)
    torch.set_num_threads(wanted)
    try:
        return original(self, *arguments)
    finally:
        torch.set_num_threads(before)


SEAMS: tuple[Seam, ...] = (
    Seam(
        "sglang.srt.model_executor.runner.eager_runner.EagerRunner._execute_decode",
        "around",
        decode_with_few_threads,
        ("forward_batch", "pp_proxy_tensors"),
        "CPU platform: the operators of a small decode step are shorter than waking threads",
    ),
)


def bind_operators() -> None:
    """Bind the torch operators to the names above in this process. Raises: SettingError, as `decode_threads`."""
    decode_threads()
    for target, operator in OPERATORS.items():
        owner, name = target.rsplit(".", 1)
        setattr(pkgutil.resolve_name(owner), name, operator)
