"""Requests on a small cache: the calls of SGLang's scheduler, one request at a time, and what a model would write.

Every step first verifies what it reads: the attention of all earlier tokens and the state that the slot's source holds.
So a request that continues from a wrong state, a freed page or another prefix fails in the step that would use it.

Source: SGLang 0.5.23, `ScheduleBatch.prepare_for_extend` and `prepare_for_decode`, `PrefillAdder`, and the result
processor; the sources of slots as in `sgl_hybrid.seams.mamba_backend`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from types import SimpleNamespace

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH, Req, ScheduleBatch
from sglang.srt.mem_cache.allocation import alloc_for_decode_default, alloc_for_extend
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams, MatchResult
from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.sampling.sampling_params import SamplingParams

from sgl_hybrid.seams import process, tracking
from sgl_hybrid.seams.admission import CheckedPrefillAdder
from sgl_hybrid.seams.pools import track_for_extend
from tests.seams.tree_fixture import Cache, codes
from tests.tiny_layouts import PAGE_TOKENS


def prompt(blocks: int, *, rest: int = 1, seed: int = 0) -> tuple[int, ...]:
    """Return a prompt of whole blocks and a rest, which has no token in common with one of another seed."""
    return tuple(range(1000 * seed, 1000 * seed + blocks * PAGE_TOKENS + rest))


class Running:
    """A request that is bound to a row and state slots."""

    def __init__(self, req: Req) -> None:
        self.req = req

    @property
    def salt(self) -> str | None:
        return self.req.cache_salt

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and output, the last sampled token included."""
        return tuple(self.req.origin_input_ids) + tuple(self.req.output_ids)

    @property
    def slots(self) -> set[int]:
        """State slots that the request holds itself."""
        kv = self.req.kv
        tracking = kv.mamba_ping_pong_track_buffer
        held = {int(kv.mamba_pool_idx)} if kv.holds_mamba else set()
        return held | ({slot for slot in tracking.tolist() if slot >= 0} if tracking is not None else set())


