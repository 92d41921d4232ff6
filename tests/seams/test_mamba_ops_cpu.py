"""The CPU stand-ins keep SGLang's contract: outputs, states in place, tracked states. SGLang is not imported."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from sgl_hybrid.seams import mamba_ops_cpu as ops
from triton_ops.conv_scan.reference import convolve_sequence
from triton_ops.ssm_scan.reference import scan_packed

H, P, N, G = 4, 8, 16, 2
CHANNELS = H * P + 2 * G * N
CHUNK = 16


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(actual: torch.Tensor, expected: np.ndarray, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(
        actual.float(), torch.from_numpy(np.asarray(expected, np.float32)), rtol=tolerance, atol=tolerance
    )


class Packed:
    """A packed prefill as MambaMixer2 hands it over: views of one projection."""

    def __init__(self, lengths: list[int], dtype: torch.dtype = torch.float32) -> None:
        self.rows = [0, *np.cumsum(lengths).tolist()]
        T = self.rows[-1]
        self.query_start_loc = torch.tensor(self.rows, dtype=torch.int32)
        x, B, C = random(T, CHANNELS, seed=1, dtype=dtype).split([H * P, G * N, G * N], dim=-1)
        self.x, self.B, self.C = x.view(1, T, H, P), B.view(1, T, G, N), C.view(1, T, G, N)
        self.dt = random(T, H + 3, seed=2, dtype=dtype)[None, :, :H]
        self.A = -torch.rand(H, generator=torch.Generator().manual_seed(3)) - 0.1
        self.D, self.dt_bias = random(H, seed=4), random(H, seed=5) - 2.0
        self.out = torch.full((T, H * P), float("nan"), dtype=dtype)

    def scan(self, initial_states: torch.Tensor | None, state_dtype: torch.dtype, **track: torch.Tensor):
        return ops.mamba_chunk_scan_combined(
            self.x,
            self.dt,
            self.A,
            self.B,
            self.C,
            chunk_size=CHUNK,
            D=self.D,
            z=None,
            dt_bias=self.dt_bias,
            seq_idx=None,
            chunk_indices=None,
            chunk_offsets=None,
            cu_seqlens=self.query_start_loc,
            initial_states=initial_states,
            return_varlen_states=True,
            return_final_states=False,
            return_track_states=True,
            dt_softplus=True,
            dt_limit=(0.0, float("inf")),
            out=self.out.view(1, self.rows[-1], -1, P),
            state_dtype=state_dtype,
            **track,
        )

    def oracle(self, initial_states: torch.Tensor | None) -> tuple[np.ndarray, list[np.ndarray]]:
        arrays = [t[0].float().numpy() for t in (self.x, self.dt)]
        return scan_packed(
            *arrays,
            self.A.numpy(),
            self.B[0].float().numpy(),
            self.C[0].float().numpy(),
            self.rows,
            None if initial_states is None else initial_states.float().numpy(),
            D=self.D.numpy(),
            dt_bias=self.dt_bias.numpy(),
        )


@pytest.mark.parametrize("lengths", [[1], [CHUNK], [5, 40, 16, 33], [64, 32, 1]])
@pytest.mark.parametrize("with_initial", [False, True])
def test_chunk_scan_writes_out_and_returns_final_states(lengths: list[int], with_initial: bool) -> None:
    packed = Packed(lengths)
    initial = random(len(lengths), H, P, N, seed=6) if with_initial else None
    states, final, tracked = packed.scan(initial, torch.float32)
    y, oracle_states = packed.oracle(initial)
    close(packed.out.view(-1, H, P), y)
    close(final, np.stack([after[-1] for after in oracle_states]))
    assert tracked is None
    assert states.shape == (1, -(-packed.rows[-1] // CHUNK), H, P, N)


def test_states_are_those_before_each_flat_chunk_on_the_sequence_grid() -> None:
    packed = Packed([32, 40, 24, 50])
    initial = random(4, H, P, N, seed=6)
    states, _, _ = packed.scan(initial, torch.float32)
    _, oracle_states = packed.oracle(initial)
    close(states[0, 0], initial[0].numpy())
    on_grid = off_grid = 0
    for sequence, (start, end) in enumerate(pairwise(packed.rows)):
        for row in range(start + 1, end + 1):
            if row % CHUNK == 0 and row // CHUNK < states.shape[1]:
                if (row - start) % CHUNK == 0:
                    close(states[0, row // CHUNK], oracle_states[sequence][row - start])
                    on_grid += 1
                else:
                    assert states[0, row // CHUNK].isnan().all()
                    off_grid += 1
    assert (on_grid, off_grid) == (7, 2)


def test_tracked_states_are_those_at_the_given_rows() -> None:
    packed = Packed([21, 40, 50], torch.bfloat16)
    initial = random(3, H, P, N, seed=6)
    track = {"track_seq_idx": torch.tensor([1, 2]), "track_end_locs": torch.tensor([21 + 32, 61 + 48])}
    _, _, tracked = packed.scan(initial, torch.float32, **track)
    _, oracle_states = packed.oracle(initial)
    assert tracked.shape == (1, 2, H, P, N)
    close(tracked[0, 0], oracle_states[1][32])
    close(tracked[0, 1], oracle_states[2][48])


def test_states_come_in_the_storage_type() -> None:
    packed = Packed([40], torch.bfloat16)
    initial = random(1, H, P, N, seed=6, dtype=torch.bfloat16)
    states, final, _ = packed.scan(initial, torch.bfloat16)
    _, oracle_states = packed.oracle(initial)
    assert states.dtype == final.dtype == torch.bfloat16
    close(final[0], oracle_states[0][-1], 1e-2)
    assert packed.out.dtype == torch.bfloat16
    assert not packed.out.isnan().any()


@pytest.mark.parametrize("taps", [2, 3, 4])
@pytest.mark.parametrize("activation", ["silu", None])
def test_conv_fn_updates_the_named_slots_only(taps: int, activation: str | None) -> None:
    lengths, slots, has_initial = [1, 30, 2, 7], [5, 0, ops.PAD_SLOT_ID, 3], [True, False, True, True]
    rows = [0, *np.cumsum(lengths).tolist()]
    projection = random(rows[-1], CHANNELS + 5, seed=1)
    x = projection[:, 5:].transpose(0, 1)
    weight, bias = random(CHANNELS, taps, seed=2), random(CHANNELS, seed=3)
    before = random(8, CHANNELS, taps - 1, seed=4)
    after = before.clone()
    out = ops.causal_conv1d_fn(
        x,
        weight,
        bias,
        activation=activation,
        conv_states=after,
        has_initial_state=torch.tensor(has_initial),
        cache_indices=torch.tensor(slots, dtype=torch.int32),
        query_start_loc=torch.tensor(rows, dtype=torch.int32),
        seq_lens_cpu=lengths,
    )
    assert out.shape == x.shape
    assert out.stride(0) == 1
    for sequence, (start, end) in enumerate(pairwise(rows)):
        if slots[sequence] == ops.PAD_SLOT_ID:
            assert (out[:, start:end] == 0).all()
            continue
        y, windows = convolve_sequence(
            x.t()[start:end].numpy(),
            weight.numpy(),
            bias.numpy(),
            silu=activation == "silu",
            initial_window=before[slots[sequence]].numpy() if has_initial[sequence] else None,
        )
        close(out[:, start:end].t(), y)
        assert np.array_equal(after[slots[sequence]].numpy(), windows[-1])
    untouched = [slot for slot in range(8) if slot not in slots]
    assert torch.equal(after[untouched], before[untouched])


def test_conv_fn_without_states_and_with_an_empty_sequence() -> None:
    x, weight = random(CHANNELS, 12, seed=1), random(CHANNELS, 4, seed=2)
    y, _ = convolve_sequence(x.t().numpy(), weight.numpy(), None, silu=True)
    close(ops.causal_conv1d_fn(x, weight).t(), y)
    states = random(2, CHANNELS, 3, seed=3)
    kept = states[0].clone()
    rows = torch.tensor([0, 0, 12])
    ops.causal_conv1d_fn(x, weight, None, query_start_loc=rows, cache_indices=torch.tensor([0, 1]), conv_states=states)
    assert torch.equal(states[0], kept)
    assert torch.equal(states[1], x[:, -3:])


@pytest.mark.parametrize("taps", [2, 4])
def test_conv_update_continues_conv_fn(taps: int) -> None:
    tokens = random(9, CHANNELS, seed=1)
    weight, bias = random(CHANNELS, taps, seed=2), random(CHANNELS, seed=3)
    expected, windows = convolve_sequence(tokens.numpy(), weight.numpy(), bias.numpy(), silu=True)
    states = torch.full((6, CHANNELS, taps - 1), float("nan"))
    slots = torch.tensor([4], dtype=torch.int32)
    ops.causal_conv1d_fn(
        tokens[:5].t(), weight, bias, query_start_loc=torch.tensor([0, 5]), cache_indices=slots, conv_states=states
    )
    for t in range(5, 9):
        padded = torch.stack((tokens[t], torch.full((CHANNELS,), 7.0)))
        indices = torch.tensor([4, ops.PAD_SLOT_ID], dtype=torch.int32)
        out = ops.causal_conv1d_update(padded, states, weight, bias, "silu", conv_state_indices=indices)
        close(out[0], expected[t])
        assert (out[1] == 0).all()
        assert np.array_equal(states[4].numpy(), windows[t + 1])
    assert states[[0, 1, 2, 3, 5]].isnan().all()


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_state_update_continues_the_scan(state_dtype: torch.dtype) -> None:
    packed = Packed([20])
    y, oracle_states = packed.oracle(None)
    state = torch.full((7, H, P, N), float("nan"), dtype=state_dtype)
    state[2] = torch.from_numpy(oracle_states[0][12]).to(state_dtype)
    tolerance = 2e-5 if state_dtype == torch.float32 else 4e-2
    slots = torch.tensor([ops.PAD_SLOT_ID, 2], dtype=torch.int32)
    for t in range(12, 20):
        rows = [0, t]
        out = torch.full((2, H, P), float("nan"))
        ops.selective_state_update(
            state,
            packed.x[0, rows],
            packed.dt[0, rows][:, :, None].expand(-1, -1, P),
            packed.A[:, None, None].expand(-1, P, N),
            packed.B[0, rows],
            packed.C[0, rows],
            packed.D[:, None].expand(-1, P),
            z=None,
            dt_bias=packed.dt_bias[:, None].expand(-1, P),
            dt_softplus=True,
            state_batch_indices=slots,
            out=out,
        )
        close(out[1], y[t], tolerance)
        assert (out[0] == 0).all()
        close(state[2], oracle_states[0][t + 1], tolerance)
    assert state[[0, 1, 3, 4, 5, 6]].isnan().all()


def test_track_copies_masked_rows_and_skips_freed_slots() -> None:
    conv, ssm = random(10, CHANNELS, 3, seed=1), random(10, H, P, N, seed=2)
    conv_before, ssm_before = conv.clone(), ssm.clone()
    sources, destinations = torch.tensor([1, 2, 3, 4]), torch.tensor([5, 6, -1, 8])
    mask = torch.tensor([True, False, True, True])
    ops.track_mamba_states_if_needed(conv, ssm, sources, mask, destinations, 4, check_freed_slots=True)
    for now, before in ((conv, conv_before), (ssm, ssm_before)):
        assert torch.equal(now[5], before[1])
        assert torch.equal(now[8], before[4])
        rest = [0, 1, 2, 3, 4, 6, 7, 9]
        assert torch.equal(now[rest], before[rest])
    with pytest.raises(ValueError, match="slots >= 0"):
        ops.track_mamba_states_if_needed(conv, ssm, sources, mask, destinations, 4)


def test_calls_of_speculative_decoding_are_refused() -> None:
    state, x = random(2, CHANNELS, 3, seed=1), random(2, CHANNELS, 4, seed=2)
    with pytest.raises(NotImplementedError, match="one token per row"):
        ops.causal_conv1d_update(x, state, random(CHANNELS, 4, seed=3))
    with pytest.raises(NotImplementedError, match="retrieve_next_token"):
        ops.causal_conv1d_update(x[..., 0], state, random(CHANNELS, 4, seed=3), retrieve_next_token=x)
