"""Which requests may share a prefix: extra key, adapter and salt are apart in the tree.

Source: SGLang 0.5.23, `sglang/srt/managers/schedule_batch.py` (`Req.__init__` appends the adapter to the extra key) and
`sglang/srt/mem_cache/radix_cache.py` (`RadixKey` keeps extra key and salt as a pair).
"""

from __future__ import annotations

from typing import Any

from radix.identity import tree_key
from sgl_hybrid.seams.hooks import Seam


def separate_adapter(result: None, self: Any, *args: Any, **kwargs: Any) -> None:
    """After `Req.__init__`: the extra key names the caller's key and the adapter as two parts, not concatenated."""
    given, lora_id = self.extra_key, self.lora_id
    if lora_id is not None:
        given = given[: len(given) - len(lora_id)]
    self.extra_key = tree_key(given, lora_id)


SEAMS: tuple[Seam, ...] = (
    Seam(
        "sglang.srt.managers.schedule_batch.Req.__init__",
        "after",
        separate_adapter,
        ("rid", "origin_input_text", "origin_input_ids", "sampling_params"),
        "extra key and adapter do not meet by concatenation",
    ),
)
