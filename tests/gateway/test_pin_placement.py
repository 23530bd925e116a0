"""Placement of pins: balanced, sticky, the same everywhere."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.pin_placement import DesiredPin, place


def pin(name: str, tokens: int = 1_000, replicas=1) -> DesiredPin:
    return DesiredPin(name, "t", "p", tuple(range(tokens)), bytes(16), (), replicas=replicas)


def counts(placed: dict[str, list[str]]) -> Counter[str]:
    return Counter(id for ids in placed.values() for id in ids)


def test_eight_equal_pins_on_two_replicas_are_four_and_four():
    pins = [pin(f"tenant-{n}") for n in range(8)]
    assert counts(place(pins, ["a", "b"], {})) == {"a": 4, "b": 4}


@settings(deadline=None)
@given(st.lists(st.integers(900, 1_100), min_size=1, max_size=24), st.integers(1, 6))
def test_nearly_equal_pins_spread_evenly(sizes, replicas):
    pins = [pin(f"pin-{n}", size) for n, size in enumerate(sizes)]
    ids = [f"r{n}" for n in range(replicas)]
    placed = counts(place(pins, ids, {}))
    assert max(placed.values()) - min(placed.get(id, 0) for id in ids) <= 1 + len(sizes) // (5 * replicas)
    assert place(pins, ids, {}) == place(list(reversed(pins)), list(reversed(ids)), {})


def test_what_is_placed_stays():
    pins = [pin(f"tenant-{n}") for n in range(8)]
    before = place(pins, ["a", "b"], {})
    after = place([*pins, pin("more")], ["a", "b", "c"], before)
    assert all(after[p.id] == before[p.id] for p in pins)
    assert after[pin("more").id] == ["c"]


def test_a_lost_replicas_pins_go_elsewhere_and_only_those():
    pins = [pin(f"tenant-{n}") for n in range(8)]
    before = place(pins, ["a", "b"], {})
    after = place(pins, ["b"], before)
    assert all(ids == ["b"] for ids in after.values())
    assert place(pins, [], before) == {p.id: [] for p in pins}


def test_copies():
    pins = [pin("everywhere", replicas="all"), pin("twice", replicas=2), pin("many", replicas=9)]
    placed = place(pins, ["a", "b", "c"], {})
    assert sorted(placed[pins[0].id]) == ["a", "b", "c"]
    assert len(set(placed[pins[1].id])) == 2
    assert sorted(placed[pins[2].id]) == ["a", "b", "c"]


@pytest.mark.parametrize(
    "other", [pin("x", 999), DesiredPin("x", "t", "p", tuple(range(1_000)), b"s" * 16, ())]
)
def test_the_id_follows_the_content(other):
    assert pin("x").id == pin("x").id != other.id


def test_the_id_fits_a_path():
    assert DesiredPin("a/b ü" * 60, "t", "p", (1,), bytes(16), ()).id.count("/") == 0
    assert len(DesiredPin("a" * 500, "t", "p", (1,), bytes(16), ()).id) < 200
