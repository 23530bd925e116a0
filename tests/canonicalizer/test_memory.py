"""Replay memory: bounded in bytes and age, at most four candidates a turn, and never a mix of people."""

from hypothesis import given
from hypothesis import strategies as st

from canonicalizer.memory import Entry, ReplayMemory, Stated, replayable
from canonicalizer.shapes import Kind


def entry(value: str, kind: Kind = "clock") -> Entry:
    return Entry(f"block {value}", (Stated("L", kind, value),))


def test_newest_first_and_refresh() -> None:
    memory = ReplayMemory()
    memory.store([(b"k", entry("1")), (b"k", entry("2"))], 0)
    assert [item.values[0].value for item in memory.get(b"k")] == ["2", "1"]
    memory.store([(b"k", entry("1"))], 1)
    assert [item.values[0].value for item in memory.get(b"k")] == ["1", "2"]
    memory.store([(b"k", entry(str(n))) for n in range(9)], 2)
    assert len(memory.get(b"k")) == 4
    memory.check()


def test_age_and_forget() -> None:
    memory = ReplayMemory(ttl_s=10)
    memory.store([(b"a", entry("1"))], 0)
    memory.store([(b"b", entry("1"))], 5)
    memory.store([], 11)
    assert memory.get(b"a") == () and len(memory) == 1
    memory.forget()
    assert len(memory) == 0 and memory.bytes_used == 0
    assert memory.get(b"b") == ()


def test_candidates_that_differ_in_more_than_clock_id_or_counter_replay_nothing() -> None:
    assert replayable(()) is None
    assert replayable((entry("1"), entry("2"))) == entry("1")
    assert replayable((entry("ana", "identity"), entry("bo", "identity"))) is None
    assert replayable((entry("ana", "identity"), entry("ana", "identity"))) == entry("ana", "identity")


@given(st.lists(st.tuples(st.binary(max_size=2), st.text(max_size=40), st.integers(0, 100)), max_size=30))
def test_bounds_hold(stores: list[tuple[bytes, str, int]]) -> None:
    memory = ReplayMemory(max_bytes=1500, ttl_s=40)
    now = 0
    for key, value, step in stores:
        now += step
        memory.store([(key, entry(value))], now)
        memory.check()
        assert memory.bytes_used <= memory.max_bytes


def test_check_finds_a_wrong_count() -> None:
    memory = ReplayMemory()
    memory.store([(b"k", entry("1"))], 0)
    memory._used += 1
    try:
        memory.check()
    except AssertionError as error:
        assert "counts" in str(error)
    else:
        raise AssertionError("not found")
