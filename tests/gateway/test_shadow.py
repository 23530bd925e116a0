"""The shadow index: what the other form would have hit."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from waiting import eventually

from gateway.telemetry.ledger import Ledger, LedgerEntry
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.shadow import Shadow, ShadowCache, ShadowItem

SYSTEM = "You are a helpful assistant of the harbour office. " * 20


def messages(head: str, user: str = "hi") -> list[dict[str, Any]]:
    return [{"role": "system", "content": head + SYSTEM}, {"role": "user", "content": user}]


class Bench:
    def __init__(self, **settings: Any) -> None:
        self.metrics = Metrics()
        self.ledger = Ledger(self.metrics)
        self.shadow = Shadow(self.ledger, self.metrics, **settings)

    def item(
        self, head: str, *, delivered: int, enforced: bool, user: str = "hi", capacity: int | None = 4096
    ) -> ShadowItem:
        entry = LedgerEntry("r", 0.0, model="m", route="chat", replica="p-r0", prompt_tokens=260)
        entry.delivered_tokens = delivered
        return ShadowItem(entry, b"s" * 16, messages(head, user), None, capacity, enforced)


def test_a_cache_counts_leading_blocks_and_evicts_tails_first() -> None:
    cache = ShadowCache(3, ttl_s=10.0)
    assert cache.use([b"a", b"b", b"c"], 0.0) == 0
    assert cache.use([b"a", b"b", b"x"], 1.0) == 2
    assert len(cache) == 3
    assert cache.use([b"a", b"b", b"c"], 2.0) == 2  # c went
    assert cache.use([b"b"], 3.0) == 1
    assert cache.use([b"a"], 20.0) == 0  # too old


def test_enforce_credits_what_the_original_would_have_missed() -> None:
    bench = Bench()
    bench.shadow.follow(bench.item("Time: 10:00:01\n", delivered=0, enforced=True))
    second = bench.item("Time: 10:00:02\n", delivered=240, enforced=True)
    bench.shadow.follow(second)
    assert second.entry.recovered_tokens == 240  # the clock stands in the first block
    same = bench.item("Time: 10:00:02\n", delivered=240, enforced=True)
    bench.shadow.follow(same)
    assert same.entry.recovered_tokens < 30  # the original would have hit as well


def test_a_prompt_without_edits_credits_nothing_but_counts_as_seen() -> None:
    bench = Bench()
    for enforced in (True, False):
        first = replace(bench.item("No clock here.\n", delivered=240, enforced=enforced), same=True)
        bench.shadow.follow(first)
        assert first.entry.recovered_tokens == first.entry.recoverable_tokens == 0
    assert bench.shadow.blocks() > 0


def test_observe_credits_what_the_canonical_form_would_have_hit() -> None:
    bench = Bench()
    bench.shadow.follow(bench.item("Time: [below]\n", delivered=0, enforced=False))
    second = bench.item("Time: [below]\n", delivered=0, enforced=False)
    bench.shadow.follow(second)
    assert 230 <= second.entry.recoverable_tokens <= 260
    labels = {"model": "m", "route": "chat"}
    total = bench.metrics.registry.get_sample_value("warmfront_recoverable_tokens_total", labels)
    assert total == second.entry.recoverable_tokens


def test_a_lost_cache_is_lost_here_too() -> None:
    bench = Bench()
    bench.shadow.follow(bench.item("a\n", delivered=0, enforced=False))
    assert bench.shadow.blocks() > 10
    bench.shadow.clear("p-r0")
    assert bench.shadow.blocks() == 0


def test_capacity_is_the_replicas() -> None:
    bench = Bench()
    bench.shadow.follow(bench.item("a\n", delivered=0, enforced=False, capacity=4))
    assert bench.shadow.blocks() == 4


def test_sampling_follows_whole_conversations() -> None:
    bench = Bench(rate=0.5, per_s=1e9)
    followed = {
        user: bench.shadow.offer(bench.item("a\n", delivered=0, enforced=True, user=user))
        for user in map(str, range(100))
    }
    assert 25 < sum(followed.values()) < 75
    for user, before in followed.items():
        assert bench.shadow.offer(bench.item("b\n", delivered=0, enforced=True, user=user)) == before


def test_rate_limit_and_full_queue_drop() -> None:
    limited = Bench(per_s=5.0)
    taken = [limited.shadow.offer(limited.item("a\n", delivered=0, enforced=True)) for _ in range(20)]
    assert 5 <= sum(taken) <= 6
    full = Bench(per_s=1e9)
    taken = [full.shadow.offer(full.item("a\n", delivered=0, enforced=True)) for _ in range(600)]
    assert sum(taken) == 512
    dropped = full.metrics.registry.get_sample_value("warmfront_shadow_dropped_total", {"reason": "queue"})
    assert dropped == 88


async def test_the_task_follows_what_was_offered() -> None:
    bench = Bench()
    task = asyncio.create_task(bench.shadow.run())
    second = bench.item("Time: [below]\n", delivered=0, enforced=False)
    bench.shadow.offer(bench.item("Time: [below]\n", delivered=0, enforced=False))
    bench.shadow.offer(second)
    await eventually(lambda: second.entry.recoverable_tokens)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
