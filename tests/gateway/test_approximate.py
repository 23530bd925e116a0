"""ApproximateBlocks: a bounded, expiring guess that the index mirrors."""

from gateway.routing.approximate import ApproximateBlocks
from gateway.routing.index import PrefixIndex

PROMPT = [n.to_bytes(16, "big") for n in range(30)]
OTHER = [n.to_bytes(16, "big") for n in range(100, 130)]


def test_capacity_drops_the_oldest_prompt_from_its_tail():
    index = PrefixIndex()
    blocks = ApproximateBlocks("r0", index, capacity=40)
    blocks.insert(PROMPT, now=0.0)
    blocks.insert(OTHER, now=1.0)
    assert len(blocks) == index.blocks("r0") == 40
    assert index.longest(OTHER) == {"r0": 30}
    assert index.longest(PROMPT) == {"r0": 10}
    blocks.insert([n.to_bytes(16, "big") for n in range(200, 260)], now=2.0)
    assert len(blocks) == index.blocks("r0") == 40
    index.check()


def test_time_to_live_counts_from_the_last_use():
    index = PrefixIndex()
    blocks = ApproximateBlocks("r0", index, ttl_s=10.0)
    blocks.insert(PROMPT, now=0.0)
    blocks.insert(PROMPT[:5], now=8.0)
    blocks.expire(now=12.0)
    assert index.longest(PROMPT) == {"r0": 5}
    blocks.expire(now=18.0)
    assert index.longest(PROMPT) == {}
    assert len(blocks) == 0


def test_clear():
    index = PrefixIndex()
    blocks = ApproximateBlocks("r0", index)
    blocks.insert(PROMPT, now=0.0)
    blocks.clear()
    assert index.longest(PROMPT) == {}
    index.check()
