"""The engine's figures at one moment: what `/engine/cache` shows and what a router prices a replica by.

What must always hold: `free + cached + used == total`, and every counter only grows.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from engine.core.pace import Pace
from engine.core.prefix_cache import PrefixCache
from engine.core.sequence import Sequence


@dataclass(slots=True)
class Counters:
    """What the scheduler counts, in tokens or requests, since its start."""

    hit_tokens: int = 0
    query_tokens: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    warm_tokens: int = 0
    recomputed_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    refused: int = 0

    @property
    def computed_tokens(self) -> int:
        """Positions computed, for whatever reason."""
        return self.prefill_tokens + self.decode_tokens + self.warm_tokens

    def count(self, seq: Sequence, start: int, count: int) -> None:
        """Positions [start, start + count) of `seq` were computed."""
        end = start + count
        if start >= seq.furthest and start >= seq.prompt_len:
            seq.furthest = end
            self.decode_tokens += count
            return
        self.recomputed_tokens += max(0, min(end, seq.furthest) - start)
        seq.furthest = max(end, seq.furthest)
        if seq.pin_id is not None:
            self.warm_tokens += count
            return
        in_prompt = min(count, max(0, seq.prompt_len - start))
        seq.prefill_tokens += in_prompt
        self.prefill_tokens += in_prompt
        self.decode_tokens += count - in_prompt


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Blocks by state, requests by state, and counters since the start.

    Blocks: `free` hold nothing, `cached` hold reusable K and V that nobody uses now, `used` are held by a
    running sequence or a pin; `pinned` (part of `used`) are held by pins, out of `pin_budget`. Tokens:
    `query_tokens_total` prompt tokens of admitted requests, of which `hit_tokens_total` were found (first
    admission only); `computed_tokens_total` = `prefill_tokens_total` + `decode_tokens_total` +
    `warm_tokens_total` (pins); `recomputed_tokens_total` (part of these) were computed again after a
    preemption. `epoch` changes whenever the cache was emptied: at every start and at every clear.
    """

    total: int
    free: int
    cached: int
    used: int
    pinned: int
    pin_budget: int
    running: int
    waiting: int
    free_slots: int
    prefill_tokens_pending: int
    hit_tokens_total: int
    query_tokens_total: int
    computed_tokens_total: int
    prefill_tokens_total: int
    decode_tokens_total: int
    warm_tokens_total: int
    recomputed_tokens_total: int
    generated_tokens_total: int
    preemptions_total: int
    evicted_blocks_total: int
    collisions_total: int
    finished_total: int
    refused_total: int
    prefill_tokens_per_s: float
    decode_step_s: float
    epoch: int

    @classmethod
    def of(
        cls,
        cache: PrefixCache,
        counters: Counters,
        pace: Pace,
        *,
        running: Collection[Sequence],
        waiting: Collection[Sequence],
        max_seqs: int,
        pinned: int,
        pin_budget: int,
        epoch: int,
    ) -> CacheStats:
        """The figures of these parts, now."""
        pool = cache.pool
        pending = [*waiting, *(seq for seq in running if seq.remaining > 1)]
        return cls(
            total=pool.total,
            free=pool.free,
            cached=pool.cached,
            used=pool.used,
            pinned=pinned,
            pin_budget=pin_budget,
            running=len(running),
            waiting=len(waiting),
            free_slots=max_seqs - len(running),
            prefill_tokens_pending=sum(seq.remaining for seq in pending),
            hit_tokens_total=counters.hit_tokens,
            query_tokens_total=counters.query_tokens,
            computed_tokens_total=counters.computed_tokens,
            prefill_tokens_total=counters.prefill_tokens,
            decode_tokens_total=counters.decode_tokens,
            warm_tokens_total=counters.warm_tokens,
            recomputed_tokens_total=counters.recomputed_tokens,
            generated_tokens_total=counters.generated_tokens,
            preemptions_total=counters.preemptions,
            finished_total=counters.finished,
            refused_total=counters.refused,
            evicted_blocks_total=cache.evicted_blocks,
            collisions_total=cache.collisions,
            prefill_tokens_per_s=pace.prefill_tokens_per_s,
            decode_step_s=pace.decode_step_s,
            epoch=epoch,
        )
