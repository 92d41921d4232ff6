"""What a memory organization has done since start, beside the events that the checkpoint store counts itself.

Counters only grow. They are incremented where the thing happens and read by whoever reports them; nothing decides on
them.
"""

from __future__ import annotations

from weakref import WeakSet

import msgspec


class Reuse(msgspec.Struct):
    """What admitted requests found, once for each admission.

    joint_hits: requests that continue from a checkpoint, joint_tokens the tokens they need not compute.
    missing_checkpoint_hits: requests whose attention KV is cached up to a boundary beyond the deepest checkpoint (or to
    one without any), missing_checkpoint_tokens the tokens between the two, which are computed again.
    """

    joint_hits: int = 0
    joint_tokens: int = 0
    missing_checkpoint_hits: int = 0
    missing_checkpoint_tokens: int = 0

    def record(self, joint_tokens: int, attention_tokens: int) -> None:
        """Count one admission. joint_tokens: depth that is continued from, 0 for none. attention_tokens: the deepest
        boundary up to which attention KV is cached."""
        if joint_tokens:
            self.joint_hits += 1
            self.joint_tokens += joint_tokens
        if attention_tokens > joint_tokens:
            self.missing_checkpoint_hits += 1
            self.missing_checkpoint_tokens += attention_tokens - joint_tokens


class Requests(msgspec.Struct):
    """What became of requests for want of memory.

    deferred: requests that had to wait at least once before they were admitted. retracted: running requests taken back,
    to be computed again. aborted: requests ended because memory did not suffice even for them alone.
    """

    deferred: int = 0
    retracted: int = 0
    aborted: int = 0


class Evicted(msgspec.Struct):
    """Cached units that went, whatever the decision: the checkpoint of an evicted leaf is one of the checkpoints."""

    attention_pages: int = 0
    checkpoints: int = 0


class CopiedBytes(msgspec.Struct):
    """State bytes moved from one place of memory to another, over all layers of this rank.

    prefill_gather: states read into a contiguous tensor to continue from. prefill_scatter: final states and states at
    boundaries written from such a tensor. slab_migration: conv states moved to empty a slab.
    """

    prefill_gather: int = 0
    prefill_scatter: int = 0
    slab_migration: int = 0


class Activity:
    """The counters of one process.

    Attributes:
        evictions: decisions by kind (`radix.eviction.Kind`), all kinds from the start.
        ledger_checks: scheduler steps after which all ledgers were verified, in strict mode.
    """

    def __init__(self, kinds: tuple[str, ...]) -> None:
        self.evictions = dict.fromkeys(kinds, 0)
        self.evicted = Evicted()
        self.reuse = Reuse()
        self.requests = Requests()
        self.ledger_checks = 0
        self._waiting: WeakSet[object] = WeakSet()

    def defer(self, request: object) -> None:
        """Count a request that has to wait for memory, once until it is admitted."""
        if request not in self._waiting:
            self._waiting.add(request)
            self.requests.deferred += 1

    def admit(self, request: object, *, joint_tokens: int, attention_tokens: int) -> None:
        """Count what an admitted request found."""
        self._waiting.discard(request)
        self.reuse.record(joint_tokens, attention_tokens)
