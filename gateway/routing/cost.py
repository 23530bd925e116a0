"""Cost of sending one request to one replica, in seconds of expected time to first token (DESIGN section 4).

    cost = queue + admission wait + uncached / prefill_rate + transfer + slowdown

Pure functions over a replica's record: no state of its own, nothing random. `slowdown` is what the
request's prefill costs others: the decodes that it stretches and the requests that will queue behind it.
That share is why a replica that is just about to hold a prefix is preferred to computing the prefix twice
for the same first token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gateway.routing.replica import Replica

_EXPECTED_OUTPUT = 256  # output tokens for which blocks are looked for, at most


@dataclass(frozen=True, slots=True)
class CostWeights:
    """Weights of the slowdown term.

    follower: seconds charged per second of prefill, for the requests that come behind it.
    decode_share: the same per sequence that decodes there (chunked prefill stretches each of their tokens).
    decode_step_s: what one decoding sequence adds to this request's own first token.
    """

    follower: float = 0.25
    decode_share: float = 0.02
    decode_step_s: float = 0.002


class Candidate(NamedTuple):
    """One replica that a request could go to. A named tuple, because every decision makes one per replica.

    queue_s: expected wait before the prefill begins (promised work, slots, blocks), in seconds.
    """

    replica_id: str
    cost_s: float
    cached_tokens: int
    queue_s: float


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request asks of a replica: prompt tokens, output bound, and the block size its prefix is
    counted in.
    """

    tokens: int
    max_tokens: int
    block_size: int


def costs_of(
    replicas: Sequence[Replica],
    demand: Demand,
    cached_blocks: Mapping[str, int],
    *,
    now: float,
    fallback_rate: float,
    weights: CostWeights,
) -> tuple[Candidate, ...]:
    """One candidate per replica, in the given order.

    cached_blocks: replica id -> leading blocks of the prompt expected there. now: the replicas' clock,
    seconds. fallback_rate: tokens per second of a replica that has not reported its own.
    """
    tokens, block_size = demand.tokens, demand.block_size
    output = min(demand.max_tokens, _EXPECTED_OUTPUT)
    own, share, step_s = 1.0 + weights.follower, weights.decode_share, weights.decode_step_s
    get = cached_blocks.get
    candidates = []
    new = tuple.__new__  # this loop is the price of a decision
    for replica in replicas:
        cached = get(replica.id, 0) * block_size
        uncached = tokens - cached
        rate = replica.prefill_rate or fallback_rate
        uncached_s = uncached / rate
        queue_s = replica.queued_tokens(rate, now) / rate + replica.slot_wait_s
        free = replica.free_blocks
        if free is not None and uncached + output > free * block_size:
            queue_s += replica.block_wait_s
        decoding = replica.decoding
        cost_s = queue_s + uncached_s * (own + share * decoding) + step_s * decoding + replica.round_trip_s
        candidates.append(new(Candidate, (replica.id, cost_s, cached, queue_s)))
    return tuple(candidates)
