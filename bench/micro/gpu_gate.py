"""The gate of the GPU benchmark: results first, numbers after. A red line means that no time is printed.

Every check runs the compiled kernels on small batches of the real layer and compares bits, or compares with the oracle
within the tolerance of the storage dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from bench.micro.rivals import Rival
from bench.micro.shapes import (
    CopyArguments,
    Shape,
    SsmArguments,
    conv_arguments,
    conv_lines,
    copy_arguments,
    ssm_arguments,
)
from triton_ops.conv_update import kernel as conv_kernel
from triton_ops.conv_update import reference as conv_reference
from triton_ops.ssm_update import kernel as ssm_kernel
from triton_ops.ssm_update import reference as ssm_reference
from triton_ops.state_copy import kernel as copy_kernel
from triton_ops.state_copy import reference as copy_reference
from triton_ops.state_copy.layout import Arena, Checkpoints, Planes

STATES = {"bf16": torch.bfloat16, "fp32": torch.float32}
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-3}


class Check(NamedTuple):
    """One line of the gate. A line with `required` False informs and does not close the gate."""

    name: str
    passed: bool
    required: bool = True


def run_gate(
    shape: Shape, rivals: list[Rival], *, device: str = "cuda", batches: tuple[int, ...] = (1, 8, 53)
) -> Iterator[Check]:
    """Run all checks: on a CUDA device (a GiB of memory, some seconds), or on the CPU in Triton's interpreter."""
    for state, dtype in STATES.items():
        for batch in batches:
            for gate in (False, True):
                yield from _paged_equals_contiguous(shape, state, dtype, batch, gate, device)
        yield _ssm_close_to_oracle(shape, state, dtype, device)
        yield from _conv_equals_oracle(shape, state, dtype, device)
        yield from _copies_equal_oracle(shape, state, dtype, device)
        for rival in rivals:
            yield from _state_equals_rival(shape, state, dtype, rival, device)


def _paged(shape: Shape, dtype: torch.dtype, batch: int, gate: bool, device: str) -> tuple[SsmArguments, SsmArguments]:
    """Return the same states as slots (in place) and as random pages (moved to other random pages)."""
    heads, M = shape.heads_per_member(dtype), shape.num_members(dtype)
    slots = torch.randn((batch, shape.H, shape.P, shape.N), device=device).to(dtype)
    num_ids, num_pages = 2 * batch * M, 2 * batch * M + 3
    pages = torch.full((num_pages, heads, shape.P, shape.N), float("nan"), dtype=dtype, device=device)
    src, dst = torch.randperm(num_pages)[:num_ids].to(torch.int32).view(2, batch, M).to(device)
    pages[src.flatten().long()] = slots.view(batch * M, heads, shape.P, shape.N)
    indices = torch.arange(batch, dtype=torch.int32, device=device)[:, None]
    contiguous = ssm_arguments(shape, slots, indices, None, gate=gate)
    return contiguous, contiguous._replace(
        state=pages, src_table=src, dst_table=dst, out=torch.empty_like(contiguous.out)
    )


def _paged_equals_contiguous(
    shape: Shape, state: str, dtype: torch.dtype, batch: int, gate: bool, device: str
) -> Iterator[Check]:
    contiguous, paged = _paged(shape, dtype, batch, gate, device)
    other, early = (paged._replace(state=paged.state.clone(), out=torch.empty_like(paged.out)) for _ in range(2))
    ssm_kernel.prepare(*contiguous).run()
    ssm_kernel.prepare(*paged).run()
    ssm_kernel.prepare(*other, BM=4).run()
    ssm_kernel.prepare(*early, may_start_early=True).run()
    name = f"ssm_update {state} batch {batch}{' gate' if gate else ''}: "
    yield Check(name + "paged state bits = contiguous", _same_state(paged, contiguous))
    yield Check(name + "paged output bits = contiguous", _same_bits(paged.out, contiguous.out))
    unused = torch.ones(paged.state.shape[0], dtype=torch.bool, device=device)
    for table in (paged.src_table, paged.dst_table):
        if table is not None:
            unused[table.flatten().long()] = False
    yield Check(name + "unused pages still NaN", bool(paged.state[unused].isnan().all()))
    yield Check(name + "state bits do not depend on the tile", _same_bits(other.state, paged.state))
    yield Check(name + "output bits do not depend on the tile", _same_bits(other.out, paged.out), required=False)
    same = _same_bits(early.state, paged.state) and _same_bits(early.out, paged.out)
    yield Check(name + "bits do not depend on the early start", same, required=False)


