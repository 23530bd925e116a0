"""Prefix cache: hits need the right predecessor and the right tokens, and events tell all of it."""

import pytest

from canonicalizer.chain import block_hashes
from engine.core.block_pool import BlockPool, Retention
from engine.core.events import AllBlocksCleared, BlockRemoved, BlockStored
from engine.core.prefix_cache import PrefixCache
from engine.core.sequence import token_bytes

SEED, OTHER_SEED = b"s" * 16, b"t" * 16


def make(blocks: int = 8, size: int = 2) -> PrefixCache:
    return PrefixCache(BlockPool(blocks, prompt_lead=0), size)


def store(cache: PrefixCache, tokens: list[int], seed: bytes = SEED, prompt: int = 99) -> list[int]:
    """Fill and index the full blocks of `tokens`; returns the table, held once."""
    data = token_bytes(tokens)
    hashes = block_hashes(seed, data, cache.block_size)
    table = [cache.allocate() for _ in hashes]
    assert cache.insert(seed, table, hashes, data, first=0, last=len(table), prompt=prompt) == len(table)
    return table


def find(cache: PrefixCache, tokens: list[int], seed: bytes = SEED) -> list[int]:
    data = token_bytes(tokens)
    hashes = block_hashes(seed, data, cache.block_size)
    return cache.match(seed, hashes, data, len(hashes))


def free(cache: PrefixCache, table: list[int]) -> None:
    for block in reversed(table):
        cache.pool.release(block)


def test_the_longest_prefix_is_found_under_its_own_seed_only():
    cache = make()
    table = store(cache, [1, 2, 3, 4, 5, 6])
    assert find(cache, [1, 2, 3, 4, 9, 9]) == table[:2]
    assert find(cache, [1, 2, 3, 4, 5, 6, 7]) == table
    assert find(cache, [3, 4]) == []
    assert find(cache, [1, 2, 3, 4], OTHER_SEED) == []
    assert len(cache) == 3


def test_a_colliding_hash_is_a_miss_and_its_block_stays_out():
    cache = make()
    data, other = token_bytes([1, 2]), token_bytes([3, 4])
    same_hash = [b"h" * 16]
    table = [cache.allocate()]
    cache.insert(SEED, table, same_hash, data, first=0, last=1, prompt=1)
    assert cache.match(SEED, same_hash, other, 1) == []
    late = [cache.allocate()]
    assert cache.insert(SEED, late, same_hash, other, first=0, last=1, prompt=1) == 0
    assert cache.collisions == 1
    assert cache.match(SEED, same_hash, data, 1) == table
    assert cache.pool.retention(late[0]) is Retention.SCRATCH


def test_equal_tokens_under_a_colliding_seed_or_predecessor_do_not_match():
    cache = make()
    data = token_bytes([1, 2, 1, 2])
    table = [cache.allocate(), cache.allocate()]
    cache.insert(SEED, table, [b"a" * 16, b"b" * 16], data, first=0, last=2, prompt=2)
    assert cache.match(OTHER_SEED, [b"a" * 16], data, 1) == []
    assert cache.match(SEED, [b"b" * 16], data[8:], 1) == [], "the second block has another predecessor"


def test_a_second_copy_gives_way_to_the_first():
    cache = make()
    first = store(cache, [1, 2, 3, 4])
    second = store(cache, [1, 2, 3, 4, 5, 6])
    assert second[:2] == first
    assert cache.pool.refs(first[0]) == 2
    assert cache.pool.used == 3
    stored = cache.drain_events()
    assert [event.token_ids for event in stored] == [(1, 2, 3, 4), (5, 6)]
    assert stored[1].parent == stored[0].hashes[-1]


def test_successors_are_evicted_before_their_predecessors():
    cache = make(blocks=4)
    table = store(cache, [1, 2, 3, 4, 5, 6])
    free(cache, table)
    cache.allocate()
    assert cache.allocate() == table[2]
    assert find(cache, [1, 2, 3, 4, 5, 6]) == table[:2]
    assert cache.allocate() == table[1]
    assert cache.evicted_blocks == 2
    cache.check()


def test_output_is_evicted_before_the_prompt_it_follows():
    cache = make(blocks=6)
    table = store(cache, [1, 2, 3, 4, 5, 6, 7, 8], prompt=2)
    free(cache, table)
    assert [cache.pool.retention(block).name for block in table] == ["PROMPT", "PROMPT", "OUTPUT", "OUTPUT"]
    assert cache.pool.eviction_order() == table[::-1]


def test_events_replay_to_the_index():
    cache = make(blocks=4)
    table = store(cache, [1, 2, 3, 4])
    (stored,) = cache.drain_events()
    assert stored == BlockStored(
        tuple(block_hashes(SEED, token_bytes([1, 2, 3, 4]), 2)), None, (1, 2, 3, 4), 2
    )
    free(cache, table)
    for _ in range(3):
        cache.allocate()
    cache.allocate()
    assert cache.drain_events() == [BlockRemoved((stored.hashes[1], stored.hashes[0]))]
    assert cache.drain_events() == []


def test_a_removal_is_reported_before_the_block_is_stored_anew():
    cache = make(blocks=1)
    free(cache, store(cache, [1, 2]))
    store(cache, [3, 4])
    kinds = [type(event) for event in cache.drain_events()]
    assert kinds == [BlockStored, BlockRemoved, BlockStored]


def test_clear_forgets_all_and_leaves_held_blocks_held():
    cache = make()
    kept, dropped = store(cache, [1, 2]), store(cache, [3, 4])
    free(cache, dropped)
    cache.drain_events()
    cache.clear()
    assert find(cache, [1, 2]) == find(cache, [3, 4]) == []
    assert (cache.pool.used, cache.pool.cached, len(cache)) == (1, 0, 0)
    assert cache.drain_events() == [AllBlocksCleared()]
    free(cache, kept)
    assert cache.pool.free == 8
    cache.check()


def test_check_notices_an_orphan():
    cache = make()
    table = store(cache, [1, 2, 3, 4])
    cache._forget(table[0])
    with pytest.raises(AssertionError, match="lost its predecessor"):
        cache.check()
