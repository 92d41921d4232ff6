"""A plugin that breaks sgl_hybrid on purpose, one fault at a time: what `bench verify` must notice.

With this folder on PYTHONPATH SGLang loads it beside sgl_hybrid, in every process. `SGL_HYBRID_MUTANT` names the fault;
without it nothing is changed. Every fault is one that systems of this kind have had.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any


def skip_rounding() -> None:
    """The scan passes a boundary with the state it has, instead of the one that the storage type can hold."""
    from triton_ops.ssm_scan import api

    cut = api.cut_chunks

    def without_boundaries(*args: Any, **options: Any) -> list[Any]:
        return [chunk._replace(ends_at_boundary=False) for chunk in cut(*args, **options)]

    api.cut_chunks = without_boundaries


def publish_wrong_depth() -> None:
    """The state of one token before a boundary is kept as that of the boundary."""
    from sgl_hybrid.seams.prefill_scans import TorchScans

    make = TorchScans.__init__

    def one_token_short(self: Any, batch: Any, **options: Any) -> None:
        short = [(row, position - 1) for row, position in batch.captures]
        make(self, batch._replace(captures=short), **options)

    TorchScans.__init__ = one_token_short


def reuse_early() -> None:
    """A checkpoint that is still in the tree lends its memory to whoever asks for a new one."""
    from sgl_hybrid.memory.page_pool import PagePool

    update_tables = PagePool.update_tables

    def alias(self: Any, store: Any) -> int:
        count: int = update_tables(self, store)
        live = [v for v in range(1, store.num_virtual + 1) if store.is_live(v)]
        cached = [v for v in live if store.is_published(v)]
        if cached:
            for v in set(live) - set(cached):
                self.member_table[v] = self.member_table[cached[0]]
        return count

    PagePool.update_tables = alias


def resume_in_the_prefill() -> None:
    """The prefill with which a retracted request resumes ends behind its outputs, not at its prompt."""
    from sgl_hybrid.seams import replay

    replay._can_replay = lambda req: False


def replay_one_position_late() -> None:
    """While a request decodes its outputs again, each known one is fed a step after its own."""
    from sgl_hybrid.seams import replay

    known = replay.Replay
    replay.Replay = lambda rid, prompt_tokens, *args: known(rid, prompt_tokens + 1, *args)


MUTANTS: dict[str, Callable[[], None]] = {
    "rounding skipped": skip_rounding,
    "wrong depth published": publish_wrong_depth,
    "slot reused early": reuse_early,
    "resumed in the prefill": resume_in_the_prefill,
    "replayed one position late": replay_one_position_late,
}


def register() -> None:
    """Break what SGL_HYBRID_MUTANT names. Raises: KeyError for a fault that is not in the table."""
    name = os.environ.get("SGL_HYBRID_MUTANT")
    if name is not None:
        MUTANTS[name]()
