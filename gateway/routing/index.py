"""PrefixIndex: which replica holds which block of which prompt chain.

Owns one table, block hash (16 bytes) -> bit mask of replicas, bounded by `max_blocks` (least recently
stored goes first), and a second small table of *expected* blocks: those that a dispatched request is
computing at this moment. A block hash is chained (it names the whole prompt up to it), so the replicas
that hold block i are, but for lost events and evictions in the middle, a subset of those that hold block
i - 1: masks shrink along a prompt, and a bisection over them finds every replica's length at once.

Must always hold (`check`): no entry without a replica, every replica's count equals its bits in the
table, size <= max_blocks. A replica's slot is retired by `clear` in O(1): its bit is no longer live, and
a sweep spread over later calls takes it out of the table before the bit is used again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

_SWEEP_AT_ONCE = 65_536  # entries swept inside clear(); about 10 ms
_SWEEP_PER_CALL = 512  # entries swept by each later store or remove
_NAMED_MASKS = 4_096  # masks whose replica ids are kept
_PROBES = 16  # positions at which a found length is checked for holes


@dataclass(slots=True)
class _Slot:
    """One replica's bit in the masks, and how many blocks carry it."""

    replica_id: str
    bit: int
    count: int = 0
    live: bool = True


@dataclass(slots=True)
class Expectation:
    """Blocks that one dispatched request is about to leave in a replica's cache; given back to `settle`."""

    slot: _Slot
    hashes: Sequence[bytes]


