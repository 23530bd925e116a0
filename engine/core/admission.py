"""Whether a request may come in, and whether a waiting one may start now.

Pure functions of limits and block counts. What must always hold: a request that `check_request` lets in can
run to its end when nothing else runs; and the peak estimate never counts a shared block twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from engine.core.block_table import BlockTables
from engine.core.request import Request, RequestRefused
from engine.core.sequence import Sequence
from engine.core.settings import SchedulerConfig


class Holding(NamedTuple):
    """One sequence's claim on the pool, in blocks: private ones it needs now, and those still to come."""

    now: int
    to_come: int


def check_request(request: Request, config: SchedulerConfig) -> None:
    """Raise RequestRefused for what can never be served: no tokens, unknown ids, or a prompt too long."""
    length = len(request.token_ids)
    if length == 0:
        raise RequestRefused("invalid_request", "the prompt has no tokens; send at least one")
    check_token_ids(request.token_ids, config)
    if request.priority < 0 or request.params.max_tokens < 0 or request.params.min_tokens < 0:
        raise RequestRefused("invalid_request", "priority, max_tokens and min_tokens must not be negative")
    if length >= config.max_len:
        room = config.max_len - 1
        why = "the model's context" if config.max_len == config.context_length else "this replica's KV pool"
        raise RequestRefused(
            "context_length_exceeded",
            f"the prompt has {length} tokens, but {why} holds a prompt of at most {room} tokens "
            f"and one token of output; shorten the prompt",
        )


def check_token_ids(token_ids: tuple[int, ...], config: SchedulerConfig) -> None:
    """Raise RequestRefused unless every id is in the model's vocabulary."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < config.vocab_size):
        at, bad = next((i, t) for i, t in enumerate(token_ids) if not 0 <= t < config.vocab_size)
        raise RequestRefused(
            "invalid_request", f"token_ids[{at}] is {bad}, outside the vocabulary of {config.vocab_size} ids"
        )


def length_limit(request: Request, config: SchedulerConfig) -> int:
    """Total length at which a sequence of this request ends, in tokens."""
    return min(len(request.token_ids) + request.params.max_tokens, config.max_len)


def expected_remaining(seq: Sequence, config: SchedulerConfig) -> int:
    """Output tokens that admission counts on: exact with ignore_eos, else at least `expected_output` in all,
    and a tenth more than was emitted; never beyond the sequence's limit."""
    left = seq.limit - len(seq.tokens)
    if seq.pin_id is not None:
        return 0
    if seq.request.params.ignore_eos:
        return left
    emitted = seq.num_output
    return min(left, max(config.expected_output - emitted, emitted // 10 + 1))


def peak_blocks(holdings: Iterable[Holding]) -> int:
    """Private blocks needed at the worst moment from now to the last sequence's end.

    With sequences sorted by blocks still to come, descending, the pool is fullest when one of them ends: then
    the i before it, and itself, have each grown by what it had to come. So the peak is
    max over i of (to_come[i] * (i + 1) + sum of now[0..i]). Source: LightLLM's admission estimate
    (server/router/req_queue/chunked_prefill), here in blocks rounded up per sequence.
    """
    peak = held = 0
    for i, (now, to_come) in enumerate(sorted(holdings, key=lambda holding: -holding.to_come)):
        held += now
        peak = max(peak, held + to_come * (i + 1))
    return peak


def room_for(
    candidate: Sequence, running: list[Sequence], tables: BlockTables, config: SchedulerConfig
) -> list[Sequence] | None:
    """The running sequences to preempt so that `candidate` can start: none, some, or None when it must wait.

    `candidate` holds its cached prefix already; `running` is sorted by urgency. Victims are of strictly less
    urgent classes, the least urgent and newest first, and not yet preempted `max_preemptions` times.
    """
    rest = list(running)
    victims: list[Sequence] = []
    shared = tables.pool.used - sum(tables.private(seq) for seq in running)
    if _fits(candidate, rest, shared, tables, config):
        return victims
    for seq in reversed(running):
        if seq.rank <= candidate.rank:
            break
        if seq.preemptions < config.max_preemptions:
            rest.remove(seq)
            victims.append(seq)
            if _fits(candidate, rest, shared, tables, config):
                return victims
    return None


def _fits(
    candidate: Sequence, rest: list[Sequence], shared: int, tables: BlockTables, config: SchedulerConfig
) -> bool:
    if not rest:
        return True
    if len(rest) >= config.max_seqs:
        return False
    own = tables.blocks_for(len(candidate.tokens)) - len(candidate.block_table)
    needs_now = [(candidate, own), *((seq, tables.private(seq)) for seq in rest)]
    holdings = [Holding(now, tables.blocks_for(expected_remaining(seq, config))) for seq, now in needs_now]
    return shared + peak_blocks(holdings) <= tables.pool.total - config.watermark_blocks
