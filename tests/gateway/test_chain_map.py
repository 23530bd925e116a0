"""ChainMap: foreign hashes become chain entries, and every entry can be removed again."""

import hashlib

from gateway.routing.chain_map import ChainMap, OwnHashes
from gateway.routing.kv_events import Stored

SEED = b"s" * 16


def hasher(parent: bytes, tokens: tuple[int, ...]) -> list[bytes]:
    hashes = []
    for start in range(0, len(tokens), 16):
        parent = hashlib.blake2b(parent + repr(tokens[start : start + 16]).encode(), digest_size=16).digest()
        hashes.append(parent)
    return hashes


def make(capacity: int = 100) -> ChainMap:
    return ChainMap(hasher, lambda salt: SEED if salt in (None, "ours") else None, capacity=capacity)


TOKENS = tuple(range(64))
CHAIN = hasher(SEED, TOKENS)


def test_blocks_of_the_same_size():
    chain_map = make()
    assert chain_map.stored(Stored((11, 12), None, TOKENS[:32], 16)) == (CHAIN[:2], [])
    assert chain_map.stored(Stored((13,), 12, TOKENS[32:48], 16)) == (CHAIN[2:3], [])
    assert chain_map.removed([13, 99]) == CHAIN[2:3]
    assert chain_map.removed([13]) == []


def test_one_large_block_spans_several_of_ours():
    chain_map = make()
    assert chain_map.stored(Stored((b"x" * 32,), None, TOKENS, 64)) == (CHAIN, [])
    assert chain_map.removed([b"x" * 32]) == CHAIN


def test_what_cannot_be_placed_is_ignored_and_counted():
    chain_map = make()
    assert chain_map.stored(Stored((1,), 77, TOKENS[:16], 16)) == ([], [])  # unknown parent
    assert chain_map.stored(Stored((1,), None, TOKENS[:10], 10)) == ([], [])  # size of no use
    assert chain_map.stored(Stored((1,), None, TOKENS[:15], 16)) == ([], [])  # tokens missing
    assert chain_map.stored(Stored((1,), None, TOKENS[:16], 16, salt="theirs")) == ([], [])
    assert chain_map.ignored == 4
    assert chain_map.stored(Stored((1,), None, TOKENS[:16], 16, salt="ours"))[0] == CHAIN[:1]


def test_the_bound_gives_back_what_it_forgets():
    chain_map = make(capacity=2)
    chain_map.stored(Stored((1, 2), None, TOKENS[:32], 16))
    assert chain_map.stored(Stored((3,), 2, TOKENS[32:48], 16)) == (CHAIN[2:3], CHAIN[:1])
    assert len(chain_map) == 2
    chain_map.clear()
    assert len(chain_map) == 0


def test_own_hashes_pass_through():
    own = OwnHashes()
    assert own.stored(Stored((CHAIN[0], 5, b"short"), None, (), 16)) == ([CHAIN[0]], [])
    assert own.removed([CHAIN[1]]) == [CHAIN[1]]
    own.clear()
