"""Resuming under exact continuation: the prompt by a prefill, the request's own outputs again by decode steps.

SGLang resumes a retracted request by one prefill of its prompt and its outputs. A prefill sums in another order than
the decode steps that computed the outputs before, so what follows would have other bits than in a run that was never
interrupted. Here the outputs are taken away when the request is about to be admitted again. Its prefill ends where the
first one did, and it decodes from there; the token that a step samples is replaced by the one known for its position.
The client notices nothing: until the outputs are back nothing is sent, and their log-probabilities stay what they were.

A request with a grammar, a sampling mask, input embeddings or a session resumes as in SGLang.

Source: SGLang 0.5.23, `managers/schedule_batch.py` (`reset_for_retract`, `init_next_round_input`),
`model_executor/model_runner.py` (`sample`), `managers/scheduler_components/output_streamer.py`.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from sgl_hybrid.seams.exact import is_exact
from sgl_hybrid.seams.hooks import Seam


class Replay(NamedTuple):
    """What a request had generated. logprobs: lists of its `ReqLogprob` by field, an entry for each of `output_ids`."""

    rid: str
    prompt_tokens: int
    output_ids: list[int]
    logprobs: dict[str, list[Any]]


_replays: WeakKeyDictionary[Any, Replay] = WeakKeyDictionary()
"""Requests that were admitted again, or are about to be, and have not decoded all their known outputs."""


def begin(self: Any, *arguments: Any, **options: Any) -> None:
    """Before `Req.init_next_round_input`: take the outputs of a retracted request away, to be decoded again."""
    if self.is_retracted and self.output_ids and is_exact() and _can_replay(self):
        # Retracted while it replayed: what it knew then is more than what it has now.
        if self not in _replays:
            logprobs = {name: list(entries) for name, entries in _output_logprobs(self).items()}
            _replays[self] = Replay(self.rid, len(self.origin_input_ids), list(self.output_ids), logprobs)
        for name in _output_logprobs(self):
            setattr(self.logprob, name, [])
        self.output_ids = array("q")
        self.hidden_states = []
        self.customized_info = None
        self.reasoning_tokens, self._is_reasoning_over, self._think_end_matcher = 0, False, None


def sample_known(original: Callable[..., torch.Tensor], self: Any, logits_output: Any, forward_batch: Any) -> Any:
    """Around `ModelRunner.sample`: tokens [requests], those of known outputs in place of the sampled ones."""
    sampled = original(self, logits_output, forward_batch)
    known = {replay.rid: replay for replay in _replays.values()} if _replays else {}
    if known and not known.keys().isdisjoint(forward_batch.rids):
        for row, (rid, seq_len) in enumerate(zip(forward_batch.rids, forward_batch.seq_lens.tolist(), strict=False)):
            replay = known.get(rid)
            # A chunk that ends inside the prompt samples too, and nobody reads it.
            if replay is not None and 0 <= seq_len - replay.prompt_tokens < len(replay.output_ids):
                sampled[row] = replay.output_ids[seq_len - replay.prompt_tokens]
    return sampled


def withhold(
    original: Callable[..., None],
    self: Any,
    reqs: list[Any],
    return_logprob: bool,
    skip_req: Any = None,
    **options: Any,
) -> None:
    """Around `SchedulerOutputStreamer._stream_output_generation`: a request sends nothing until its known outputs are
    back."""
    if _replays:
        reqs = [req for req in reqs if req is skip_req or _is_back(req)]
    original(self, reqs, return_logprob, skip_req, **options)


def _is_back(req: Any) -> bool:
    """Whether all known outputs of a request are decoded, or it ends, as one that is aborted; then they become what
    they were."""
    replay = _replays.get(req)
    if replay is not None:
        num_known = len(replay.output_ids)
        if len(req.output_ids) < num_known and not req.finished():
            return False
        del _replays[req]
        req.output_ids[:num_known] = array("q", replay.output_ids)
        for name, entries in replay.logprobs.items():
            getattr(req.logprob, name)[: len(entries)] = entries
    return True


def _can_replay(req: Any) -> bool:
    plain = req.grammar is None and req.input_embeds is None and req.session is None
    return plain and not req.return_sampling_mask


def _output_logprobs(req: Any) -> dict[str, list[Any]]:
    """Lists with an entry for each output token, by field of the request's log-probabilities."""
    if not req.return_logprob:
        return {}
    names = [field.name for field in dataclasses.fields(req.logprob) if field.name.startswith("output_")]
    return {name: held for name in names if (held := getattr(req.logprob, name)) is not None}


SEAMS: tuple[Seam, ...] = (
    Seam(
        "sglang.srt.managers.schedule_batch.Req.init_next_round_input",
        "before",
        begin,
        ("tree_cache", "cow_mamba"),
        "a retracted request decodes its outputs again",
    ),
    Seam(
        "sglang.srt.model_executor.model_runner.ModelRunner.sample",
        "around",
        sample_known,
        ("logits_output", "forward_batch"),
        "what is decoded again are the tokens that were sampled before",
    ),
    Seam(
        "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer._stream_output_generation",
        "around",
        withhold,
        ("reqs", "return_logprob", "skip_req"),
        "nothing is sent twice",
    ),
)
