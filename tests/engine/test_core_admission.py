"""Admission: what is refused at once, and how many blocks the worst moment needs."""

import itertools
import random

import pytest

from engine.core.admission import (
    Holding,
    check_request,
    expected_remaining,
    length_limit,
    peak_blocks,
    room_for,
)
from engine.core.block_table import BlockTables
from engine.core.request import Request, RequestRefused, SamplingParams
from engine.core.sequence import Sequence
from engine.core.settings import SchedulerConfig

CONFIG = SchedulerConfig(num_blocks=40, block_size=4, max_seqs=4, max_step_tokens=64, context_length=100)


def request(length: int, max_tokens: int = 8, **params: object) -> Request:
    return Request("r", tuple(range(length)), b"s" * 16, SamplingParams(max_tokens=max_tokens, **params))


def sequence(length: int, order: int, *, rank: int = 4, max_tokens: int = 8, **params: object) -> Sequence:
    asked = request(length, max_tokens, **params)
    return Sequence(asked, rank=rank, order=order, arrival_s=0.0, limit=length_limit(asked, CONFIG))


@pytest.mark.parametrize(
    ("bad", "code", "says"),
    [
        (Request("r", (), b"", SamplingParams()), "invalid_request", "no tokens"),
        (
            Request("r", (1, 2**31 - 1), b"", SamplingParams()),
            "invalid_request",
            r"token_ids\[1\] is 2147483647",
        ),
        (Request("r", (-1,), b"", SamplingParams()), "invalid_request", r"token_ids\[0\] is -1"),
        (Request("r", (1,), b"", SamplingParams(max_tokens=-1)), "invalid_request", "negative"),
        (Request("r", (1,), b"", SamplingParams(), priority=-1), "invalid_request", "negative"),
        (request(100), "context_length_exceeded", "100 tokens, but the model's context .* at most 99"),
    ],
)
def test_what_can_never_run_is_refused(bad, code, says):
    config = SchedulerConfig(num_blocks=40, block_size=4, max_seqs=4, context_length=100, vocab_size=1000)
    with pytest.raises(RequestRefused, match=says) as refusal:
        check_request(bad, config)
    assert refusal.value.code == code


def test_the_pool_may_be_the_tighter_limit():
    config = SchedulerConfig(num_blocks=10, block_size=4, max_seqs=2, context_length=100)
    assert config.capacity_blocks == 8
    assert config.max_len == 33
    check_request(request(32), config)
    with pytest.raises(RequestRefused, match="KV pool holds a prompt of at most 32"):
        check_request(request(33), config)


def test_a_config_without_room_is_an_error():
    with pytest.raises(ValueError, match="leaves no room for a prefill chunk"):
        SchedulerConfig(num_blocks=8, max_seqs=16, max_step_tokens=16)
    with pytest.raises(ValueError, match="leaves none outside the pin budget"):
        SchedulerConfig(num_blocks=0)


def test_expected_output_grows_with_what_was_emitted():
    config = SchedulerConfig(num_blocks=400, context_length=8192, expected_output=256)
    asked = request(10, max_tokens=1000)
    seq = Sequence(asked, rank=4, order=1, arrival_s=0.0, limit=1010)
    assert expected_remaining(seq, config) == 256
    seq.tokens += [0] * 200
    assert expected_remaining(seq, config) == 56
    seq.tokens += [0] * 300
    assert expected_remaining(seq, config) == 51
    seq.tokens += [0] * 495
    assert expected_remaining(seq, config) == 5


def test_expected_output_is_exact_where_the_end_is_known():
    assert expected_remaining(sequence(10, 1, max_tokens=7), CONFIG) == 7
    assert expected_remaining(sequence(10, 1, max_tokens=80, ignore_eos=True), CONFIG) == 80
    pin = Sequence(request(8, 0), rank=5, order=1, arrival_s=0.0, limit=8, pin_id="p")
    assert expected_remaining(pin, CONFIG) == 0


def peak_by_simulation(holdings: list[Holding]) -> int:
    """Grow all by one block a tick; a sequence leaves once it has grown by what it had to come."""
    peak = 0
    for tick in range(max(h.to_come for h in holdings) + 1):
        peak = max(peak, sum(h.now + tick for h in holdings if h.to_come >= tick))
    return peak


def test_the_peak_is_the_fullest_moment():
    assert peak_blocks([]) == 0
    assert peak_blocks([Holding(3, 0)]) == 3
    assert peak_blocks([Holding(5, 1), Holding(1, 10)]) == 11
    rng = random.Random(1)
    for size in range(1, 8):
        for _ in range(50):
            holdings = [Holding(rng.randrange(9), rng.randrange(9)) for _ in range(size)]
            assert peak_blocks(holdings) == peak_by_simulation(holdings)
    orders = {
        peak_blocks(order) for order in itertools.permutations([Holding(1, 4), Holding(2, 2), Holding(9, 0)])
    }
    assert len(orders) == 1


def running(tables: BlockTables, length: int, order: int, **more: object) -> Sequence:
    seq = sequence(length, order, **more)
    seq.tokens[0] = 1000 + order
    tables.attach(seq)
    tables.fill(seq)
    return seq


def test_room_counts_what_is_still_to_come():
    tables = BlockTables(40, 4)
    others = [running(tables, 40, order, max_tokens=20) for order in (1, 2)]
    assert room_for(sequence(20, 9, max_tokens=4), others, tables, CONFIG) == []
    # 2 x (10 now + 5 to come) + 7 now + 5 to come = 42 of 38
    assert room_for(sequence(28, 9, max_tokens=20), others, tables, CONFIG) is None


def test_shared_blocks_count_once():
    tables = BlockTables(40, 4)
    first = sequence(80, 1, max_tokens=4)
    tables.attach(first)
    tables.fill(first)
    tables.advance(first, 80)
    second = sequence(80, 2, max_tokens=4)
    tables.attach(second)
    assert tables.private(first) == 1
    assert room_for(second, [first], tables, CONFIG) == []
    stranger = sequence(80, 3, max_tokens=4)
    stranger.tokens[0] = 77
    tables.attach(stranger)
    assert room_for(stranger, [first], tables, CONFIG) is None


def test_victims_are_of_lower_classes_newest_first_and_not_immune():
    tables = BlockTables(40, 4)
    victims = [running(tables, 16, order, rank=6) for order in (2, 3)]
    immune = running(tables, 16, 4, rank=6)
    immune.preemptions = CONFIG.max_preemptions
    peer = running(tables, 16, 1, rank=2)
    line = [peer, *victims, immune]
    assert room_for(sequence(16, 9, rank=2), line, tables, CONFIG) == [victims[1]]
    assert room_for(sequence(16, 9, rank=6), line, tables, CONFIG) is None
    assert room_for(sequence(92, 9, rank=2, max_tokens=4), line, tables, CONFIG) == [victims[1], victims[0]]


def test_an_idle_engine_takes_whatever_passed_the_check():
    assert room_for(sequence(90, 1), [], BlockTables(40, 4), CONFIG) == []
