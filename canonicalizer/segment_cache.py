"""Token ids of prompt segments that were seen before.

Owns an LRU map text -> ids, bounded in bytes. What must hold: `size` is the sum of its entries' costs and
never exceeds `limit`; `check` recomputes it. Safe to use from several threads.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict

_ENTRY_OVERHEAD = 200  # bytes: dict slot, links and the two objects' bookkeeping (measured on CPython 3.11)


def _cost(text: str, ids: bytes) -> int:
    return sys.getsizeof(text) + len(ids) + _ENTRY_OVERHEAD


class SegmentCache:
    """LRU map from a segment's text to its ids (int32 LE), at most `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.size = 0
        self._entries: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, text: str) -> bool:
        return text in self._entries

    def get(self, text: str) -> bytes | None:
        """The ids of `text`, which becomes the most recently used entry; None when it isn't known."""
        with self._lock:
            ids = self._entries.get(text)
            if ids is not None:
                self._entries.move_to_end(text)
            return ids

    def put(self, text: str, ids: bytes) -> None:
        """Remember `ids`; the least recently used entries make room.

        A text dearer than a quarter of the limit is not kept: one huge prompt can't empty the cache.
        """
        cost = _cost(text, ids)
        if cost * 4 > self.limit:
            return
        with self._lock:
            if text in self._entries:
                return
            self._entries[text] = ids
            self.size += cost
            while self.size > self.limit:
                self.size -= _cost(*self._entries.popitem(last=False))

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()
            self.size = 0

    def check(self) -> None:
        """Raise `AssertionError` when the byte count is wrong or over the limit."""
        with self._lock:
            total = sum(_cost(text, ids) for text, ids in self._entries.items())
            if total != self.size or self.size > self.limit:
                raise AssertionError(
                    f"segment cache: {total} bytes held, {self.size} counted, {self.limit} allowed"
                )
