"""Which memory each of the three ops may touch."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from bench.micro.shapes import ConvArguments, SsmArguments
from tests.kernels.interpret.access import MemoryWatch
from triton_ops.state_copy.layout import Checkpoints, Planes


def watch_ssm(arguments: SsmArguments) -> MemoryWatch:
    """Grant what `ssm_update` may touch: source pages to read, destination pages and the output to write."""
    src, dst = arguments.src_table, arguments.dst_table
    watch = MemoryWatch()
    watch.grant_units(arguments.state, src, src if dst is None else dst)
    _grant_inputs(watch, arguments[1:-1])
    watch.grant(arguments.out, write=True)
    return watch


def watch_conv(arguments: ConvArguments) -> MemoryWatch:
    """Grant what `conv_update` may touch: source lines to read, destination lines and the output to write."""
    src, dst = arguments.src_line, arguments.dst_line
    watch = MemoryWatch()
    watch.grant_units(arguments.lines, src, src if dst is None else dst)
    _grant_inputs(watch, (part for part in arguments[1:-1] if isinstance(part, torch.Tensor)))
    watch.grant(arguments.out, write=True)
    return watch


def watch_copy(planes: Planes, src: Checkpoints, dst: Checkpoints) -> MemoryWatch:
    """Grant what `state_copy` of all layers may touch."""
    watch = MemoryWatch()
    for plane, src_ids, dst_ids in zip(planes, src, dst, strict=True):
        if plane is not None and src_ids is not None and dst_ids is not None:
            for units in plane:
                watch.grant_units(units, src_ids, dst_ids)
            _grant_inputs(watch, (src_ids, dst_ids))
    return watch


def _grant_inputs(watch: MemoryWatch, tensors: Iterable[torch.Tensor | None]) -> None:
    """Grant reading of the storages behind the tensors, each once: slices of one projection share a storage."""
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors if tensor is not None}
    for tensor in storages.values():
        watch.grant(tensor.new_empty(0).set_(tensor.untyped_storage()), read=True)
