"""ApproximateBlocks: what a replica without KV events probably holds, from the gateway's own dispatches.

An LRU of block hashes with a time to live, mirrored into the prefix index under the replica's id. It
guesses: the engine may have evicted earlier (another client) or keep longer. `capacity` should be the
engine's cache in blocks. Must always hold: the index's entries for this replica are the keys of
`_expires`, and there are at most `capacity`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from gateway.routing.index import PrefixIndex

DEFAULT_CAPACITY = 32_768  # blocks: half a million tokens
DEFAULT_TTL_S = 300.0


class ApproximateBlocks:
    """Entries of one replica, oldest first."""

    def __init__(
        self,
        replica_id: str,
        index: PrefixIndex,
        *,
        capacity: int = DEFAULT_CAPACITY,
        ttl_s: float = DEFAULT_TTL_S,
    ) -> None:
        self._replica_id = replica_id
        self._index = index
        self._capacity = capacity
        self._ttl_s = ttl_s
        self._expires: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._expires)

    def insert(self, hashes: Sequence[bytes], now: float) -> None:
        """The replica has just computed (or reused) these blocks. Tails are dropped before heads."""
        kept = hashes[: self._capacity]
        expires = now + self._ttl_s
        for block in reversed(kept):
            self._expires[block] = expires
            self._expires.move_to_end(block)
        self._index.store(self._replica_id, kept)
        gone = []
        while len(self._expires) > self._capacity:
            gone.append(self._expires.popitem(last=False)[0])
        self._index.remove(self._replica_id, gone)
        self.expire(now)

    def expire(self, now: float) -> None:
        """Forget what was not used for the time to live."""
        gone = []
        while self._expires:
            block, expires = next(iter(self._expires.items()))
            if expires > now:
                break
            del self._expires[block]
            gone.append(block)
        self._index.remove(self._replica_id, gone)

    def clear(self) -> None:
        """The replica restarted: nothing is left."""
        self._expires.clear()
        self._index.clear(self._replica_id)
