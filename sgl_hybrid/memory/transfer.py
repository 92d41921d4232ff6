"""Host numbers on a device without waiting for it. Needs torch: for `page_pool`, `state_memory` and the seams only."""

from __future__ import annotations

import torch


def upload(numbers: object, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Return a number, numbers or rows of numbers as a tensor on `device`.

    On a GPU they are staged in pinned memory and the copy is queued on the current stream; a copy from pageable memory
    would wait for everything queued before it.
    """
    on_gpu = torch.device(device).type == "cuda"
    return torch.tensor(numbers, dtype=dtype, pin_memory=on_gpu).to(device, non_blocking=on_gpu)
