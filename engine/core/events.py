"""What changes in the prefix cache, as values: the source of the KV events that routers subscribe to.

What must always hold: replaying a replica's events in order gives exactly the set of block hashes that its
prefix cache holds. A hash is reported stored after its parent, and removed before its parent.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Consecutive blocks of one chain entered the cache; `token_ids` are those of all of them, in order."""

    hashes: tuple[bytes, ...]
    parent: bytes | None
    token_ids: tuple[int, ...]
    block_size: int


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks left the cache because their memory was needed."""

    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The cache was emptied."""


CacheEvent = BlockStored | BlockRemoved | AllBlocksCleared
