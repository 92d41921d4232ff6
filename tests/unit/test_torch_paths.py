"""The decode steps the CPU server runs (vectorized torch) equal the oracles, on pages, conv lines and slots."""

from __future__ import annotations

import pytest
import torch

from triton_ops.conv_update import torch_path as conv_path
from triton_ops.conv_update.api import conv_update
from triton_ops.conv_update.reference import conv_update as conv_oracle
from triton_ops.ssm_update import torch_path as ssm_path
from triton_ops.ssm_update.api import ssm_update
from triton_ops.ssm_update.reference import ssm_update as ssm_oracle

H, P, N, G, C = 6, 4, 16, 2, 10
NUM_PAGES = 40
DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Rounding of a value near the middle of two neighbours may differ from the oracle's: one unit of bf16 is 2^-8."""


@pytest.fixture(autouse=True)
def vectorized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


class Random:
    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype)

    def ids(self, *shape: int) -> torch.Tensor:
        """Distinct ids of pages or lines."""
        count = int(torch.tensor(shape).prod())
        return torch.randperm(NUM_PAGES, generator=self.generator)[:count].to(torch.int32).view(shape)


def pool(random: Random, members: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a pool whose pages have 8 elements behind the payload, all random, and the view of the payload."""
    payload = H // members * P * N
    raw = random(NUM_PAGES, payload + 8, dtype=dtype)
    return raw, raw[:, :payload].unflatten(1, (H // members, P, N))


def step_inputs(random: Random, rows: int, dtype: torch.dtype) -> list[torch.Tensor]:
    x, dt = random(rows, H, P, dtype=dtype), random(rows, H, dtype=dtype)
    A, D, dt_bias = -random(H).abs(), random(H), random(H)
    return [x, dt, A, random(rows, G, N, dtype=dtype), random(rows, G, N, dtype=dtype), D, dt_bias]


@pytest.mark.parametrize("state_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("with_gate", [False, True])
@pytest.mark.parametrize("rows", [1, 5])
def test_ssm_pages_equal_the_oracle(
    state_dtype: torch.dtype,
    dtype: torch.dtype,
    members: int,
    with_gate: bool,
    rows: int,
) -> None:
    random = Random(rows)
    raw, state = pool(random, members, state_dtype)
    oracle_raw = raw.clone()
    oracle_state = oracle_raw[:, : raw.shape[1] - 8].unflatten(1, state.shape[1:])
    x, dt, A, B, C_, D, dt_bias = step_inputs(random, rows, dtype)
    z = random(rows, H, P, dtype=dtype) if with_gate else None
    ids = random.ids(2 * rows, members)
    source, destination = ids[:rows].clone(), ids[rows:].clone()
    destination[0] = source[0]
    if rows == 5:
        source[1], destination[2] = -1, -1
        source[3] = destination[3] = -1
    out, oracle_out = torch.full_like(x, float("nan")), torch.empty_like(x)
    returned = ssm_update(state, source, destination, x, dt, A, B, C_, D, dt_bias, z=z, out=out)
    ssm_oracle(oracle_state, source, destination, x, dt, A, B, C_, D, dt_bias, z, oracle_out)
    assert returned is out
    tolerance = max(TOLERANCE[dtype], 1e-5)
    torch.testing.assert_close(out, oracle_out, rtol=2 * tolerance, atol=tolerance)
    written = destination[destination >= 0].long()
    state_tolerance = TOLERANCE[state_dtype]
    torch.testing.assert_close(state[written], oracle_state[written], rtol=state_tolerance, atol=state_tolerance)
    rest = torch.ones(NUM_PAGES, dtype=torch.bool)
    rest[written] = False
    assert torch.equal(raw[rest], oracle_raw[rest])
    assert torch.equal(raw[:, -8:], oracle_raw[:, -8:])
    if rows == 5:
        assert (out[3] == 0).all()


def test_ssm_in_place_equals_out_of_place() -> None:
    random = Random(0)
    _, state = pool(random, 3, torch.bfloat16)
    inputs = step_inputs(random, 4, torch.float32)
    source, destination = random.ids(8, 3).chunk(2)
    before = state[source.long()].clone()
    out = ssm_update(state, source, destination, *inputs)
    assert torch.equal(state[source.long()], before)
    in_place_out = ssm_update(state, source, None, *inputs)
    assert torch.equal(in_place_out, out)
    assert torch.equal(state[source.long()], state[destination.long()])


@pytest.mark.parametrize("state_dtype", DTYPES)
def test_ssm_slots_are_pages_of_one_member(state_dtype: torch.dtype) -> None:
    random = Random(0)
    _, state = pool(random, 1, state_dtype)
    slot_state = state.clone()
    x, dt, A, B, C_, D, dt_bias = step_inputs(random, 4, torch.float32)
    slots = random.ids(4)
    slots[2] = ssm_path.PAD_SLOT
    expected = ssm_update(state, slots[:, None], None, x, dt, A, B, C_, D, dt_bias)
    inputs = ssm_path.StepInputs(x, dt, A, B, C_, D, None, dt_bias)
    out = torch.full_like(x, float("nan"))
    unwritten = slot_state.clone()
    ssm_path.update_slots(unwritten, inputs, slots, out=out, write_states=False)
    assert torch.equal(out, expected)
    assert torch.equal(unwritten, slot_state)
    ssm_path.update_slots(slot_state, inputs, slots, out=out)
    assert torch.equal(out, expected)
    assert torch.equal(slot_state, state)


def test_ssm_without_slots_uses_the_first_and_takes_plain_dt() -> None:
    random = Random(0)
    state = random(3, H, P, N)
    before = state.clone()
    x, dt, A, B, C_, _, _ = step_inputs(random, 2, torch.float32)
    dt = dt.abs()
    out = torch.empty_like(x)
    ssm_path.update_slots(state, ssm_path.StepInputs(x, dt, A, B, C_, dt_softplus=False), None, out=out)
    by_head = [t.repeat_interleave(H // G, dim=1) for t in (B, C_)]
    expected = before[:2] * (dt * A).exp()[:, :, None, None] + (dt[:, :, None] * x)[..., None] * by_head[0][:, :, None]
    torch.testing.assert_close(state[:2], expected)
    torch.testing.assert_close(out, (expected * by_head[1][:, :, None]).sum(-1))
    assert torch.equal(state[2], before[2])


@pytest.mark.parametrize("line_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("taps", [2, 3, 4])
@pytest.mark.parametrize("tap_major", [False, True])
@pytest.mark.parametrize("activation", ["silu", None])
def test_conv_lines_equal_the_oracle(
    line_dtype: torch.dtype, dtype: torch.dtype, taps: int, tap_major: bool, activation: str | None
) -> None:
    random = Random(taps)
    past = taps - 1
    raw = random(NUM_PAGES, C * past + 6, dtype=line_dtype)

    def view(lines: torch.Tensor) -> torch.Tensor:
        payload = lines[:, : C * past]
        return payload.unflatten(1, (past, C)) if tap_major else payload.unflatten(1, (C, past)).transpose(1, 2)

    oracle_raw = raw.clone()
    x, weight, bias = random(5, C, dtype=dtype), random(taps, C), random(C)
    source, destination = random.ids(10).chunk(2)
    destination[0] = source[0]
    source[1], destination[2] = -1, -1
    source[3] = destination[3] = -1
    oracle_out = torch.empty_like(x)
    conv_oracle(view(oracle_raw), source, destination, x, weight, bias, activation, oracle_out)
    out = conv_update(view(raw), source, destination, x, weight, bias, activation=activation, out=x)
    torch.testing.assert_close(out, oracle_out, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(raw, oracle_raw)
    assert (out[3] == 0).all()


def test_conv_slots_are_lines() -> None:
    random = Random(0)
    windows, x, weight, bias = random(NUM_PAGES, C, 3), random(4, C), random(C, 4), random(C)
    lines = windows.clone()
    slots = random.ids(4)
    slots[1] = conv_path.PAD_SLOT
    out, expected = torch.full_like(x, float("nan")), torch.empty_like(x)
    conv_path.update_slots(windows, x, weight, bias, slots, silu=True, out=out)
    conv_path.update_lines(lines, x, weight, bias, slots, slots, silu=True, out=expected)
    assert (out[1] == 0).all()
    assert torch.equal(out[[0, 2, 3]], expected[[0, 2, 3]])
    assert torch.equal(windows, lines)
    first = random(2, C, 3)
    kept = first.clone()
    conv_path.update_slots(first, x[:2], weight, None, None, silu=False, out=out[:2])
    torch.testing.assert_close(out[:2], (torch.cat((kept, x[:2, :, None]), 2) * weight).sum(2))
    assert torch.equal(first, torch.cat((kept[:, :, 1:], x[:2, :, None]), 2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_bits_that_it_has_alone(dtype: torch.dtype) -> None:
    """6 heads and 10 channels fill no vector, so torch's own softplus and silu would depend on the number of rows."""
    random, rows = Random(1), 11
    x, dt, A, B, C_, D, dt_bias = step_inputs(random, rows, dtype)
    z, tokens, weight = random(rows, H, P, dtype=dtype), random(rows, C, dtype=dtype), random(C, 4)
    state, windows, slots = random(rows, H, P, N), random(rows, C, 3), torch.arange(rows)

    def step(which: slice) -> list[torch.Tensor]:
        own, window = state.clone(), windows.clone()
        out, convolved = torch.empty_like(x[which]), torch.empty_like(tokens[which])
        inputs = ssm_path.StepInputs(x[which], dt[which], A, B[which], C_[which], D, z[which], dt_bias)
        ssm_path.update_slots(own, inputs, slots[which], out=out)
        conv_path.update_slots(window, tokens[which], weight, None, slots[which], silu=True, out=convolved)
        return [out, convolved, own[which], window[which]]

    together = step(slice(None))
    for row in range(rows):
        alone = step(slice(row, row + 1))
        assert all(torch.equal(one, many[row : row + 1]) for one, many in zip(alone, together, strict=True)), row
