"""Which blocks hold which tokens: the index from a block's chain hash to the block.

Owns the content record of every block (hash, tokens, predecessor) and the events that report its changes.
What must always hold: an indexed block's predecessor is indexed, so the indexed blocks form a forest whose
roots start prompts; each hash has one block. A hit is taken only when the predecessor *and* the tokens
agree, so two chains whose hashes collide never share a block: the later one stays out of the cache.
"""

from __future__ import annotations

from array import array

from engine.core.block_pool import BlockPool, Retention
from engine.core.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent

#: Predecessor of a chain's first block.
ROOT = -1


class PrefixCache:
    """Index over the blocks of one `BlockPool`; `tokens` arguments are int32 little-endian bytes."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self.evicted_blocks = 0
        self.collisions = 0
        self._stride = 4 * block_size
        self._index: dict[bytes, int] = {}
        self._hash: list[bytes | None] = [None] * pool.total
        self._tokens = [b""] * pool.total
        self._parent = [ROOT] * pool.total
        self._seed = [b""] * pool.total
        self._events: list[CacheEvent] = []
        self._removed: list[bytes] = []

    def __len__(self) -> int:
        """Number of indexed blocks, held or not."""
        return len(self._index)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._index

    def match(self, seed: bytes, hashes: list[bytes], tokens: bytes, limit: int) -> list[int]:
        """The longest run of indexed blocks for a chain, at most `limit` blocks. Takes no hold on them."""
        found: list[int] = []
        parent = ROOT
        for i in range(limit):
            block = self._index.get(hashes[i])
            if block is None or not self._holds(block, parent, seed, tokens, i):
                break
            found.append(block)
            parent = block
        return found

    def allocate(self) -> int:
        """A block to write to, held once; drops what it held before. OutOfBlocks when none is left."""
        block = self.pool.take()
        if self._hash[block] is not None:
            self._removed.append(self._forget(block))
            self.evicted_blocks += 1
        return block

    def insert(
        self,
        seed: bytes,
        table: list[int],
        hashes: list[bytes],
        tokens: bytes,
        *,
        first: int,
        last: int,
        prompt: int,
    ) -> int:
        """Index blocks [first, last) of `table`, whose tokens are `tokens` (those blocks only).

        A block whose content is indexed already is replaced in `table` by that one and given back. Blocks
        below `prompt` are kept longer. Returns the end of the indexed run: below `last` when a collision
        stopped it, and then nothing of this table may be indexed again.
        """
        stored = first
        for i in range(first, last):
            block, block_hash = table[i], hashes[i]
            parent = table[i - 1] if i else ROOT
            twin = self._index.get(block_hash)
            if twin is None:
                own = tokens[(i - first) * self._stride : (i - first + 1) * self._stride]
                self._record(block, block_hash, own, parent, seed)
            elif self._holds(twin, parent, seed, tokens, i - first):
                self.pool.hold(twin)
                table[i] = twin
                self.pool.release(block)
                block, stored = twin, i + 1
            else:
                self.collisions += 1
                last = i
                break
            self.keep(block, prompt=i < prompt)
        if stored < last:
            self._flush_removed()
            ids = array("i", tokens[(stored - first) * self._stride : (last - first) * self._stride])
            parent_hash = hashes[stored - 1] if stored else None
            self._events.append(
                BlockStored(tuple(hashes[stored:last]), parent_hash, tuple(ids), self.block_size)
            )
        return last

    def keep(self, block: int, *, prompt: bool) -> None:
        """Note what a held, indexed block is: part of a prompt, or of an output only."""
        self.pool.retain(block, Retention.PROMPT if prompt else Retention.OUTPUT)

    def clear(self) -> None:
        """Forget everything. Held blocks stay held, but nobody will find them."""
        for block in list(self._index.values()):
            self._forget(block)
        self._removed.clear()
        self._events.append(AllBlocksCleared())

    def drain_events(self) -> list[CacheEvent]:
        """Events since the last call, in order."""
        self._flush_removed()
        events = self._events
        self._events = []
        return events

    def check(self) -> None:
        """Raise AssertionError unless index, records and pool agree."""
        for block_hash, block in self._index.items():
            assert self._hash[block] == block_hash, f"block {block} is indexed under another hash"
            assert self.pool.retention(block) is not Retention.SCRATCH, (
                f"indexed block {block} counts as free"
            )
            parent = self._parent[block]
            assert parent == ROOT or self._hash[parent] is not None, f"block {block} lost its predecessor"
        assert len(self._index) == sum(block_hash is not None for block_hash in self._hash)
        place = {block: i for i, block in enumerate(self.pool.eviction_order())}
        for block, position in place.items():
            parent = self._parent[block]
            assert self._hash[block] is not None, f"cached block {block} is not indexed"
            assert place.get(parent, len(place)) > position, f"block {parent} would go before block {block}"

    def _holds(self, block: int, parent: int, seed: bytes, tokens: bytes, i: int) -> bool:
        return (
            self._parent[block] == parent
            and self._tokens[block] == tokens[i * self._stride : (i + 1) * self._stride]
            and (parent != ROOT or self._seed[block] == seed)
        )

    def _record(self, block: int, block_hash: bytes, tokens: bytes, parent: int, seed: bytes) -> None:
        self._index[block_hash] = block
        self._hash[block] = block_hash
        self._tokens[block] = tokens
        self._parent[block] = parent
        self._seed[block] = seed

    def _forget(self, block: int) -> bytes:
        block_hash = self._hash[block]
        assert block_hash is not None
        del self._index[block_hash]
        self._hash[block] = None
        self._tokens[block] = b""
        self._parent[block] = ROOT
        self.pool.discard(block)
        return block_hash

    def _flush_removed(self) -> None:
        if self._removed:
            self._events.append(BlockRemoved(tuple(self._removed)))
            self._removed = []
