"""Copies of checkpoints in vectorized torch: one indexed copy per layer and part, as integers of the element's size."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from triton_ops.state_copy.layout import Arena, Checkpoints, Planes

WORDS = {2: torch.int16, 4: torch.int32}


def state_gather(planes: Planes, src: Checkpoints, arena: Arena) -> None:
    """Fill `arena` in place, as `api.state_gather`."""
    for plane, table, dense in _parts(planes, src, arena):
        for layer, rows in enumerate(dense):
            units, ids = _layer(plane, table, layer)
            rows.copy_(_read(units, ids).view(rows.shape))


def state_scatter(arena: Arena, planes: Planes, dst: Checkpoints) -> None:
    """Write the units of `dst` in place, as `api.state_scatter`."""
    for plane, table, dense in _parts(planes, dst, arena):
        for layer, rows in enumerate(dense):
            units, ids = _layer(plane, table, layer)
            _write(units, ids, rows.reshape(ids.numel(), *units.shape[1:]))


def state_copy(planes: Planes, src: Checkpoints, dst: Checkpoints, num_layers: int) -> None:
    """Copy the units of `src` to those of `dst` in place, as `api.state_copy`. Allocates one layer of the batch."""
    for plane, src_table, dst_table in _parts(planes, src, dst):
        for layer in range(num_layers):
            units, src_ids = _layer(plane, src_table, layer)
            _write(units, _layer(plane, dst_table, layer)[1], _read(units, src_ids))


def _parts(
    planes: Planes, ids: Checkpoints, other: Arena | Checkpoints
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield (plane, ids, other) of the members and of the conv lines, where present; float tensors as integers."""
    for plane, table, third in zip(planes, ids, other, strict=True):
        if plane is not None and table is not None and third is not None:
            word = WORDS[plane.element_size()]
            yield plane.view(word), table, third.view(word) if isinstance(other, Arena) else third


def _layer(plane: torch.Tensor, table: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the units of a recurrent layer's plane and the ids of its group, `[batch * M]` int64."""
    num_planes = plane.shape[0]
    return plane[layer % num_planes], table[:, layer // num_planes].reshape(-1).to(torch.int64)


def _read(units: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    words = units.index_select(0, ids.clamp(min=0))
    words[ids < 0] = 0
    return words


def _write(units: torch.Tensor, ids: torch.Tensor, words: torch.Tensor) -> None:
    present = ids >= 0
    units.index_copy_(0, ids[present], words[present])
