"""The segment cache: bounded in bytes, least recently used out first, right under threads."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from canonicalizer.segment_cache import SegmentCache


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40))), st.integers(0, 4000))
def test_size_is_true_and_bounded_after_any_use(uses: list[tuple[bool, int]], limit: int) -> None:
    cache = SegmentCache(limit)
    for is_put, number in uses:
        text = str(number) * (number + 1)
        if is_put:
            cache.put(text, bytes(number))
        else:
            assert cache.get(text) in (None, bytes(number))
        cache.check()


def test_the_least_recently_used_entry_goes_first() -> None:
    cache = SegmentCache(1400)
    for name in ("a", "b", "c", "d"):
        cache.put(name, bytes(40))
    assert cache.get("a") == bytes(40)
    cache.put("e", bytes(40))
    assert "a" in cache and "b" not in cache and "e" in cache
    assert cache.get("b") is None


def test_a_huge_text_does_not_empty_the_cache() -> None:
    cache = SegmentCache(4000)
    cache.put("small", b"1234")
    cache.put("x" * 2000, b"1234")
    assert len(cache) == 1 and "small" in cache
    cache.put("small", b"other")
    assert cache.get("small") == b"1234"
    cache.clear()
    assert len(cache) == 0 and cache.size == 0


def test_a_wrong_count_is_noticed() -> None:
    cache = SegmentCache(4000)
    cache.put("a", b"1234")
    cache.size += 1
    with pytest.raises(AssertionError, match="segment cache"):
        cache.check()


def test_threads_leave_it_consistent() -> None:
    cache = SegmentCache(20_000)

    def work(start: int) -> None:
        for number in range(2000):
            text = str((number * start) % 300)
            cache.put(text, text.encode())
            assert cache.get(text) in (None, text.encode())

    threads = [threading.Thread(target=work, args=(prime,)) for prime in (3, 5, 7, 11)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cache.check()
    assert len(cache) > 0
