"""The plugin for vLLM's CPU build, against a sequential recurrence; vLLM itself is not needed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

PLUGIN = Path(__file__).parents[2] / "bench" / "vllm_cpu" / "vllm_cpu_hybrid_checkpoints.py"
HEADS, HEAD_DIM, STATE = 2, 3, 4


@pytest.fixture(scope="module")
def plugin() -> ModuleType:
    spec = importlib.util.spec_from_file_location("vllm_cpu_hybrid_checkpoints", PLUGIN)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sequential_scan(x, dt, A, B, C, chunk_size, out, *, initial_states=None, cu_seqlens=None, z=None, **rest):  # type: ignore[no-untyped-def]
    """A recurrence that forgets by half a token: state = state / 2 + x B. One state per sequence, out in place."""
    finals = []
    for row in range(len(cu_seqlens) - 1):
        state = torch.zeros(HEADS, HEAD_DIM, STATE) if initial_states is None else initial_states[row].clone()
        for t in range(int(cu_seqlens[row]), int(cu_seqlens[row + 1])):
            state = state / 2 + x[t][:, :, None] * B[t][:, None, :]
            out[t] = (state * C[t][:, None, :]).sum(-1)
        finals.append(state)
    return torch.stack(finals)


@pytest.mark.parametrize("continued", [False, True])
def test_states_between_chunks_are_those_of_the_whole_scan(plugin: ModuleType, continued: bool) -> None:
    """Two sequences of 7 and 4 tokens in chunks of 4, 3 and 2, 2: the last chunk of each ends where the whole does."""
    torch.manual_seed(0)
    lengths, chunk_bounds, owners = [0, 7, 11], [0, 4, 7, 9, 11], [0, 0, 1, 1]
    x, B, C = torch.randn(11, HEADS, HEAD_DIM), torch.randn(11, HEADS, STATE), torch.randn(11, HEADS, STATE)
    dt, A = torch.zeros(11, HEADS), torch.zeros(HEADS)
    initial = torch.randn(2, HEADS, HEAD_DIM, STATE) if continued else None
    common: dict[str, Any] = {"cu_seqlens": torch.tensor(lengths), "initial_states": initial}
    whole_out, out = torch.empty_like(x), torch.full_like(x, torch.nan)
    whole = sequential_scan(x, dt, A, B, C, 4, whole_out, **common)
    scan = plugin.with_chunk_states(sequential_scan)
    states = scan(
        x,
        dt,
        A,
        B,
        C,
        4,
        out,
        return_intermediate_states=True,
        seq_idx=torch.tensor(owners),
        cu_chunk_seqlens=torch.tensor(chunk_bounds),
        last_chunk_indices=torch.tensor([1, 3]),
        **common,
    )
    assert states.shape == (4, HEADS, HEAD_DIM, STATE)
    assert torch.equal(states[[1, 3]], whole)
    assert torch.equal(out, whole_out)
    # The state after the first chunk is that of a run which ends there.
    cut = sequential_scan(
        x[:4],
        dt,
        A,
        B,
        C,
        4,
        out.clone(),
        cu_seqlens=torch.tensor([0, 4]),
        initial_states=None if initial is None else initial[:1],
    )
    assert torch.equal(states[0], cut[0])


def test_a_scan_that_asks_for_final_states_is_vllms_own(plugin: ModuleType) -> None:
    seen: dict[str, Any] = {}

    def own(*args: Any, **rest: Any) -> torch.Tensor:
        seen.update(rest)
        return torch.tensor([7.0])

    tensor = torch.zeros(1)
    found = plugin.with_chunk_states(own)(
        tensor, tensor, tensor, tensor, tensor, 4, tensor, cu_seqlens=tensor, D=tensor
    )
    assert found.item() == 7.0
    assert seen["cu_seqlens"] is tensor
    assert "return_intermediate_states" not in seen


def test_a_checkpoint_is_the_inputs_before_it_and_its_chunks_state(plugin: ModuleType) -> None:
    """Two prefills in one batch, of 6 and 5 tokens; the first leaves a checkpoint after its 4th token, in block 3."""
    x = torch.arange(2 * 11, dtype=torch.float32).reshape(2, 11)
    conv, ssm = torch.full((5, 2, 3), -1.0), torch.full((5, 1), -1.0)
    checkpoint = SimpleNamespace(checkpoint_offsets=torch.tensor([4, 0]), state_indices=torch.tensor([3, 4]))
    chunk_states = torch.tensor([[10.0], [11.0], [12.0]])
    plugin.store_checkpoint(
        checkpoint, torch.tensor([0, 0]), x, conv, chunk_states, ssm, torch.tensor([0, 6, 11]), state_len=2
    )
    assert conv[3].tolist() == [[2.0, 3.0, -1.0], [13.0, 14.0, -1.0]]
    assert ssm[3].tolist() == [10.0]
    untouched = [0, 1, 2, 4]
    assert (conv[untouched] == -1).all()
    assert (ssm[untouched] == -1).all()
