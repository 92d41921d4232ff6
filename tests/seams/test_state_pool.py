"""Composites: SSM and conv state of a slot share one unit, slots never overlap, and a slot is freed once."""

from __future__ import annotations

import pytest
import torch

from sgl_hybrid.seams.state_pool import StateSlotAllocator, composite_views

SSM_SHAPE, CONV_SHAPE = (4, 8, 16), (24, 3)


@pytest.mark.parametrize(
    ("ssm_dtype", "conv_dtype"),
    [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)],
)
def test_views_cover_every_byte_of_their_composite_and_nothing_else(
    ssm_dtype: torch.dtype, conv_dtype: torch.dtype
) -> None:
    composites, ssm, conv = composite_views(
        num_layers=2,
        num_slots=3,
        ssm_shape=SSM_SHAPE,
        ssm_dtype=ssm_dtype,
        conv_shape=CONV_SHAPE,
        conv_dtype=conv_dtype,
        device="cpu",
    )
    assert ssm.shape == (2, 3, *SSM_SHAPE)
    assert conv.shape == (2, 3, *CONV_SHAPE)
    ssm[1, 2] = float("nan")
    conv[1, 2] = float("nan")
    written = composites != 0
    ssm_bytes = ssm[0, 0].numel() * ssm_dtype.itemsize
    assert not written[0].any()
    assert not written[1, :2].any()
    # Each element of NaN has non-zero bytes, first in the SSM part, then in the conv part behind it.
    ssm_part = written[1, 2, :ssm_bytes].view(-1, ssm_dtype.itemsize)
    conv_part = written[1, 2, ssm_bytes:].view(-1, conv_dtype.itemsize)
    assert ssm_part.any(dim=1).all()
    assert conv_part.any(dim=1).all()
    assert len(conv_part) == conv[0, 0].numel()


def test_odd_bytes_are_refused() -> None:
    with pytest.raises(ValueError, match="divide"):
        composite_views(
            num_layers=1,
            num_slots=1,
            ssm_shape=(1, 1, 3),
            ssm_dtype=torch.bfloat16,
            conv_shape=(1, 1),
            conv_dtype=torch.float32,
            device="cpu",
        )


def test_a_slot_is_freed_once() -> None:
    """Fault B42: a double free hands one id out twice."""
    allocator = StateSlotAllocator(size=4, device="cpu")
    slots = allocator.alloc(3)
    assert sorted(slots.tolist()) == [1, 2, 3]
    allocator.free(slots[:1])
    before = allocator.available_size()
    for wrong in (slots[:1], torch.tensor([0]), torch.tensor([4]), torch.tensor([int(slots[1])] * 2)):
        with pytest.raises(ValueError, match="held state slots"):
            allocator.free(wrong)
    assert allocator.available_size() == before


def test_returned_ids_do_not_change_behind_the_caller() -> None:
    """Fault B38: a view of the free list changes when others free."""
    allocator = StateSlotAllocator(size=4, device="cpu")
    held = allocator.alloc(2)
    copy = held.clone()
    allocator.free(allocator.alloc(2))
    allocator.clear()
    assert torch.equal(held, copy)


def test_a_short_allocator_takes_nothing() -> None:
    """Fault B39: n + 1 slots asked for with n free."""
    allocator = StateSlotAllocator(size=2, device="cpu")
    assert allocator.alloc(3) is None
    assert allocator.available_size() == 2