def _ssm_close_to_oracle(shape: Shape, state: str, dtype: torch.dtype, device: str) -> Check:
    _, paged = _paged(shape, dtype, 2, True, device)
    expected = SsmArguments(*map(_cpu, paged))
    ssm_reference.ssm_update(*expected)
    ssm_kernel.prepare(*paged).run()
    tolerance = TOLERANCE[dtype]
    close = torch.allclose(paged.state.cpu(), expected.state, rtol=tolerance, atol=tolerance, equal_nan=True)
    close = close and torch.allclose(paged.out.cpu(), expected.out, rtol=5e-2, atol=5e-2)
    return Check(f"ssm_update {state}: close to the oracle", close)


def _conv_equals_oracle(shape: Shape, state: str, dtype: torch.dtype, device: str) -> Iterator[Check]:
    for channel_major in (False, True):
        lines = conv_lines(shape, 32, dtype, device, channel_major=channel_major)
        src, dst = torch.randperm(32)[:16].to(torch.int32).view(2, 8).to(device)
        src[1] = -1
        dst[2] = -1
        src[3] = dst[3] = -1
        arguments = conv_arguments(shape, lines, src, dst)
        copies = {name: _cpu(part) for name, part in arguments._asdict().items() if isinstance(part, torch.Tensor)}
        expected = arguments._replace(**copies)
        conv_reference.conv_update(*expected)
        conv_kernel.prepare(*arguments).run()
        name = f"conv_update {state} {'channel' if channel_major else 'tap'}-major: "
        yield Check(name + "line bits = oracle", _same_bits(lines.cpu(), expected.lines))
        yield Check(
            name + "close to the oracle", torch.allclose(arguments.out.cpu(), expected.out, rtol=2e-2, atol=2e-2)
        )


def _copies_equal_oracle(shape: Shape, state: str, dtype: torch.dtype, device: str) -> Iterator[Check]:
    arguments = copy_arguments(shape, 4, dtype, device, num_planes=3)
    expected = CopyArguments(
        Planes(*map(_cpu, arguments.planes)),
        Checkpoints(*map(_cpu, arguments.src)),
        Checkpoints(*map(_cpu, arguments.dst)),
        Arena(*map(_cpu, arguments.arena)),
    )
    for name, launch in (
        ("gather", copy_kernel.prepare_gather(arguments.planes, arguments.src, arguments.arena)),
        ("copy", copy_kernel.prepare_copy(arguments.planes, arguments.src, arguments.dst, 3)),
        ("scatter", copy_kernel.prepare_scatter(arguments.arena, arguments.planes, arguments.src)),
    ):
        launch.run()
        if name == "gather":
            copy_reference.state_gather(expected.planes, expected.src, expected.arena)
        elif name == "copy":
            copy_reference.state_copy(expected.planes, expected.src, expected.dst, 3)
        else:
            copy_reference.state_scatter(expected.arena, expected.planes, expected.src)
        mine, theirs = (*arguments.planes, *arguments.arena), (*expected.planes, *expected.arena)
        same = all(
            left is not None and right is not None and _same_bits(left.cpu(), right)
            for left, right in zip(mine, theirs, strict=True)
        )
        yield Check(f"state_{name} {state}: bits = oracle", same)


def _state_equals_rival(shape: Shape, state: str, dtype: torch.dtype, rival: Rival, device: str) -> Iterator[Check]:
    """Compare state bits with another project's kernel. Informs only: its arithmetic may be ordered otherwise."""
    if rival.bind is None:
        return
    contiguous, _ = _paged(shape, dtype, 8, False, device)
    theirs = contiguous._replace(state=contiguous.state.clone(), out=torch.empty_like(contiguous.out))
    name = f"ssm_update {state}: state bits = {rival.name}"
    try:
        rival.bind(theirs)()
        _ = theirs.state.cpu()  # waits, so that a failed launch is seen here
    except Exception as error:
        yield Check(f"{name} ({type(error).__name__}: {error})", False, required=False)
        return
    ssm_kernel.prepare(*contiguous).run()
    yield Check(name, _same_bits(contiguous.state, theirs.state), required=False)


def _same_state(paged: SsmArguments, contiguous: SsmArguments) -> bool:
    table = paged.dst_table
    if table is None:
        raise ValueError("expected a destination table, got None")
    return _same_bits(paged.state[table.flatten().long()].view(contiguous.state.shape), contiguous.state)


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Compare bit patterns; NaN equals NaN of the same payload."""
    word = {2: torch.int16, 4: torch.int32}[left.element_size()]
    return bool(torch.equal(left.contiguous().view(word), right.contiguous().view(word)))


def _cpu(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Copy to the CPU, also from the CPU: the oracle must not write the kernel's memory."""
    return None if tensor is None else tensor.to("cpu", copy=True)
