"""SGLang's unified pool on the CPU platform: what is let pass, the ids that are handed out, translated reads."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from sgl_hybrid.seams import unified_cpu


def test_the_platform_list_lets_the_unified_pool_pass_and_nothing_else() -> None:
    refused: list[str] = []

    def original(platform: object, *, subsystem: str) -> None:
        refused.append(subsystem)

    unified_cpu.pass_platform_list(original, None, subsystem="the unified memory pool (--enable-unified-memory)")
    assert refused == []
    unified_cpu.pass_platform_list(original, None, subsystem="hierarchical cache")
    assert refused == ["hierarchical cache"]


@pytest.mark.parametrize("unified", [True, False])
def test_the_backend_list_is_passed_only_for_the_unified_pool(monkeypatch: pytest.MonkeyPatch, unified: bool) -> None:
    from sglang.srt.arg_groups import kv_cache_hook

    monkeypatch.delenv(unified_cpu.ENVIRONMENT, raising=False)
    monkeypatch.setattr(kv_cache_hook, "resolving_view", lambda args: SimpleNamespace(enable_unified_memory=unified))
    before = kv_cache_hook.attention_backends_of
    seen: list[bool] = []

    def original(args: object) -> str:
        seen.append(kv_cache_hook.attention_backends_of is before)
        return "resolved"

    assert unified_cpu.pass_backend_list(original, object()) == "resolved"
    assert seen == [not unified]
    assert kv_cache_hook.attention_backends_of is before
    assert (unified_cpu.ENVIRONMENT in os.environ) == unified
    monkeypatch.delenv(unified_cpu.ENVIRONMENT, raising=False)


def test_the_kernels_hand_out_the_ids_of_whole_pages() -> None:
    """Pages of 4 tokens. Two requests: 3 tokens, the third of them new; 5 new tokens. Pages 7, 8, 9 are free."""
    extend = unified_cpu._TorchKernel(unified_cpu._alloc_extend)
    out = torch.full((6,), -1, dtype=torch.int64)
    prefix, length, last = torch.tensor([2, 0]), torch.tensor([3, 5]), torch.tensor([21, -1])
    extend[(2,)](prefix, length, last, torch.tensor([7, 8, 9]), out, 2, 4)
    assert out.tolist() == [22, 28, 29, 30, 31, 32]
    decode = unified_cpu._TorchKernel(unified_cpu._alloc_decode)
    out = torch.full((2,), -1, dtype=torch.int64)
    # The first request grows inside its page; the second one, of 8 tokens before, opens page 9.
    decode[(2,)](torch.tensor([4, 9]), torch.tensor([22, 35]), torch.tensor([9]), out, 2, 4)
    assert out.tolist() == [23, 36]


def test_attention_reads_the_physical_rows_of_its_batch() -> None:
    """Virtual ids of two of three requests, translated by adding 100, in the order of the batch."""
    table = torch.tensor([[1, 2, 3, 0], [4, 5, 0, 0], [6, 7, 8, 9]], dtype=torch.int32)
    backend = SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=table))
    runner = SimpleNamespace(token_to_kv_pool_allocator=SimpleNamespace(translate_kv_loc=lambda ids: ids + 100))
    unified_cpu.remember_allocator(None, backend, runner)
    batch = SimpleNamespace(seq_lens=torch.tensor([3, 2]), req_pool_indices=torch.tensor([2, 1]))
    unified_cpu.translate_rows(None, backend, batch)
    assert backend.physical_rows.tolist() == [[106, 107, 108], [104, 105, 100]]
    assert backend.physical_rows.dtype == torch.int64
    seen = {}

    def original(self, query, output, k_cache, v_cache, rows, order, seq_lens, **rest):  # type: ignore[no-untyped-def]
        seen.update(rows=rows[order].tolist(), seq_lens=seq_lens, **rest)
        return output

    out = torch.zeros(1)
    given = (torch.zeros(1), out, torch.zeros(1), torch.zeros(1), table, batch.req_pool_indices, batch.seq_lens)
    assert unified_cpu.read_physical_rows(original, backend, *given, scaling=0.5) is out
    assert seen["rows"] == backend.physical_rows.tolist()
    assert seen["scaling"] == 0.5
    assert seen["seq_lens"] is batch.seq_lens


def test_a_step_without_requests_has_no_rows() -> None:
    backend = SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(3, 4, dtype=torch.int32)))
    runner = SimpleNamespace(token_to_kv_pool_allocator=SimpleNamespace(translate_kv_loc=lambda ids: ids))
    unified_cpu.remember_allocator(None, backend, runner)
    none = torch.zeros(0, dtype=torch.int64)
    unified_cpu.translate_rows(None, backend, SimpleNamespace(seq_lens=none, req_pool_indices=none))
    assert backend.physical_rows.shape == (0, 0)
