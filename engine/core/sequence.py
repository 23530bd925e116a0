"""A request on its way through the engine, and the values that one step passes around.

`Sequence` is the only mutable one: the scheduler alone writes it; a runner reads `tokens` and
`block_table`. What always holds: positions [0, num_computed) have their K and V in the pool, position p in
slot p % block_size of block `block_table[p // block_size]`; a finished or waiting sequence holds no block.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from engine.core.request import Request

FinishReason = Literal["stop", "length", "abort", "error"]


class Status(enum.Enum):
    """Where a sequence is: queued (or preempted), holding a slot, or done."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class TokenLogprob(NamedTuple):
    """Log-probability of one token and its most likely alternatives, `top` = ((token id, logprob), ...)."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class SampledToken:
    """What a runner returns for one item of a plan.

    For an item with `samples` it carries the chosen token; `token_id` -1 says that its logits were not
    finite, and the request fails. `prompt_logprobs` is set only for requests that asked for them: one entry
    for each prompt position computed in this item, (None for position 0). An item of such a request that
    does not sample may return one with `token_id` -1; all others return None.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None


@dataclass(frozen=True, slots=True)
class Timings:
    """Where a request's time to its first token went inside the step process; seconds and tokens.

    `queue_s` arrival to first admission, `prefill_s` from there to the first token (preemptions included),
    `cached_tokens` prompt tokens not computed because the prefix cache held them (counted once, at first
    admission), `prefill_tokens` prompt tokens computed, recomputation after a preemption included.
    """

    queue_s: float
    prefill_s: float
    cached_tokens: int
    prefill_tokens: int


class TokenOutput(NamedTuple):
    """One new token of one request, or its end.

    `token_id` is None when the request ends without a token (error, or `max_tokens` 0). A stop token is
    passed on with `finish_reason` "stop". `first` comes with the first output only, `message` with errors.
    """

    request_id: str
    token_id: int | None
    finish_reason: FinishReason | None = None
    logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    first: Timings | None = None
    message: str | None = None


class Sequence:
    """One request's tokens, its place in the pool, and its counters.

    `tokens` prompt then output; `hashes` block-hash chain of the full blocks hashed so far; `registered`
    leading blocks of `block_table` that the prefix cache knows; `unhashed` True once its blocks can no
    longer enter the cache (after a cache clear or a hash collision); `furthest` the most positions ever
    computed. `rank` orders classes (lower goes first), `order` arrivals. `limit` is the total length at
    which the sequence ends.
    """

    __slots__ = (
        "arrival_s",
        "block_table",
        "cached_tokens",
        "finish_reason",
        "first_sampled",
        "furthest",
        "hashes",
        "limit",
        "num_computed",
        "order",
        "pin_id",
        "preemptions",
        "prefill_tokens",
        "prompt_len",
        "prompt_logprobs",
        "rank",
        "registered",
        "request",
        "started_s",
        "status",
        "tokens",
        "unhashed",
        "waits_for",
    )

    def __init__(
        self,
        request: Request,
        *,
        rank: int,
        order: int,
        arrival_s: float,
        limit: int,
        pin_id: str | None = None,
    ) -> None:
        self.request = request
        self.tokens: list[int] = list(request.token_ids)
        self.prompt_len = len(self.tokens)
        self.rank = rank
        self.order = order
        self.limit = limit
        self.pin_id = pin_id
        self.num_computed = 0
        self.block_table: list[int] = []
        self.hashes: list[bytes] = []
        self.registered = 0
        self.unhashed = False
        self.waits_for: bytes | None = None
        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None
        self.preemptions = 0
        self.cached_tokens = 0
        self.prefill_tokens = 0
        self.furthest = 0
        self.prompt_logprobs: list[TokenLogprob | None] = []
        self.arrival_s = arrival_s
        self.started_s: float | None = None
        self.first_sampled = False

    @property
    def request_id(self) -> str:
        """The id that the caller gave."""
        return self.request.request_id

    @property
    def key(self) -> tuple[int, int]:
        """Sort key: more urgent classes first, then earlier arrivals."""
        return (self.rank, self.order)

    @property
    def remaining(self) -> int:
        """Known tokens whose K and V are not computed yet; 1 while decoding."""
        return len(self.tokens) - self.num_computed

    @property
    def num_output(self) -> int:
        """Tokens sampled so far."""
        return len(self.tokens) - self.prompt_len

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id!r}, {self.status.value}, "
            f"{self.num_computed}/{len(self.tokens)} computed, {len(self.block_table)} blocks)"
        )


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """Compute positions [start, start + count) of `seq`; sample after them when `samples`.

    Unpacks in the order of its fields.
    """

    seq: Sequence
    start: int
    count: int
    samples: bool

    def __iter__(self) -> Iterator[Any]:
        return iter((self.seq, self.start, self.count, self.samples))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The work of one step: decodes first, then prefill chunks. `num_tokens` is the sum of the counts."""

    items: tuple[SequenceStep, ...]
    num_tokens: int
    num_decodes: int


def token_bytes(tokens: SequenceOf[int]) -> bytes:
    """Token ids as little-endian int32, the form that is hashed and compared."""
    data = array("i", tokens)
    if _BIG_ENDIAN:
        data.byteswap()
    return data.tobytes()


_BIG_ENDIAN = array("i", [1]).tobytes()[0] != 1
