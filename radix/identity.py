"""The key of a prefix namespace from the caller's extra key and the adapter, without collisions.

SGLang 0.5.23 appends the adapter's id to the extra key (`Req.__init__`): "ab" with adapter "c" and "a" with adapter
"bc" share a namespace, and with it attention and states of another adapter. The salt is a part of its own there.
"""

from __future__ import annotations

_MARK = "\x1fadapter:"


def tree_key(extra_key: str | None, lora_id: str | None) -> str | None:
    """Return a key for both parts that no other two have; an ordinary extra key without an adapter stays as it is.

    An empty extra key is none, as in SGLang.
    """
    extra_key = extra_key or None
    if lora_id is None and (extra_key is None or not extra_key.startswith(_MARK)):
        return extra_key
    length = "-" if lora_id is None else str(len(lora_id))
    return f"{_MARK}{length}:{lora_id or ''}{extra_key or ''}"
