"""Host numbers on a device without waiting for it. Needs torch: for `page_pool`, `state_memory` and the seams only."""

from __future__ import annotations

import torch


def upload(numbers: object, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Return a number, numbers or rows of numbers as a tensor on `device`.

    For a GPU they are staged in pinned memory and the copy is queued on the current stream; a copy from pageable memory
    would wait for everything queued before it.
    """
    host = torch.tensor(numbers, dtype=dtype)
    if torch.device(device).type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
