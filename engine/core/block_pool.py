"""The KV pool's blocks: who holds each, and in which order the others are reused.

Owns reference counts and three lists of unheld blocks. Knows nothing of tokens or hashes. Every operation
is O(1). What must always hold: a block is in exactly one place, so `free + cached + used == total`:

    used      refs > 0                                held by sequences and pins, never reused
    free      refs == 0, retention SCRATCH            holds nothing worth keeping; last freed is reused first
    cached    refs == 0, retention OUTPUT or PROMPT   reusable K and V; least recently used is reused first, a
                                                      prompt block `prompt_lead` releases later than an output

A sequence gives its blocks back tail first, so a block's successors in a chain always go before it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator


class Retention(enum.IntEnum):
    """What a block is worth once nobody holds it. (Pinned blocks are held by their pin.)"""

    SCRATCH = 0
    OUTPUT = 1
    PROMPT = 2


class OutOfBlocks(Exception):
    """Every block of the pool is held."""


class BlockList:
    """Doubly linked list of block numbers, threaded through two arrays; a number is in it at most once.

    Slot `capacity` is the sentinel: its successor is the front, its predecessor the back.
    """

    __slots__ = ("_next", "_previous", "_sentinel", "_size")

    def __init__(self, capacity: int) -> None:
        self._sentinel = capacity
        self._next = [-1] * capacity + [capacity]
        self._previous = [-1] * capacity + [capacity]
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __contains__(self, block: int) -> bool:
        return self._next[block] >= 0

    def __iter__(self) -> Iterator[int]:
        block = self._next[self._sentinel]
        while block != self._sentinel:
            yield block
            block = self._next[block]

    def front(self) -> int:
        """First block, or the sentinel (== capacity) of an empty list."""
        return self._next[self._sentinel]

    def push_front(self, block: int) -> None:
        """Put `block` first."""
        self._link(block, self._sentinel, self._next[self._sentinel])

    def push_back(self, block: int) -> None:
        """Put `block` last."""
        self._link(block, self._previous[self._sentinel], self._sentinel)

    def remove(self, block: int) -> None:
        """Take `block` out from wherever it is."""
        before, after = self._previous[block], self._next[block]
        self._next[before] = after
        self._previous[after] = before
        self._next[block] = self._previous[block] = -1
        self._size -= 1

    def _link(self, block: int, before: int, after: int) -> None:
        self._next[before] = self._previous[after] = block
        self._previous[block] = before
        self._next[block] = after
        self._size += 1


class BlockPool:
    """`num_blocks` blocks, numbered from 0. `prompt_lead` defaults to a quarter of the pool."""

    __slots__ = ("_lists", "_prompt_lead", "_refs", "_released", "_retention", "_tick", "total")

    def __init__(self, num_blocks: int, *, prompt_lead: int | None = None) -> None:
        self.total = num_blocks
        self._prompt_lead = num_blocks // 4 if prompt_lead is None else prompt_lead
        self._refs = [0] * num_blocks
        self._retention = [Retention.SCRATCH] * num_blocks
        self._released = [0] * num_blocks
        self._tick = 0
        self._lists = {kind: BlockList(num_blocks) for kind in Retention}
        for block in range(num_blocks):
            self._lists[Retention.SCRATCH].push_back(block)

    @property
    def free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._lists[Retention.SCRATCH])

    @property
    def cached(self) -> int:
        """Unheld blocks with reusable content."""
        return len(self._lists[Retention.OUTPUT]) + len(self._lists[Retention.PROMPT])

    @property
    def available(self) -> int:
        """Blocks that `take` can give out."""
        return self.free + self.cached

    @property
    def used(self) -> int:
        """Blocks held by a sequence or a pin."""
        return self.total - self.available

    def refs(self, block: int) -> int:
        """How many sequences and pins hold `block`."""
        return self._refs[block]

    def retention(self, block: int) -> Retention:
        """What `block` is worth when nobody holds it."""
        return self._retention[block]

    def take(self) -> int:
        """Hand out the block that is worth least, held once. OutOfBlocks when all are held.

        Its content, if it had any, is lost: the caller drops it from the prefix cache.
        """
        scratch = self._lists[Retention.SCRATCH]
        if len(scratch):
            block = scratch.front()
            scratch.remove(block)
        else:
            block = self._least_valuable()
            self._lists[self._retention[block]].remove(block)
            self._retention[block] = Retention.SCRATCH
        self._refs[block] = 1
        return block

    def hold(self, block: int) -> None:
        """Add a holder."""
        if self._refs[block] == 0:
            self._lists[self._retention[block]].remove(block)
        self._refs[block] += 1

    def release(self, block: int) -> None:
        """Drop a holder; the last one puts the block into the list of its retention class."""
        refs = self._refs[block] - 1
        self._refs[block] = refs
        if refs:
            return
        kind = self._retention[block]
        if kind is Retention.SCRATCH:
            self._lists[kind].push_front(block)
        else:
            self._tick += 1
            self._released[block] = self._tick
            self._lists[kind].push_back(block)

    def retain(self, block: int, kind: Retention) -> None:
        """Raise the retention class of a held block; never lowers it."""
        if kind > self._retention[block]:
            self._retention[block] = kind

    def discard(self, block: int) -> None:
        """The content of `block` is worth nothing any more, held or not."""
        if self._refs[block] == 0 and self._retention[block] is not Retention.SCRATCH:
            self._lists[self._retention[block]].remove(block)
            self._lists[Retention.SCRATCH].push_front(block)
        self._retention[block] = Retention.SCRATCH

    def eviction_order(self) -> list[int]:
        """The cached blocks, first to go first. O(n): for checks and reports."""
        cached = [block for kind in (Retention.OUTPUT, Retention.PROMPT) for block in self._lists[kind]]
        return sorted(cached, key=self._worth)

    def check(self) -> None:
        """Raise AssertionError unless every block is in exactly one place."""
        places = [sum(block in blocks for blocks in self._lists.values()) for block in range(self.total)]
        for block, refs in enumerate(self._refs):
            assert refs >= 0, f"block {block} was released more often than held"
            assert places[block] == (refs == 0), f"block {block}: {refs} holders, in {places[block]} lists"
            assert refs or block in self._lists[self._retention[block]], f"block {block} is in a wrong list"
        assert self.free + self.cached + self.used == self.total
        assert self.used == sum(refs > 0 for refs in self._refs)

    def _least_valuable(self) -> int:
        heads = [self._lists[kind].front() for kind in (Retention.OUTPUT, Retention.PROMPT)]
        heads = [block for block in heads if block != self.total]
        if not heads:
            raise OutOfBlocks(f"all {self.total} blocks are held")
        return min(heads, key=self._worth)

    def _worth(self, block: int) -> tuple[int, Retention]:
        kind = self._retention[block]
        lead = self._prompt_lead if kind is Retention.PROMPT else 0
        return (self._released[block] + lead, kind)