class PrefixIndex:
    """Block hash -> replicas. All methods run on the event loop and none of them waits.

    `max_blocks` bounds the table; one entry costs about 170 bytes.
    """

    def __init__(self, max_blocks: int = 2_000_000) -> None:
        if max_blocks < 1:
            raise ValueError("max_blocks must be at least 1")
        self.max_blocks = max_blocks
        self._entries: OrderedDict[bytes, int] = OrderedDict()
        self._expected: dict[bytes, int] = {}
        self._slots: dict[str, _Slot] = {}
        self._by_bit: dict[int, _Slot] = {}
        self._named: dict[int, tuple[str, ...]] = {}
        self._free_bits: list[int] = []
        self._next_bit = 1
        self._live_mask = 0
        self._dead_mask = 0  # retired bits that the running sweep does not cover
        self._sweeping_mask = 0
        self._sweep_keys: list[bytes] = []

    def __len__(self) -> int:
        return len(self._entries)

    def blocks(self, replica_id: str) -> int:
        """Number of blocks known to be held by the replica."""
        slot = self._slots.get(replica_id)
        return slot.count if slot else 0

    def holds(self, replica_id: str, hashes: Iterable[bytes]) -> bool:
        """True if every one of the blocks is known to be held by the replica."""
        slot = self._slots.get(replica_id)
        if slot is None:
            return not any(True for _ in hashes)
        bit = slot.bit
        return all(self._entries.get(block, 0) & bit for block in hashes)

    # ---- writing ----

    def store(self, replica_id: str, hashes: Sequence[bytes]) -> None:
        """Record that the replica holds these blocks (in chain order). Storing twice is storing once.

        Blocks are entered last to first, so that the start of a chain is younger than its end and the bound
        trims prompts from their tails.
        """
        slot = self._slots.get(replica_id) or self._open_slot(replica_id)
        entries, bit = self._entries, slot.bit
        for block in reversed(hashes):
            mask = entries.get(block)
            if mask is None:
                entries[block] = bit
                slot.count += 1
                continue
            if not mask & bit:
                entries[block] = mask | bit
                slot.count += 1
            entries.move_to_end(block)
        while len(entries) > self.max_blocks:
            _, mask = entries.popitem(last=False)
            self._uncount(mask)
        self._sweep(_SWEEP_PER_CALL)

    def remove(self, replica_id: str, hashes: Iterable[bytes]) -> None:
        """Record that the replica dropped these blocks. Blocks that it was not known to hold are ignored."""
        slot = self._slots.get(replica_id)
        if slot is not None:
            entries, bit = self._entries, slot.bit
            for block in hashes:
                mask = entries.get(block, 0)
                if mask & bit:
                    self._drop(block, mask, bit)
                    slot.count -= 1
        self._sweep(_SWEEP_PER_CALL)

    def clear(self, replica_id: str) -> None:
        """Forget everything about the replica: it restarted, was cleared, or events were lost for good."""
        slot = self._slots.pop(replica_id, None)
        if slot is None:
            return
        slot.live = False
        del self._by_bit[slot.bit]
        self._live_mask &= ~slot.bit
        self._named.clear()
        for block in [block for block, mask in self._expected.items() if mask & slot.bit]:
            self._forget_expected(block, slot.bit)
        if slot.count:
            self._dead_mask |= slot.bit
            self._sweep(_SWEEP_AT_ONCE)
        else:
            self._free_bits.append(slot.bit)

    # ---- expected blocks ----

    def expect(self, replica_id: str, hashes: Sequence[bytes]) -> Expectation:
        """Record that the replica is about to compute these blocks, until `settle` is called with the
        result.
        """
        slot = self._slots.get(replica_id) or self._open_slot(replica_id)
        expected, entries, bit = self._expected, self._entries, slot.bit
        fresh = [h for h in hashes if not (expected.get(h, 0) | entries.get(h, 0)) & bit]
        for block in fresh:
            expected[block] = expected.get(block, 0) | bit
        return Expectation(slot, fresh)

    def settle(self, expectation: Expectation) -> None:
        """End an expectation: events have confirmed its blocks by now, or they will not come. Idempotent."""
        if expectation.slot.live:
            for block in expectation.hashes:
                self._forget_expected(block, expectation.slot.bit)
        expectation.hashes = ()

    # ---- reading ----

    def longest(self, hashes: Sequence[bytes], count: int | None = None) -> dict[str, int]:
        """For each replica that holds the first block: how many of the first `count` blocks it holds in a
        row.

        Bisection over masks: about log2(n) probes per distinct length. Every length is then probed at
        up to 16 even positions; if one of them is missing (an event was lost, or a block in the middle
        was evicted), the prompt is read block by block and the lengths are exact. A hole between
        probes goes unseen: the replica then looks warmer than it is until its next event, which costs
        time and never correctness.
        """
        count = len(hashes) if count is None else min(count, len(hashes))
        if count <= 0:
            return {}
        get = self._entries.get
        first = get(hashes[0], 0) & self._live_mask
        if not first:
            return {}
        ends = self._bisect(hashes, count, first)
        if not self._contiguous(hashes, ends):
            ends = self._scan(hashes, count, first)
        lengths: dict[str, int] = {}
        for length, mask in ends:
            lengths.update(dict.fromkeys(self._named.get(mask) or self._names(mask), length))
        return lengths

    def longest_expected(
        self, hashes: Sequence[bytes], held: dict[str, int], count: int | None = None
    ) -> dict[str, int]:
        """`held` (a result of `longest`), each length extended by the blocks that are being computed
        there.
        """
        count = len(hashes) if count is None else min(count, len(hashes))
        if not self._expected or count <= 0:
            return held
        extended = dict(held)
        entries, expected = self._entries.get, self._expected.get
        for replica_id, slot in self._slots.items():
            low, bit = held.get(replica_id, 0), slot.bit
            if low >= count or not expected(hashes[low], 0) & bit:
                continue
            high = count  # block `low` is held or expected, block `high` is not (or does not exist)
            while high - low > 1:
                middle = (low + high) // 2
                if (expected(hashes[middle], 0) | entries(hashes[middle], 0)) & bit:
                    low = middle
                else:
                    high = middle
            extended[replica_id] = high
        return extended

    def check(self) -> None:
        """Raise AssertionError if the table's invariant is broken. O(size); for tests and idle time."""
        counts: dict[int, int] = dict.fromkeys(self._by_bit, 0)
        for mask in self._entries.values():
            assert mask, "an entry without a replica"
            live = mask & self._live_mask
            assert live or mask & (self._dead_mask | self._sweeping_mask), "an entry with unknown bits only"
            while live:
                bit = live & -live
                live ^= bit
                counts[bit] += 1
        for bit, slot in self._by_bit.items():
            assert slot.count == counts[bit], f"{slot.replica_id}: counted {slot.count}, held {counts[bit]}"
        for mask in self._expected.values():
            assert mask and not mask & ~self._live_mask, "an expectation of no live replica"
        assert len(self._entries) <= self.max_blocks, "over the bound"
        assert self._live_mask == sum(self._by_bit), "live mask differs from the slots"

    # ---- inside ----

    def _bisect(self, hashes: Sequence[bytes], count: int, first: int) -> list[tuple[int, int]]:
        """[(length, mask of the replicas that hold exactly that many)], assuming masks shrink along the
        prompt.
        """
        get = self._entries.get
        ends: list[tuple[int, int]] = []
        last = get(hashes[count - 1], 0) & first
        if last:
            ends.append((count, last))
        pending = [(0, first, count - 1, last)] if first != last else []
        while pending:
            low, at_low, high, at_high = pending.pop()
            while high - low > 1:  # somewhere in between, some of at_low end; follow the left half
                middle = (low + high) // 2
                at_middle = (get(hashes[middle], 0) | at_high) & at_low
                if at_middle == at_low:
                    low = middle
                elif at_middle == at_high:
                    high = middle
                else:
                    pending.append((middle, at_middle, high, at_high))
                    high, at_high = middle, at_middle
            ends.append((low + 1, at_low & ~at_high))
        return ends

    def _contiguous(self, hashes: Sequence[bytes], ends: list[tuple[int, int]]) -> bool:
        """True if no probe finds a block missing below any replica's length."""
        get = self._entries.get
        by_length = sorted(ends)
        longest = by_length[-1][0]
        step = max(1, longest // _PROBES)
        wanted = 0
        for position in range(longest - 1, -1, -step):
            while by_length and by_length[-1][0] > position:
                wanted |= by_length.pop()[1]
            if wanted & ~get(hashes[position], 0):
                return False
        return True

    def _scan(self, hashes: Sequence[bytes], count: int, first: int) -> list[tuple[int, int]]:
        """The same as `_bisect`, block by block: exact whatever is missing."""
        get = self._entries.get
        ends: list[tuple[int, int]] = []
        alive = first
        for position, block in enumerate(islice(hashes, count)):
            still = alive & get(block, 0)
            if still != alive:
                ends.append((position, alive & ~still))
                alive = still
                if not alive:
                    return ends
        ends.append((count, alive))
        return ends

    def _names(self, mask: int) -> tuple[str, ...]:
        """Replica ids of a mask of live bits; the same few masks come again and again, so they are kept."""
        if len(self._named) >= _NAMED_MASKS:
            self._named.clear()
        names = tuple(slot.replica_id for bit, slot in self._by_bit.items() if mask & bit)
        self._named[mask] = names
        return names

    def _open_slot(self, replica_id: str) -> _Slot:
        if self._free_bits:
            bit = self._free_bits.pop()
        else:
            bit = self._next_bit
            self._next_bit <<= 1
        slot = _Slot(replica_id, bit)
        self._slots[replica_id] = slot
        self._by_bit[bit] = slot
        self._live_mask |= bit
        self._named.clear()
        return slot

    def _drop(self, block: bytes, mask: int, bits: int) -> None:
        mask &= ~bits
        if mask:
            self._entries[block] = mask
        else:
            del self._entries[block]

    def _forget_expected(self, block: bytes, bit: int) -> None:
        mask = self._expected.get(block, 0) & ~bit
        if mask:
            self._expected[block] = mask
        else:
            self._expected.pop(block, None)

    def _uncount(self, mask: int) -> None:
        mask &= self._live_mask
        while mask:
            bit = mask & -mask
            mask ^= bit
            self._by_bit[bit].count -= 1

    def _sweep(self, budget: int) -> None:
        """Take retired bits out of up to `budget` entries; a bit is free again when the whole table was
        seen.
        """
        while self._dead_mask or self._sweeping_mask:
            if not self._sweeping_mask:
                self._sweeping_mask, self._dead_mask = self._dead_mask, 0
                self._sweep_keys = list(self._entries)
            entries, dead, keys = self._entries, self._sweeping_mask, self._sweep_keys
            while keys and budget > 0:
                block = keys.pop()
                budget -= 1
                mask = entries.get(block, 0)
                if mask & dead:
                    self._drop(block, mask, dead)
            if keys:
                return
            while dead:
                bit = dead & -dead
                dead ^= bit
                self._free_bits.append(bit)
            self._sweeping_mask = 0
