"""From logits to tokens: greedy, temperature, top-k, top-p, min-p, penalties, bias, and log-probabilities.

A row is sampled from its own logits, its own tokens and one uniform number that depends on (seed, position)
alone, so a request's tokens never depend on what else is in the batch. Rows that are plainly greedy share one
argmax. Order of the filters: penalties and bias, temperature, top-k, top-p over what is left, min-p.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import numpy as np
import torch
import xxhash
from torch import Tensor

from engine.core.request import SamplingParams
from engine.core.sequence import SampledToken, SequenceStep, TokenLogprob
from engine.core.sequence import Sequence as EngineSequence

#: `SampledToken.token_id` of a row that cannot be sampled: its logits were not finite.
FAILED = -1

GREEDY_BELOW = 1e-5
_FIRST_CANDIDATES = 256


def sample(logits: Tensor, items: Sequence[SequenceStep], secret: bytes) -> list[SampledToken]:
    """One token for each row of `logits` [n, vocab] fp32, row i belonging to `items[i]`.

    `secret` seeds requests that gave no seed. A row without a finite maximum yields `token_id` FAILED.
    """
    best, ids = logits.max(dim=-1)
    finite = torch.isfinite(best).tolist()
    greedy = ids.tolist()
    sampled: list[SampledToken] = []
    for row, item in enumerate(items):
        if not finite[row]:
            sampled.append(SampledToken(FAILED))
        elif is_plain_greedy(item.seq):
            sampled.append(SampledToken(greedy[row]))
        else:
            sampled.append(_sample_row(logits[row], item.seq, secret))
    return sampled


def is_plain_greedy(seq: EngineSequence) -> bool:
    """Whether the sequence's next token is the argmax of its raw logits, and nothing else is asked for."""
    params = seq.request.params
    return (
        params.temperature < GREEDY_BELOW
        and params.logprobs is None
        and not params.logit_bias
        and params.repetition_penalty == 1.0
        and params.presence_penalty == 0.0
        and params.frequency_penalty == 0.0
        and seq.num_output >= params.min_tokens
    )


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that picks the token at `position` of a request with `seed`; 53 random bits."""
    counter = struct.pack("<QQ", seed & 0xFFFF_FFFF_FFFF_FFFF, position)
    return (xxhash.xxh3_64_intdigest(counter) >> 11) * 2.0**-53


def request_seed(seq: EngineSequence, secret: bytes) -> int:
    """The request's seed, or one derived from `secret` and its id."""
    given = seq.request.params.seed
    return given if given is not None else xxhash.xxh3_64_intdigest(secret + seq.request.request_id.encode())


def adjusted(logits: Tensor, seq: EngineSequence) -> Tensor:
    """Logits [vocab] after penalties, bias and the ban on stop tokens before `min_tokens`; a new tensor.

    Repetition (Keskar et al. 2019) counts prompt and output, presence and frequency count the output.
    """
    params = seq.request.params
    scores = logits.clone()
    vocab = scores.shape[0]
    if params.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(np.array(seq.tokens, dtype=np.int64)))
        old = scores[seen]
        scores[seen] = torch.where(old > 0, old / params.repetition_penalty, old * params.repetition_penalty)
    if seq.num_output and (params.presence_penalty or params.frequency_penalty):
        output = np.array(seq.tokens[seq.prompt_len :], dtype=np.int64)
        ids, counts = np.unique(output, return_counts=True)
        penalty = params.presence_penalty + params.frequency_penalty * torch.from_numpy(counts).float()
        scores[torch.from_numpy(ids)] -= penalty
    for token_id, bias in params.logit_bias:
        if 0 <= token_id < vocab:
            scores[token_id] += bias
    if seq.num_output < params.min_tokens:
        banned = [token_id for token_id in params.stop_token_ids if 0 <= token_id < vocab]
        scores[banned] = -math.inf
    return scores


def draw(scores: Tensor, params: SamplingParams, chance: float) -> int:
    """Token id drawn from `scores` [vocab] by inverting the cumulative distribution at `chance` in [0, 1)."""
    scores = (scores - scores.max()) / params.temperature
    vocab = scores.shape[0]
    if 0 < params.top_k < vocab:
        values, ids = scores.topk(params.top_k)
    elif params.top_p < 1.0:
        values, ids = _nucleus(scores, params.top_p)
    else:
        values, ids = scores, None
    weights = values.double().exp_()
    if ids is not None and params.top_p < 1.0:
        total = weights.sum() if 0 < params.top_k < vocab else scores.double().exp_().sum()
        before = weights.cumsum(0).sub_(weights)
        weights = torch.where(before < params.top_p * total, weights, 0.0)
        weights[0] = 1.0 if params.top_p <= 0.0 else weights[0]
    if params.min_p > 0.0:
        weights = torch.where(weights >= params.min_p, weights, 0.0)
    cumulative = weights.cumsum(0)
    index = int(torch.searchsorted(cumulative, chance * cumulative[-1], right=True))
    if index >= len(cumulative):
        index = int(weights.nonzero()[-1])
    return index if ids is None else int(ids[index])


def token_logprob(logprobs: Tensor, token_id: int, alternatives: int) -> TokenLogprob:
    """Entry of `token_id` in `logprobs` [vocab], with the `alternatives` most likely tokens."""
    top: tuple[tuple[int, float], ...] = ()
    if alternatives:
        values, ids = logprobs.topk(min(alternatives, logprobs.shape[0]))
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(float(logprobs[token_id]), top)


def _sample_row(logits: Tensor, seq: EngineSequence, secret: bytes) -> SampledToken:
    params = seq.request.params
    scores = adjusted(logits, seq)
    best, best_id = scores.max(dim=0)
    if not math.isfinite(best):
        return SampledToken(FAILED)
    if params.temperature < GREEDY_BELOW:
        token_id = int(best_id)
    else:
        token_id = draw(scores, params, uniform(request_seed(seq, secret), len(seq.tokens)))
    if params.logprobs is None:
        return SampledToken(token_id)
    entry = token_logprob(logits.log_softmax(-1), token_id, params.logprobs)
    return SampledToken(token_id, entry.logprob, entry.top)


def _nucleus(scores: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Enough of the highest `scores` (descending, with ids) to hold `top_p` of the probability."""
    wanted = top_p * scores.double().exp().sum()
    count = _FIRST_CANDIDATES
    while count < scores.shape[0]:
        values, ids = scores.topk(count)
        if values.double().exp().sum() >= wanted:
            return values, ids
        count *= 8
    values, ids = scores.sort(descending=True, stable=True)
    return values, ids
