"""How sequences get blocks, grow, enter the prefix cache and give blocks back.

Owns the step from tokens to blocks: it alone writes `Sequence.block_table`. What must always hold:

    tokens       |<------- num_computed ------->|<- remaining ->|
    block table  [ 12 | 7 | 31 | 40 | 5 | 6 ]
                 shared |<- private ->|       sharing is by prefix: holders never increase along a table
                 registered ->|               leading full blocks that the prefix cache indexes

A block is written only while private and not registered, so no shared block ever changes.
"""

from __future__ import annotations

from canonicalizer.chain import block_hashes
from engine.core.block_pool import BlockPool
from engine.core.prefix_cache import PrefixCache
from engine.core.sequence import Sequence, token_bytes


class BlockTables:
    """The pool and its prefix cache, seen from sequences."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.cache = PrefixCache(self.pool, block_size)
        self.block_size = block_size
        self._filling: dict[bytes, Sequence] = {}

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def hashes_of(self, seed: bytes, token_ids: tuple[int, ...]) -> tuple[bytes, ...]:
        """Chain hashes of the full blocks of `token_ids`."""
        full = len(token_ids) // self.block_size * self.block_size
        return tuple(block_hashes(seed, token_bytes(token_ids[:full]), self.block_size))

    def chain(self, seq: Sequence, blocks: int) -> list[bytes]:
        """Chain hashes of at least the first `blocks` blocks, computed once each."""
        have = len(seq.hashes)
        if have < blocks:
            tokens = token_bytes(seq.tokens[have * self.block_size : blocks * self.block_size])
            parent = seq.hashes[-1] if seq.hashes else None
            seq.hashes.extend(block_hashes(seq.request.seed, tokens, self.block_size, parent))
        return seq.hashes

    def attach(self, seq: Sequence) -> None:
        """Give a waiting sequence the blocks of its longest cached prefix, held and counted as computed.

        A sequence that will sample keeps at least one token to compute (its logits are needed), so a prompt
        that is cached whole gets all blocks but its last one, which is computed again into a block of its
        own.
        """
        limit = self._hit_limit(seq)
        hashes = self.chain(seq, limit)
        tokens = token_bytes(seq.tokens[: limit * self.block_size])
        seq.block_table = self.cache.match(seq.request.seed, hashes, tokens, limit)
        for i, block in enumerate(seq.block_table):
            self.pool.hold(block)
            self.cache.keep(block, prompt=(i + 1) * self.block_size <= seq.prompt_len)
        seq.registered = len(seq.block_table)
        seq.num_computed = seq.registered * self.block_size

    def filler(self, seq: Sequence) -> tuple[bytes, Sequence] | None:
        """Who is about to compute the next block that `seq` needs, with that block's hash."""
        position = seq.registered
        if position >= self._hit_limit(seq):
            return None
        wanted = self.chain(seq, position + 1)[position]
        owner = self._filling.get(wanted)
        return None if owner is None else (wanted, owner)

    def filled_by(self, block_hash: bytes) -> Sequence | None:
        """The running sequence that is about to compute the block of that hash."""
        return self._filling.get(block_hash)

    def fill(self, seq: Sequence) -> None:
        """Allocate the blocks of all known tokens, and announce those that will enter the cache."""
        while len(seq.block_table) < self.blocks_for(len(seq.tokens)):
            seq.block_table.append(self.cache.allocate())
        full = len(seq.tokens) // self.block_size
        for block_hash in self.chain(seq, full)[seq.registered : full]:
            self._filling.setdefault(block_hash, seq)

    def grow(self, seq: Sequence) -> bool:
        """Make room for the next position; False when every block is held."""
        if len(seq.block_table) * self.block_size > seq.num_computed:
            return True
        if not self.pool.available:
            return False
        seq.block_table.append(self.cache.allocate())
        return True

    def advance(self, seq: Sequence, count: int) -> None:
        """`count` more positions of `seq` are computed: index the blocks that became full."""
        seq.num_computed += count
        first, full = seq.registered, seq.num_computed // self.block_size
        if full <= first or seq.unhashed:
            return
        hashes = self.chain(seq, full)
        tokens = token_bytes(seq.tokens[first * self.block_size : full * self.block_size])
        prompt = seq.prompt_len // self.block_size
        seq.registered = self.cache.insert(
            seq.request.seed, seq.block_table, hashes, tokens, first=first, last=full, prompt=prompt
        )
        for block_hash in hashes[first:full]:
            self._announce_end(block_hash, seq)
        if seq.registered < full:
            self._stop_hashing(seq)

    def detach(self, seq: Sequence) -> None:
        """Take all blocks back, the tail of the chain first."""
        self._forget_filling(seq)
        for block in reversed(seq.block_table):
            self.pool.release(block)
        seq.block_table = []
        seq.registered = seq.num_computed = 0
        seq.unhashed = False

    def clear(self, running: list[Sequence]) -> None:
        """Empty the cache; what is running keeps its blocks, and keeps them out of the cache."""
        for seq in running:
            self._stop_hashing(seq)
        self.cache.clear()

    def private(self, seq: Sequence) -> int:
        """Blocks of `seq` that nobody else holds: the tail of its table, found by bisection."""
        table = seq.block_table
        low, high = 0, len(table)
        while low < high:
            middle = (low + high) // 2
            if self.pool.refs(table[middle]) > 1:
                low = middle + 1
            else:
                high = middle
        return len(table) - low

    def check(self, running: list[Sequence], pinned: list[list[int]]) -> None:
        """Raise AssertionError unless exactly the running sequences and the pinned tables hold blocks."""
        assert all(owner in running for owner in self._filling.values()), "a stopped sequence is awaited"
        holders = [seq.block_table for seq in running] + pinned
        held = [0] * self.pool.total
        for table in holders:
            assert len(set(table)) == len(table), f"a block occurs twice in {table}"
            counts = [self.pool.refs(block) for block in table]
            assert counts == sorted(counts, reverse=True), f"sharing is not by prefix in {table}"
            for block in table:
                held[block] += 1
        refs = [self.pool.refs(block) for block in range(self.pool.total)]
        assert held == refs, f"held {held} but counted {refs}"
        self.pool.check()
        self.cache.check()

    def _hit_limit(self, seq: Sequence) -> int:
        if seq.request.params.prompt_logprobs is not None:
            return 0
        to_sample = 0 if seq.pin_id is not None else 1
        return (len(seq.tokens) - to_sample) // self.block_size

    def _stop_hashing(self, seq: Sequence) -> None:
        self._forget_filling(seq)
        seq.unhashed = True

    def _forget_filling(self, seq: Sequence) -> None:
        for block_hash in seq.hashes[seq.registered :]:
            self._announce_end(block_hash, seq)

    def _announce_end(self, block_hash: bytes, seq: Sequence) -> None:
        if self._filling.get(block_hash) is seq:
            del self._filling[block_hash]
