"""ChainMap: an engine's own block hashes -> our chain entries, for one replica.

Engines that hash in their own way (vLLM: a salted, seeded hash, blocks of any size) send token ids with
every stored block; our chain is computed again from those tokens and the parent's entry. One external
block may span several of ours (128-token blocks). Bounded: the oldest external blocks are forgotten
first, and forgetting one removes its entries, so the map never points at blocks that nobody can remove.

The bundled engine's hashes are ours already; `OwnHashes` passes them through.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

from gateway.routing.kv_events import ExternalHash, Stored

BlockHasher = Callable[
    [bytes, Sequence[int]], list[bytes]
]  # (parent entry or seed, token ids) -> one hash per block
SeedOf = Callable[[str | None], bytes | None]  # cache salt -> chain seed; None: not a chain that we route


class HashMapping(Protocol):
    """Translates one replica's events into chain entries."""

    def stored(self, event: Stored) -> tuple[list[bytes], list[bytes]]:
        """(entries that the replica now holds, entries that were forgotten to stay within bounds)."""

    def removed(self, hashes: Sequence[ExternalHash]) -> list[bytes]:
        """Entries that the replica no longer holds."""

    def clear(self) -> None:
        """Forget everything."""


class OwnHashes:
    """The identity: the engine's hashes are chain entries of 16 bytes; anything else is not ours."""

    def stored(self, event: Stored) -> tuple[list[bytes], list[bytes]]:
        return self.removed(event.hashes), []

    def removed(self, hashes: Sequence[ExternalHash]) -> list[bytes]:
        return [block for block in hashes if isinstance(block, bytes) and len(block) == 16]

    def clear(self) -> None:
        return None


class ChainMap:
    """`block_size` is ours; the engine's must be a multiple of it (other blocks are ignored)."""

    def __init__(
        self, hasher: BlockHasher, seed_of: SeedOf, *, block_size: int = 16, capacity: int = 262_144
    ) -> None:
        self._hasher = hasher
        self._seed_of = seed_of
        self._block_size = block_size
        self._capacity = capacity
        self._entries: OrderedDict[ExternalHash, tuple[bytes, ...]] = OrderedDict()
        self.ignored = 0  # external blocks that could not be placed in a chain

    def __len__(self) -> int:
        return len(self._entries)

    def stored(self, event: Stored) -> tuple[list[bytes], list[bytes]]:
        size = event.block_size
        placed = (
            size > 0 and size % self._block_size == 0 and len(event.token_ids) == size * len(event.hashes)
        )
        parent = self._parent_of(event) if placed else None
        if parent is None:
            self.ignored += len(event.hashes)
            return [], []
        chain = self._hasher(parent, event.token_ids)
        per_block = size // self._block_size
        for number, external in enumerate(event.hashes):
            self._entries[external] = tuple(chain[number * per_block : (number + 1) * per_block])
            self._entries.move_to_end(external)
        forgotten: list[bytes] = []
        while len(self._entries) > self._capacity:
            forgotten.extend(self._entries.popitem(last=False)[1])
        return chain, forgotten

    def removed(self, hashes: Sequence[ExternalHash]) -> list[bytes]:
        gone: list[bytes] = []
        for external in hashes:
            gone.extend(self._entries.pop(external, ()))
        return gone

    def clear(self) -> None:
        self._entries.clear()

    def _parent_of(self, event: Stored) -> bytes | None:
        if event.parent is None:
            return self._seed_of(event.salt)
        entries = self._entries.get(event.parent)
        return entries[-1] if entries else None
