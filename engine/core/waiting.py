"""The queue of sequences that wait for a slot: more urgent classes first, then arrival order.

What must always hold: keys are unique, the order is total, and a preempted sequence keeps the arrival order
it came in with, so it goes ahead of every later arrival of its class. Deadlines are kept beside it.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator

from engine.core.sequence import Sequence


class WaitingQueue:
    """Waiting sequences in the order in which they are considered."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self._deadlines: list[tuple[float, int, Sequence]] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __contains__(self, seq: Sequence) -> bool:
        at = self._position(seq)
        return at < len(self._sequences) and self._sequences[at] is seq

    def push(self, seq: Sequence) -> None:
        """Insert by key."""
        insort(self._sequences, seq, key=_key)

    def remove(self, seq: Sequence) -> None:
        """Take out a sequence that is in the queue."""
        del self._sequences[self._position(seq)]

    def set_deadline(self, seq: Sequence, at_s: float) -> None:
        """Report `seq` from `expired` if it still waits for its first start at `at_s`."""
        heapq.heappush(self._deadlines, (at_s, seq.order, seq))

    def expired(self, now_s: float) -> list[Sequence]:
        """Sequences that were never started and whose deadline has passed; each is reported once."""
        late = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            seq = heapq.heappop(self._deadlines)[2]
            if seq.started_s is None and seq in self:
                late.append(seq)
        return late

    def _position(self, seq: Sequence) -> int:
        return bisect_left(self._sequences, seq.key, key=_key)


def _key(seq: Sequence) -> tuple[int, int]:
    return seq.key
