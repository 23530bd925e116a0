"""PrefixIndex: lengths equal a plain model's, whatever is stored, removed and cleared in between."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.routing.index import PrefixIndex

REPLICAS = ("r0", "r1", "r2")
# Three prompts that share their first blocks, as conversations of one system prompt do.
TRUNK = [bytes([1, n]) + bytes(14) for n in range(12)]
PROMPTS = [TRUNK[:cut] + [bytes([2 + cut, n]) + bytes(14) for n in range(20 - cut)] for cut in (4, 8, 12)]

operation = st.one_of(
    st.tuples(st.just("store"), st.sampled_from(REPLICAS), st.integers(0, 2), st.integers(0, 20)),
    st.tuples(st.just("remove"), st.sampled_from(REPLICAS), st.integers(0, 2), st.integers(0, 20)),
    st.tuples(st.just("clear"), st.sampled_from(REPLICAS), st.just(0), st.just(0)),
)


def leading(held: set[bytes], prompt: list[bytes]) -> int:
    for number, block in enumerate(prompt):
        if block not in held:
            return number
    return len(prompt)


@settings(max_examples=200, deadline=None)
@given(st.lists(operation, max_size=40))
def test_lengths_equal_a_plain_model(operations):
    index = PrefixIndex(max_blocks=10_000)
    model: dict[str, set[bytes]] = {name: set() for name in REPLICAS}
    for kind, name, prompt, cut in operations:
        if kind == "store":
            index.store(name, PROMPTS[prompt][:cut])
            model[name].update(PROMPTS[prompt][:cut])
        elif kind == "remove":  # from the tail, as engines evict
            index.remove(name, PROMPTS[prompt][cut:])
            model[name].difference_update(PROMPTS[prompt][cut:])
        else:
            index.clear(name)
            model[name].clear()
        index.check()
    for prompt in PROMPTS:
        wanted = {name: n for name in REPLICAS if (n := leading(model[name], prompt))}
        assert index.longest(prompt) == wanted
    for name in REPLICAS:
        assert index.blocks(name) == len(model[name])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(REPLICAS), st.sets(st.integers(0, 15))), max_size=3))
def test_a_hole_under_sixteen_blocks_is_always_found(holdings):
    """Any subset of a short prompt: every position is probed, so that lengths are exact."""
    prompt = PROMPTS[0][:16]
    index = PrefixIndex()
    held: dict[str, set[bytes]] = {}
    for name, positions in holdings:
        blocks = [prompt[n] for n in sorted(positions)]
        index.store(name, blocks)
        held.setdefault(name, set()).update(blocks)
    index.check()
    wanted = {name: n for name, blocks in held.items() if (n := leading(blocks, prompt))}
    assert index.longest(prompt) == wanted


def test_a_hole_in_a_long_prompt_is_found_at_a_probe():
    prompt = [n.to_bytes(16, "big") for n in range(2_000)]
    index = PrefixIndex()
    index.store("r0", prompt)
    index.remove("r0", prompt[500:1_500])
    assert index.longest(prompt) == {"r0": 500}


def test_count_limits_the_length():
    index = PrefixIndex()
    index.store("r0", PROMPTS[0])
    index.store("r1", PROMPTS[0][:3])
    assert index.longest(PROMPTS[0], 5) == {"r0": 5, "r1": 3}
    assert index.longest(PROMPTS[0], 0) == {}
    assert index.longest(PROMPTS[0], 99) == {"r0": 20, "r1": 3}
    assert index.longest([]) == {}


def test_many_replicas_with_different_lengths():
    rng = random.Random(1)
    prompt = [rng.randbytes(16) for _ in range(2_000)]
    index = PrefixIndex()
    lengths = {f"r{n}": rng.randint(1, 2_000) for n in range(100)}
    for name, length in lengths.items():
        index.store(name, prompt[:length])
    assert index.longest(prompt) == lengths
    index.check()


def test_the_bound_trims_the_oldest_prompts_from_their_tails():
    index = PrefixIndex(max_blocks=25)
    index.store("r0", PROMPTS[0])
    index.store("r1", PROMPTS[2])  # shares four blocks, so 36 different ones in all
    assert len(index) == 25
    assert index.longest(PROMPTS[2]) == {"r0": 4, "r1": 20}
    kept = index.longest(PROMPTS[0])["r0"]
    assert kept == 9  # its head survived, its tail went
    index.check()


def test_clear_is_immediate_and_the_table_is_swept_later():
    index = PrefixIndex(max_blocks=400_000)
    blocks = [n.to_bytes(16, "big") for n in range(200_000)]
    index.store("r0", blocks)
    index.store("r1", blocks[:10])
    index.clear("r0")
    assert index.longest(blocks) == {"r1": 10}
    assert index.blocks("r0") == 0
    index.store("r0", blocks[:5])  # a new life, while the old one is still being swept
    index.check()
    for _ in range(400):
        index.remove("r0", [])
    assert len(index) == 10
    assert index.longest(blocks) == {"r0": 5, "r1": 10}
    index.check()


def test_bits_are_used_again():
    index = PrefixIndex()
    for life in range(300):
        index.store("r0", PROMPTS[life % 3])
        index.clear("r0")
    index.store("r0", PROMPTS[0])
    assert index._next_bit <= 4
    index.check()


def test_holds():
    index = PrefixIndex()
    index.store("r0", PROMPTS[0][:5])
    assert index.holds("r0", PROMPTS[0][:5])
    assert not index.holds("r0", PROMPTS[0][:6])
    assert not index.holds("r1", PROMPTS[0][:1])
    assert index.holds("r1", [])


def test_expected_blocks_extend_what_is_held():
    index = PrefixIndex()
    prompt = PROMPTS[0]
    index.store("r0", prompt[:4])
    expectation = index.expect("r0", prompt[4:10])
    other = index.expect("r1", prompt[:2])
    held = index.longest(prompt)
    assert held == {"r0": 4}
    assert index.longest_expected(prompt, held) == {"r0": 10, "r1": 2}
    assert index.longest_expected(prompt, held, 7) == {"r0": 7, "r1": 2}
    index.check()
    index.settle(expectation)
    index.settle(expectation)
    assert index.longest_expected(prompt, held) == {"r0": 4, "r1": 2}
    index.clear("r1")
    index.check()
    assert index.longest_expected(prompt, held) == {"r0": 4}
    index.store("r1", prompt[:1])  # the same replica in a new life: the old expectation is void
    index.settle(other)
    index.check()


def test_two_expectations_of_one_block_end_once():
    index = PrefixIndex()
    first = index.expect("r0", PROMPTS[0][:3])
    second = index.expect("r0", PROMPTS[0][:6])
    index.settle(first)
    assert index.longest_expected(PROMPTS[0], {}) == {}
    index.settle(second)
    index.check()
    assert index.longest_expected(PROMPTS[0], {}) == {}


def test_a_bound_below_one_is_refused():
    with pytest.raises(ValueError, match="max_blocks"):
        PrefixIndex(max_blocks=0)
