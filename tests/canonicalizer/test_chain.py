"""The block-hash chain: its definition, its cut-off at full blocks, and growing equal to starting over."""

import struct
import time

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from canonicalizer.chain import BLOCK_SIZE, Chain, block_hashes, chain_seed

ids = st.lists(st.integers(0, 2**31 - 1), max_size=100)


def packed(values: list[int]) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def test_seed_and_hashes_follow_the_written_definition() -> None:
    seed = chain_seed("model", "tenant")
    assert seed == xxhash.xxh3_128(b"model\0tenant").digest()
    tokens = packed(list(range(40)))
    first = xxhash.xxh3_128(seed + tokens[:64]).digest()
    second = xxhash.xxh3_128(first + tokens[64:128]).digest()
    assert block_hashes(seed, tokens) == [first, second]


def test_committed_values_never_change() -> None:
    hashes = block_hashes(chain_seed("fingerprint", "all"), packed(list(range(32))))
    assert [item.hex() for item in hashes] == HASHES_OF_0_TO_31


HASHES_OF_0_TO_31 = ["fc962dd3ad2f6fbdf0423f402d586aa2", "ce46ae5e29ed7e4c6435e10a381fa0d9"]


@given(ids, ids)
def test_extending_equals_starting_over(first: list[int], second: list[int]) -> None:
    seed = chain_seed("m", "t")
    grown = Chain(seed).extend(packed(first)).extend(packed(second))
    whole = Chain(seed).extend(packed(first + second))
    assert grown == whole
    assert len(grown) == len(first) + len(second)
    assert grown.hashes == tuple(block_hashes(seed, packed(first + second)))
    assert len(grown.hashes) == len(grown) // BLOCK_SIZE


@given(ids, st.integers(1, 20))
def test_parent_continues_a_chain_at_any_block_size(values: list[int], size: int) -> None:
    seed, tokens = chain_seed("m", "t"), packed(values)
    hashes = block_hashes(seed, tokens, size)
    if hashes:
        assert block_hashes(seed, tokens[size * 4 :], size, parent=hashes[0]) == hashes[1:]


@given(ids.filter(lambda values: len(values) >= 16), st.data())
def test_one_other_token_changes_its_block_and_all_after(values: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(values) // 16 * 16 - 1))
    other = values.copy()
    other[at] ^= 1
    seed = chain_seed("m", "t")
    before, after = block_hashes(seed, packed(values)), block_hashes(seed, packed(other))
    block = at // 16
    assert before[:block] == after[:block]
    assert all(a != b for a, b in zip(before[block:], after[block:], strict=True))


def test_scope_and_fingerprint_separate_chains() -> None:
    tokens = packed(list(range(16)))
    seeds = [chain_seed(*pair) for pair in (("a", "b"), ("a", "c"), ("b", "b"), ("", "ab"))]
    assert len({block_hashes(seed, tokens)[0] for seed in seeds}) == 4


def test_extending_by_broken_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="not a multiple of 4"):
        Chain(chain_seed("m", "t")).extend(b"123")


def test_hashing_stays_within_its_time() -> None:
    """63 hashes of 1,000 tokens in 60 us, 8,192 tokens in 500 us (best of 50)."""
    seed = chain_seed("m", "t")
    for tokens, limit in ((bytes(4000), 60e-6), (bytes(4 * 8192), 500e-6)):
        best = 1.0
        for _ in range(50):
            started = time.perf_counter()
            block_hashes(seed, tokens)
            best = min(best, time.perf_counter() - started)
        assert best < limit
