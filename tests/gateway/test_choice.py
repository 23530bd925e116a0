"""Routing policies one by one, on given candidates."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.routing.choice import POLICY_NAMES, make_policy, rendezvous_key, rendezvous_order
from gateway.routing.cost import Candidate

HASHES = [bytes([n]) * 16 for n in range(8)]


def candidates(*rows: tuple[float, int, float]) -> list[Candidate]:
    return [Candidate(f"r{n}", cost, cached, queue) for n, (cost, cached, queue) in enumerate(rows)]


def test_round_robin_takes_turns_whatever_comes_and_goes():
    policy = make_policy("round-robin", random.Random(1))
    three = candidates((9, 0, 9), (1, 100, 0), (5, 0, 5))
    assert [policy.pick(three, HASHES).replica_id for _ in range(4)] == ["r0", "r1", "r2", "r0"]
    assert policy.pick(three[2:], HASHES).replica_id == "r2"
    assert policy.pick(three, HASHES).replica_id == "r0"


def test_least_load_looks_at_the_queue_alone():
    policy = make_policy("least-load", random.Random(1))
    rows = candidates((0.1, 900, 0.3), (2.0, 0, 0.1), (3.0, 0, 0.1))
    assert {policy.pick(rows, HASHES).replica_id for _ in range(40)} == {"r1", "r2"}


def test_random_is_uniform():
    policy = make_policy("random", random.Random(1))
    rows = candidates((0.1, 900, 0), (2.0, 0, 1), (3.0, 0, 2))
    counts = Counter(policy.pick(rows, HASHES).replica_id for _ in range(600))
    assert min(counts.values()) > 150


def test_cost_prefers_the_warmest_of_the_nearly_equal():
    policy = make_policy("cost", random.Random(1))
    assert policy.pick(candidates((1.00, 0, 0), (1.04, 500, 0), (0.5 * 3, 900, 0)), HASHES).replica_id == "r1"


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 100), st.integers(0, 10_000), st.floats(0, 10)), min_size=1, max_size=20)
)
def test_cost_never_pays_more_than_its_tolerance(rows):
    offered = candidates(*rows)
    chosen = make_policy("cost", random.Random(1)).pick(offered, HASHES)
    lowest = min(candidate.cost_s for candidate in offered)
    assert chosen.cost_s <= lowest + max(0.005, 0.25 * lowest)


def test_rendezvous_moves_only_the_keys_of_the_replica_that_left():
    keys = [n.to_bytes(16, "big") for n in range(300)]
    before = {key: rendezvous_order(key, ["a", "b", "c"])[0] for key in keys}
    after = {key: rendezvous_order(key, ["a", "b"])[0] for key in keys}
    assert all(after[key] == home for key, home in before.items() if home != "c")
    assert 60 < Counter(before.values())["c"] < 140


def test_rendezvous_key_is_the_fourth_block_or_the_last():
    assert rendezvous_key(HASHES) == HASHES[3]
    assert rendezvous_key(HASHES[:2]) == HASHES[1]
    assert rendezvous_key([]) is None


def test_names():
    assert POLICY_NAMES == ("cost", "round-robin", "least-load", "random")
    for name in POLICY_NAMES:
        assert make_policy(name, random.Random(1)).name == name
    with pytest.raises(ValueError, match="unknown routing policy 'magic'; known: cost, round-robin"):
        make_policy("magic", random.Random(1))
