"""The shadow index: what the other form of a prompt would have hit.

Owns, per replica, an LRU of block hashes as large as that replica's cache, filled with the prompts as they
were *not* sent: the original under `enforce`, the canonical one under `observe`. Prompts are compared as
chunks of text (64 bytes, about 16 tokens), so that following one costs microseconds and no tokenizer. The
difference to what the engine delivered is what canonicalization recovered, or could. Always holds: nothing
here runs on a request's path (a bounded queue, one task; a full queue drops); conversations are sampled as
a whole, and capacity is scaled by the same rate, so that the hit rate of the sample estimates that of the
whole.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from canonicalizer.chain import BLOCK_SIZE, block_hashes
from gateway.canon.text import prompt_text
from gateway.telemetry.ledger import Ledger, LedgerEntry
from gateway.telemetry.metrics import Metrics

_QUEUE = 512
_CHUNK_BYTES = 64
_DEFAULT_BLOCKS = 8192


class ShadowCache:
    """One replica's cache if it had seen the other form: block hash -> time last used, oldest first."""

    __slots__ = ("_blocks", "_ttl_s", "capacity")

    def __init__(self, capacity: int, ttl_s: float) -> None:
        self.capacity = capacity
        self._ttl_s = ttl_s
        self._blocks: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def use(self, hashes: Sequence[bytes], now: float) -> int:
        """Number of leading blocks that were held; afterwards all of them are."""
        blocks = self._blocks
        oldest = now - self._ttl_s
        held = 0
        for block in hashes:
            at = blocks.get(block)
            if at is None or at < oldest:
                break
            held += 1
        for block in reversed(hashes):  # tails are older than heads, so they are evicted first
            blocks[block] = now
            blocks.move_to_end(block)
        while len(blocks) > self.capacity:
            blocks.popitem(last=False)
        return held


@dataclass(frozen=True, slots=True)
class ShadowItem:
    """One finished request; `messages` and `tools` are those of the form that was not sent."""

    entry: LedgerEntry
    seed: bytes
    messages: list[dict[str, Any]]
    tools: Any
    capacity: int | None
    """Blocks of the replica's cache, None where unknown."""
    enforced: bool
    same: bool = False
    """Both forms are one: nothing was recovered or could be, but the blocks count as seen."""


class Shadow:
    """Follows sampled conversations. `run` is a background task."""

    def __init__(
        self,
        ledger: Ledger,
        metrics: Metrics,
        *,
        rate: float = 1.0,
        per_s: float = 200.0,
        max_blocks: int = 200_000,
        ttl_s: float = 3600.0,
    ) -> None:
        self._ledger = ledger
        self._metrics = metrics
        self._rate = min(1.0, max(0.0, rate))
        self._per_s = per_s
        self._max_blocks = max_blocks
        self._ttl_s = ttl_s
        self._allowance = per_s
        self._allowance_at = time.monotonic()
        self._caches: dict[tuple[str, bool], ShadowCache] = {}
        self._queue: asyncio.Queue[ShadowItem] = asyncio.Queue(_QUEUE)

    def offer(self, item: ShadowItem) -> bool:
        """Hand over one finished request; False when it is not followed."""
        if not self._sampled(item):
            return False
        now = time.monotonic()
        self._allowance = min(self._per_s, self._allowance + (now - self._allowance_at) * self._per_s)
        self._allowance_at = now
        if self._allowance < 1.0:
            self._metrics.shadow_dropped.labels("rate").inc()
            return False
        try:
            self._queue.put_nowait(item)
        except asyncio.QueueFull:
            self._metrics.shadow_dropped.labels("queue").inc()
            return False
        self._allowance -= 1.0
        return True

    def clear(self, replica: str) -> None:
        """The replica lost its cache, so its shadow loses it too."""
        for key in [key for key in self._caches if key[0] == replica]:
            del self._caches[key]

    def blocks(self) -> int:
        """Blocks held over all shadows."""
        return sum(len(cache) for cache in self._caches.values())

    async def run(self) -> None:
        """Follow what was offered, one request at a time."""
        while True:
            self.follow(await self._queue.get())
            await asyncio.sleep(0)

    def follow(self, item: ShadowItem) -> None:
        """Look one request up in its replica's shadow, credit the difference, and insert it."""
        entry = item.entry
        data = prompt_text(item.messages, item.tools)
        hashes = block_hashes(item.seed, data, BLOCK_SIZE)
        held = self._cache(entry.replica, item).use(hashes, time.monotonic())
        if item.same:
            return
        would_hit = round(entry.prompt_tokens * held * _CHUNK_BYTES / len(data)) if data else 0
        weight = 1.0 / self._rate
        if item.enforced:
            gain = entry.delivered_tokens - would_hit
            if gain > 0:
                self._ledger.credit_recovered(entry, round(gain * weight))
        else:
            gain = would_hit - entry.delivered_tokens
            if gain > 0:
                self._ledger.credit_recoverable(entry, round(gain * weight))

    def _cache(self, replica: str, item: ShadowItem) -> ShadowCache:
        key = (replica, item.enforced)
        cache = self._caches.get(key)
        if cache is None:
            capacity = item.capacity or _DEFAULT_BLOCKS
            share = self._max_blocks // max(1, len(self._caches) + 1)
            capacity = max(1, min(round(capacity * self._rate), share))
            cache = self._caches[key] = ShadowCache(capacity, self._ttl_s)
        return cache

    def _sampled(self, item: ShadowItem) -> bool:
        if self._rate >= 1.0:
            return True
        root = next((m.get("content") for m in item.messages if m.get("role") == "user"), None)
        mark = f"{item.entry.tenant}\0{root}".encode("utf-8", "surrogatepass")
        return xxhash.xxh3_64_intdigest(mark) < self._rate * 2**64
