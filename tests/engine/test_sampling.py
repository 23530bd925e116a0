"""Sampling from known logits: supports of each filter, frequencies, penalties, independence of the batch."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.core.request import Request, SamplingParams
from engine.core.sequence import SampledToken, Sequence, SequenceStep
from engine.model.sampling import FAILED, adjusted, draw, sample, uniform

SECRET = b"secret"


def step(
    prompt: tuple[int, ...] = (1, 2), output: tuple[int, ...] = (), name: str = "r", **params: Any
) -> SequenceStep:
    request = Request(name, prompt, b"\0" * 16, SamplingParams(**{"temperature": 0.0, **params}))
    seq = Sequence(request, rank=0, order=0, arrival_s=0.0, limit=100)
    seq.tokens.extend(output)
    return SequenceStep(seq, len(seq.tokens) - 1, 1, True)


def drawn(scores: Tensor, count: int = 400, **params: Any) -> Counter[int]:
    """Tokens drawn at evenly spread chances, so that frequencies are the probabilities to 1 / count."""
    settings = SamplingParams(**params)
    return Counter(draw(scores, settings, (i + 0.5) / count) for i in range(count))


def test_uniform_depends_on_seed_and_position_alone() -> None:
    values = [uniform(seed, position) for seed in range(40) for position in range(40)]
    assert len(set(values)) == 1600
    assert all(0.0 <= value < 1.0 for value in values)
    assert abs(sum(values) / 1600 - 0.5) < 0.03
    assert uniform(3, 4) == uniform(3, 4)
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)


def test_greedy_is_the_argmax_of_each_row() -> None:
    logits = torch.randn(5, 300)
    tokens = sample(logits, [step() for _ in range(5)], SECRET)
    assert [token.token_id for token in tokens] == logits.argmax(-1).tolist()
    assert all(token.logprob is None and token.top == () for token in tokens)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_fails_alone(bad: float) -> None:
    logits = torch.zeros(3, 10)
    logits[:, 4] = 1.0
    logits[1, 7] = bad
    tokens = sample(logits, [step(), step(), step(temperature=1.0, top_k=1)], SECRET)
    assert [token.token_id for token in tokens] == [4, FAILED, 4]
    logits[1] = -math.inf
    assert sample(logits[1:2], [step()], SECRET) == [SampledToken(FAILED)]


def test_a_bias_that_leaves_nothing_finite_fails() -> None:
    assert sample(torch.zeros(1, 3), [step(logit_bias=((1, math.inf),))], SECRET)[0].token_id == FAILED


def test_temperature_gives_softmax_frequencies() -> None:
    scores = torch.tensor([0.0, 1.0, 2.0, -1.0])
    for temperature in (0.5, 1.0, 2.0):
        counts = drawn(scores, temperature=temperature)
        for token, share in enumerate(torch.softmax(scores / temperature, 0).tolist()):
            assert abs(counts[token] / 400 - share) <= 0.006


def test_top_k_keeps_k_tokens_in_proportion() -> None:
    scores = torch.log(torch.tensor([0.1, 0.4, 0.2, 0.3]))
    counts = drawn(scores, temperature=1.0, top_k=2)
    assert set(counts) == {1, 3}
    assert abs(counts[1] / 400 - 4 / 7) < 0.006
    assert set(drawn(scores, temperature=1.0, top_k=9)) == {0, 1, 2, 3}


def test_top_p_keeps_the_token_that_crosses_it() -> None:
    scores = torch.log(torch.tensor([0.1, 0.4, 0.2, 0.3]))
    assert set(drawn(scores, temperature=1.0, top_p=0.39)) == {1}
    assert set(drawn(scores, temperature=1.0, top_p=0.41)) == {1, 3}
    assert set(drawn(scores, temperature=1.0, top_p=0.95)) == {0, 1, 2, 3}
    assert set(drawn(scores, temperature=1.0, top_p=0.0)) == {1}
    # over what top-k left: of 4/7 and 3/7, the first alone holds half
    assert set(drawn(scores, temperature=1.0, top_k=2, top_p=0.5)) == {1}


def test_top_p_wider_than_the_first_candidates() -> None:
    flat = torch.zeros(800)
    assert len(drawn(flat, count=800, temperature=1.0, top_p=0.5)) == pytest.approx(400, abs=2)
    assert len(drawn(flat, count=800, temperature=1.0, top_p=0.99)) == pytest.approx(792, abs=2)


def test_min_p_is_relative_to_the_best() -> None:
    scores = torch.log(torch.tensor([0.1, 0.4, 0.2, 0.3]))
    assert set(drawn(scores, temperature=1.0, min_p=0.6)) == {1, 3}
    assert set(drawn(scores, temperature=1.0, min_p=1.0)) == {1}
    assert set(drawn(scores, temperature=1.0, top_p=0.99, min_p=0.3)) == {1, 2, 3}


def test_extreme_chances_and_temperatures_stay_inside() -> None:
    scores = torch.full((1000,), -40.0)
    scores[17] = 40.0
    for chance in (0.0, 0.5, 1.0 - 2**-53):
        assert draw(scores, SamplingParams(temperature=1e-4), chance) == 17
        assert 0 <= draw(scores, SamplingParams(temperature=1e4), chance) < 1000


def test_draws_do_not_depend_on_the_batch() -> None:
    logits = torch.randn(6, 500)
    steps = [step(temperature=1.0, top_p=0.9 if i % 2 else 1.0, seed=i, name=f"r{i}") for i in range(6)]
    together = sample(logits, steps, SECRET)
    alone = [sample(logits[i : i + 1], [steps[i]], SECRET)[0] for i in range(6)]
    reordered = sample(logits.flip(0), steps[::-1], SECRET)[::-1]
    assert together == alone == reordered


def test_seeds_and_positions_change_the_draw() -> None:
    logits = torch.zeros(1, 5000)

    def token(**params: Any) -> int:
        return sample(logits, [step(temperature=1.0, **params)], SECRET)[0].token_id

    assert token(seed=1) == token(seed=1, name="other")
    assert len({token(seed=seed) for seed in range(20)}) > 15
    assert len({token(seed=1, output=(3,) * n) for n in range(20)}) > 15
    assert token(name="a") != token(name="b")  # without a seed each request has its own


def test_penalties() -> None:
    logits = torch.tensor([2.0, -2.0, 1.0, 0.5])
    item = step(prompt=(0, 1), output=(2, 2, 3), repetition_penalty=2.0)
    assert adjusted(logits, item.seq).tolist() == [1.0, -4.0, 0.5, 0.25]
    item = step(prompt=(0, 1), output=(2, 2, 3), presence_penalty=0.5, frequency_penalty=0.25)
    assert adjusted(logits, item.seq).tolist() == [2.0, -2.0, 0.0, -0.25]
    assert logits.tolist() == [2.0, -2.0, 1.0, 0.5]
    assert sample(logits[None], [step(prompt=(0,), repetition_penalty=4.0)], SECRET)[0].token_id == 2


def test_logit_bias_and_min_tokens() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    assert sample(logits, [step(logit_bias=((3, 100.0), (99, 1.0)))], SECRET)[0].token_id == 3
    waiting = {"min_tokens": 2, "stop_token_ids": frozenset({0, 77})}
    assert sample(logits, [step(output=(1,), **waiting)], SECRET)[0].token_id == 1
    assert sample(logits, [step(output=(1, 1), **waiting)], SECRET)[0].token_id == 0


def test_logprobs_are_those_of_the_raw_distribution() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    expected = logits[0].log_softmax(-1)
    item = step(logprobs=2, logit_bias=((0, 50.0),))
    token = sample(logits, [item], SECRET)[0]
    assert token.token_id == 0
    assert token.logprob == pytest.approx(float(expected[0]))
    assert [token_id for token_id, _ in token.top] == [1, 2]
    assert token.top[0][1] == pytest.approx(float(expected[1]))
    assert sample(logits, [step(logprobs=0)], SECRET)[0].top == ()
    assert len(sample(logits, [step(logprobs=20)], SECRET)[0].top) == 3
