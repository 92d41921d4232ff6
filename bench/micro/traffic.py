"""Bytes that one launch moves between memory and the chip, each distinct byte once.

`payload` is what the operation itself must read and write: states, activations, parameters. `tables` is what paging
adds: the ids. The interpreter's tests hold the sum to the bytes the kernels really touch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from bench.micro.shapes import ConvArguments, CopyArguments, SsmArguments


class Traffic(NamedTuple):
    """Bytes of one launch."""

    payload: int
    tables: int

    @property
    def total(self) -> int:
        return self.payload + self.tables


def ssm_update_traffic(arguments: SsmArguments) -> Traffic:
    """Count one layer's step without absent rows: every state is read and written."""
    batch, H, P = arguments.x.shape
    N, itemsize = arguments.state.shape[3], arguments.state.element_size()
    states = 2 * batch * H * P * N * itemsize
    inputs = (arguments.x, arguments.dt, arguments.A, arguments.B, arguments.C, arguments.D, arguments.dt_bias)
    return Traffic(states + _bytes(*inputs, arguments.z, arguments.out), _bytes(*arguments[1:3]))


def conv_update_traffic(arguments: ConvArguments) -> Traffic:
    """Count one layer's conv step without absent rows: every line's payload is read and written."""
    batch, C = arguments.x.shape
    taps, itemsize = arguments.lines.shape[1], arguments.lines.element_size()
    lines = 2 * batch * taps * C * itemsize
    others = _bytes(arguments.x, arguments.weight, arguments.bias, arguments.out)
    return Traffic(lines + others, _bytes(arguments.src_line, arguments.dst_line))


def gather_traffic(arguments: CopyArguments) -> Traffic:
    """Count a gather of all planes without absent checkpoints: the arena is read from pages and written."""
    return Traffic(2 * _bytes(*arguments.arena), _bytes(*arguments.src))


def _bytes(*tensors: torch.Tensor | None) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)
