"""PoolState: membership, readiness, policy switch."""

import asyncio

import pytest

from gateway.routing import PoolState, Replica, Timings
from gateway.routing.rates import DEFAULT_TOKENS_PER_S


def replica(name: str) -> Replica:
    return Replica(name, pool="p", base_url="http://x")


def test_membership():
    pool = PoolState("p", [replica("a")])
    with pytest.raises(ValueError, match="replica a exists already"):
        pool.add(replica("a"))
    pool.discard("a")
    pool.discard("a")
    assert pool.replicas == {}


def test_ready_excludes():
    pool = PoolState("p", [replica("a"), replica("b"), replica("c")])
    pool.replicas["a"].mark_ready()
    pool.replicas["b"].mark_ready()
    assert [r.id for r in pool.ready()] == ["a", "b"]
    assert [r.id for r in pool.ready(frozenset({"a"}))] == ["b"]


def test_policy_is_switched_and_its_state_kept_when_unchanged():
    pool = PoolState("p", routing="round-robin")
    policy = pool.routing
    pool.use_policy("round-robin")
    assert pool.routing is policy
    pool.use_policy("cost")
    assert pool.routing.name == "cost"
    with pytest.raises(ValueError, match="unknown routing policy"):
        pool.use_policy("other")


def test_fallback_rate_is_the_median_of_the_known():
    pool = PoolState("p", [replica("a"), replica("b"), replica("c"), replica("d")])
    assert pool.fallback_rate() == DEFAULT_TOKENS_PER_S
    for name, rate in (("a", 100), ("b", 300), ("c", 200)):
        pool.replicas[name].learn(Timings(prefill_tokens=rate, prefill_s=1.0))
    assert pool.fallback_rate() == 200


async def test_wait_ready():
    pool = PoolState("p", [replica("a"), replica("b")])
    assert not await pool.wait_ready(timeout_s=0.02)
    waiting = asyncio.create_task(pool.wait_ready(2, timeout_s=2.0))
    await asyncio.sleep(0)
    pool.replicas["a"].mark_ready()
    await asyncio.sleep(0.01)
    assert not waiting.done()
    pool.replicas["b"].mark_ready()
    assert await waiting
