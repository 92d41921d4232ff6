"""Boundaries that decode crosses: a second state slot for one step, published with that step's result.

A running request holds one state slot. The step that crosses a boundary writes the new state into a second slot, if one
is free; the result of the step gives that slot to the tree, and the next step reads from there and writes the request's
own slot again. The published state stays locked until that next step is prepared.

SGLang's lazy strategy, whose functions these replace, holds the second slot from one boundary to the next and publishes
when the request ends.

Source: SGLang 0.5.23, `sglang/srt/managers/schedule_batch.py`, `scheduler_components/batch_result_processor.py`.
"""

from __future__ import annotations

from typing import Any

from sgl_hybrid.seams.exact import NO_BOUNDARY
from sgl_hybrid.seams.hooks import Seam


def take_slots(self: Any, mamba_track_interval: int) -> None:
    """Replace `ScheduleBatch.mamba_lazy_prealloc_at_boundary`: a tracking slot for each row that crosses a boundary.

    Nothing is evicted for it: a state of the request's own output is not worth a cached one. Under exact continuation
    no row takes one, and the boundaries that decoding passes are counted.
    """
    checkpoints = self.tree_cache.checkpoints
    if mamba_track_interval == NO_BOUNDARY:
        grid = checkpoints.store.layout.checkpoint_interval
        checkpoints.store.counts.decode_crossings += [n % grid for n in self.seq_lens_cpu.tolist()].count(0)
        return
    for req, length in zip(self.reqs, self.seq_lens_cpu.tolist(), strict=True):
        if length % mamba_track_interval == 0:
            checkpoints.take_tracking_slot(req)


def give_slots_back(self: Any) -> None:
    """Replace `ScheduleBatch.mamba_lazy_undo_prealloc_at_boundary`: a mixed step tracks nothing for its decode rows."""
    if self.mamba_track_mask_cpu is None:
        return
    for req, at_boundary in zip(self.reqs, self.mamba_track_mask_cpu, strict=True):
        if not at_boundary:
            continue
        req.kv.mamba_untracked_decode_batch_idx = req.decode_batch_idx
        self.tree_cache.checkpoints.free_tracking_slot(req)


def publish_crossed(self: Any, req: Any, batch: Any, track_idx: int) -> None:
    """Replace `SchedulerBatchResultProcessor.mamba_lazy_post_decode_at_boundary`: publish the boundary that a decode
    step has crossed. A request that ends with this step publishes as it is released."""
    if req.kv.mamba_ping_pong_empty[track_idx]:
        req.kv.mamba_last_track_seqlen = None
        return
    req.kv.mamba_last_track_idx = track_idx
    if req.finished():
        return
    req.refresh_fill_ids()
    self.tree_cache.checkpoints.crossed[req.rid] = req
    self.tree_cache.checkpoint(req, up_to=req.kv.mamba_last_track_seqlen)


def release_read_states(result: Any, self: Any) -> None:
    """After `ScheduleBatch.prepare_for_decode`: the published states that this step reads need no lock any more, as
    nothing is allocated before it is launched and what is launched later runs after it. Slots that an earlier step has
    read are free."""
    if not self.tree_cache.supports_mamba():
        return
    checkpoints = self.tree_cache.checkpoints
    while checkpoints.kept:
        checkpoints.free_tracking_slot(checkpoints.kept.popitem()[1])
    if not checkpoints.crossed:
        return
    for req in self.reqs:
        if checkpoints.crossed.pop(req.rid, None) is not None:
            checkpoints.release_state(req)
            checkpoints.kept[req.rid] = req


_BATCH = "sglang.srt.managers.schedule_batch.ScheduleBatch"

SEAMS: tuple[Seam, ...] = (
    Seam(
        f"{_BATCH}.mamba_lazy_prealloc_at_boundary",
        "replace",
        take_slots,
        ("mamba_track_interval",),
        "decode takes a second slot for one step only",
    ),
    Seam(
        f"{_BATCH}.mamba_lazy_undo_prealloc_at_boundary",
        "replace",
        give_slots_back,
        (),
        "a mixed step gives such slots back",
    ),
    Seam(
        "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor."
        "mamba_lazy_post_decode_at_boundary",
        "replace",
        publish_crossed,
        ("req", "batch", "track_idx"),
        "a crossed boundary is published with its step's result",
    ),
    Seam(
        f"{_BATCH}.prepare_for_decode",
        "after",
        release_read_states,
        (),
        "a state is locked only until the step that reads it",
    ),
)
