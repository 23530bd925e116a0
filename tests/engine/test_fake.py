"""FakeRunner: answers come from the blocks, so that a wrong table is seen."""

import pytest

from engine.core.request import Request, SamplingParams
from engine.core.sequence import Sequence, SequenceStep, StepPlan
from engine.model.fake import FakeRunner


def sequence(tokens, table, **params):
    request = Request("r", tuple(tokens), b"", SamplingParams(**params))
    seq = Sequence(request, rank=0, order=0, arrival_s=0.0, limit=99)
    seq.block_table = table
    return seq


def run(runner, seq, start, count, samples=True):
    decodes = 1 if count == 1 else 0
    return runner.execute(StepPlan((SequenceStep(seq, start, count, samples),), count, decodes))[0]


def test_the_token_depends_on_all_before_it_and_not_on_where_they_lie():
    runner = FakeRunner(num_blocks=8, block_size=4)
    answer = runner.answer(range(10), 1)
    assert run(runner, sequence(range(10), [0, 1, 2]), 0, 10).token_id == answer[0]
    elsewhere = sequence(range(10), [7, 3, 5])
    assert run(runner, elsewhere, 0, 6, samples=False) is None
    assert run(runner, elsewhere, 6, 4).token_id == answer[0]


def test_a_wrong_or_short_table_is_seen():
    runner = FakeRunner(num_blocks=8, block_size=4)
    seq = sequence(range(10), [0, 1, 2])
    right = run(runner, seq, 0, 10).token_id
    seq.block_table = [1, 0, 2]
    assert run(runner, seq, 9, 1).token_id != right
    seq.block_table = [0, 1]
    with pytest.raises(IndexError):
        run(runner, seq, 9, 1)
    with pytest.raises(IndexError, match="10 tokens need 3 blocks, the table has 2"):
        runner._read([0, 1], 10)


def test_tokens_stay_in_their_range_and_some_end_the_answer():
    runner = FakeRunner(num_blocks=8, vocab_size=50, first_token=40, eos_ids=frozenset({2}), mean_output=5)
    tokens = set(runner.answer((1, 2, 3), 200))
    assert tokens <= {2, *range(40, 50)} - {40, 45}
    assert 2 in tokens


def test_steps_last_as_long_as_they_are_told_to():
    naps = []
    runner = FakeRunner(num_blocks=8, prefill_tokens_per_s=100, decode_ms=20, sleep=naps.append)
    runner.warm_up()
    seq = sequence(range(20), [0, 1])
    run(runner, seq, 0, 19, samples=False)
    run(runner, seq, 19, 1)
    assert naps == pytest.approx([0.19, 0.02])