class TinyServer:
    """A scheduler's part on one cache."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.running: list[Running] = []
        self._serial = 0

    @property
    def block(self) -> int:
        return self.cache.tokens.page_size

    def match(self, tokens: Sequence[int], salt: str | None = None) -> MatchResult:
        """Look a prefix up as a probe does: nothing is locked or reserved."""
        key = RadixKey(array("q", tokens), None, cache_salt=salt)
        return self.cache.tree.match_prefix(MatchPrefixParams(key=key))

    def admit(
        self, *prompts: tuple[str | None, Sequence[int]], new_tokens: int = 24, session: str | None = None
    ) -> list[Running]:
        """One pass of the scheduler over waiting requests (salt, tokens): match, reserve and lock them in order, up to
        the first that has to wait. `session`: an open session that all of them belong to."""
        tree, adder = self.cache.tree, self._adder()
        admitted: list[Running] = []
        for salt, tokens in prompts:
            self._serial += 1
            sampling = SamplingParams(max_new_tokens=new_tokens)
            req = Req(f"r{self._serial}", "", array("q", tokens), sampling, cache_salt=salt, session_id=session)
            if session is not None:
                req.session_generation = tree.ensure_session_generation(session)
            req.init_next_round_input(tree)
            adder.add_one_req(req, has_chunked_req=False, truncation_align_size=None)
            if len(adder.can_run_list) == len(admitted):
                break
            admitted.append(Running(req))
        self.running += admitted
        return admitted

    def extend(self, *batch: Running, end: int | None = None) -> bool:
        """Prefill requests in one batch up to `end` (all of each prompt by default); False if pages are short.

        A first chunk binds row and slots. It cannot be short: `admit` has reserved for it.
        """
        for req in (running.req for running in batch):
            req.extend_end = len(req.full_untruncated_fill_ids) if end is None else end
        if all(running.req.kv.holds_kv for running in batch):
            num_tokens = sum(running.req.extend_len + self.block for running in batch)
            if not self._has_room(num_tokens):
                return False
        reqs = [running.req for running in batch]
        state = self._batch(reqs, [req.extend_end for req in reqs])
        alloc_for_extend(state)
        tracked = [track_for_extend(state, req) for req in reqs]
        ScheduleBatch._collect_deferred_mamba_cow_and_clear(state, reqs)
        states = self.cache.requests.mamba_pool
        if state.mamba_clear_indices is not None:
            states.clear_slots(state.mamba_clear_indices)
        if state.mamba_cow_src_indices is not None:
            states.copy_from(state.mamba_cow_src_indices, state.mamba_cow_dst_indices)
        for running, track in zip(batch, tracked, strict=True):
            self._run_extend(running, track.track_position if track.track_mask else None)
        return True

    def publish(self, running: Running) -> None:
        """Give the tree what the last chunk has tracked; the next chunk starts where it ended."""
        checkpoint_kv_cache(running.req, self.cache.tree)

    def decode(self, running: Running, token: int, *, late_result: bool = False) -> bool:
        """Sample `token` and run the step that consumes the one before it; False if no page could be had.

        late_result: with overlap scheduling the result of the prefill comes when this step has been launched.
        """
        req = running.req
        req.output_ids.append(token)
        assert len(req.output_ids) < req.sampling_params.max_new_tokens
        if not self._has_room(self.block):
            return False
        batch = self._batch([req], [req.kv.kv_committed_len])
        alloc_for_decode_default(batch, 1)
        batch.seq_lens_cpu = batch.seq_lens_cpu + 1
        grid = self.cache.memory.layout.checkpoint_interval
        crosses = req.kv.kv_committed_len % grid == 0
        if crosses:
            tracking.take_slots(batch, grid)
        tracking.release_read_states(None, batch)
        position = req.kv.mamba_next_track_idx
        self._run_decode(running, position if crosses and not req.kv.mamba_ping_pong_empty[position] else None)
        if late_result:
            self.publish(running)
        if crosses:
            req.kv.mamba_last_track_seqlen = req.kv.kv_committed_len
            tracking.publish_crossed(SimpleNamespace(tree_cache=self.cache.tree), req, batch, position)
        return True

    def finish(self, running: Running) -> None:
        """End a request as its last token does: the tree keeps what it can name."""
        running.req.finished_reason = FINISH_LENGTH(length=len(running.req.output_ids))
        self._release(running, checkpoint=True)

    def abort(self, running: Running) -> None:
        """End a request that the user gave up, or take it back; nothing more of it is published."""
        running.req.finished_reason = FINISH_ABORT()
        self._release(running, checkpoint=False)

    def flush(self) -> None:
        """Drop everything cached, as `/flush_cache` does when no request runs."""
        assert not self.running
        self.cache.tree.reset()
        self.cache.requests.clear()
        self.cache.tokens.clear()

    def _release(self, running: Running, *, checkpoint: bool) -> None:
        self.running.remove(running)
        if running.req.kv.holds_kv:
            release_kv_cache(running.req, self.cache.tree, checkpoint=checkpoint)
        else:
            self.cache.tree.unlock(running.req.lock)

    def _adder(self, chunk_tokens: int | None = None) -> CheckedPrefillAdder:
        running = [running.req for running in self.running]
        return CheckedPrefillAdder(
            self.block,
            self.cache.tree,
            self.cache.tokens,
            SimpleNamespace(reqs=running, batch_size=lambda: len(running)),
            new_token_ratio=1.0,
            rem_input_tokens=1 << 20,
            rem_chunk_tokens=chunk_tokens,
        )

    def _has_room(self, num_tokens: int) -> bool:
        return self.cache.tokens.check_decode_capacity(num_tokens=num_tokens, tree_cache=self.cache.tree)

    def _batch(self, reqs: list[Req], lengths: list[int]) -> SimpleNamespace:
        """SGLang's batch, with what the functions used here read of it. lengths: tokens of each row."""
        rows = torch.tensor([req.kv.req_pool_idx or 0 for req in reqs])
        return SimpleNamespace(
            reqs=reqs,
            tree_cache=self.cache.tree,
            req_to_token_pool=self.cache.requests,
            device="cpu",
            prefix_lens=[req.prefix_len for req in reqs],
            extend_lens=[req.extend_len for req in reqs],
            extend_num_tokens=sum(req.extend_len for req in reqs),
            seq_lens=torch.tensor(lengths),
            seq_lens_cpu=torch.tensor(lengths),
            req_pool_indices=rows,
            req_pool_indices_cpu=rows,
            hisparse_coordinator=None,
            model_config=SimpleNamespace(is_encoder_decoder=False),
            maybe_evict_swa=lambda: None,
            is_dllm=lambda: False,
        )

    def _row(self, req: Req, start: int, end: int) -> torch.Tensor:
        return self.cache.requests.req_to_token[req.kv.req_pool_idx, start:end].long()

    def _read(self, running: Running, length: int) -> None:
        """Verify all that a step which starts after `length` tokens reads."""
        if length == 0:
            return
        numbers = codes(running.salt, running.tokens)
        contents, states = self.cache.contents, self.cache.requests.mamba_pool
        assert contents.wrong_tokens(self._row(running.req, 0, length), numbers[:length]) == []
        source = int(states.source[int(running.req.kv.mamba_pool_idx)])
        assert contents.wrong_states({source: numbers[length - 1]}) == []
        process.served().audit.read(source)

    def _run_extend(self, running: Running, position: int | None) -> None:
        req = running.req
        self._read(running, req.prefix_len)
        numbers, end = codes(running.salt, running.tokens), req.extend_end
        contents, states = self.cache.contents, self.cache.requests.mamba_pool
        contents.write_tokens(self._row(req, req.prefix_len, end), numbers[req.prefix_len : end])
        own = int(req.kv.mamba_pool_idx)
        contents.write_state(own, numbers[end - 1])
        states.source[own] = own
        captures = states.captures.pop(req.rid, [])
        if position is not None:
            tracking = int(req.kv.mamba_ping_pong_track_buffer[position])
            captures = [*captures, (req.kv.mamba_last_track_seqlen, tracking)]
        audit = process.served().audit
        audit.wrote([(own, end), *((kept, depth) for depth, kept in captures)])
        for depth, kept in captures:
            contents.write_state(kept, numbers[depth - 1])
            states.source[kept] = kept

    def _run_decode(self, running: Running, position: int | None) -> None:
        req = running.req
        length = req.kv.kv_committed_len
        self._read(running, length - 1)
        numbers = codes(running.salt, running.tokens)
        contents, states = self.cache.contents, self.cache.requests.mamba_pool
        contents.write_tokens(self._row(req, length - 1, length), numbers[length - 1 : length])
        own = int(req.kv.mamba_pool_idx)
        written = own if position is None else int(req.kv.mamba_ping_pong_track_buffer[position])
        process.served().audit.wrote([(written, length)])
        contents.write_state(written, numbers[length - 1])
        states.source[own] = states.source[written] = written
