"""Decides what each step computes, and takes in what it sampled.

Owns the waiting queue, the running sequences and the counters; `BlockTables` owns the blocks. One step is
`plan()` -> a runner executes -> `commit()`; every call between two steps (add, abort, pin, clear) leaves
the state whole. What must always hold: `free + cached + used == total`; blocks are held by running
sequences and resident pins only; a more urgent class never waits for blocks or a slot that a less urgent
one holds, unless that one was preempted `max_preemptions` times already; the most important running
sequence always moves on.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from engine.core.admission import check_request, check_token_ids, length_limit, room_for
from engine.core.block_table import BlockTables
from engine.core.events import CacheEvent
from engine.core.output import accept_token
from engine.core.pace import Pace
from engine.core.pins import Pin, PinSpec, PinStatus, PinTable
from engine.core.request import Request, RequestRefused, SamplingParams
from engine.core.sequence import (
    FinishReason,
    SampledToken,
    Sequence,
    SequenceStep,
    Status,
    StepPlan,
    TokenOutput,
)
from engine.core.settings import SchedulerConfig, rank_of
from engine.core.stats import CacheStats, Counters
from engine.core.waiting import WaitingQueue

__all__ = [
    "SampledToken",
    "Scheduler",
    "SchedulerConfig",
    "Sequence",
    "SequenceStep",
    "StepPlan",
    "TokenOutput",
]


class Scheduler:
    """The engine's one decision maker. Not thread safe: one loop calls it."""

    def __init__(self, config: SchedulerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.pace = Pace(
            cap=config.max_step_tokens, target_s=config.target_step_s, block_size=config.block_size
        )
        self.counters = Counters()
        self._clock = clock
        self._tables = BlockTables(config.num_blocks, config.block_size)
        self._pins = PinTable(self._tables.pool, config.pin_budget_blocks)
        self._sequences: dict[str, Sequence] = {}
        self._warming: dict[str, Sequence] = {}
        self._waiting = WaitingQueue()
        self._running: list[Sequence] = []
        self._arrivals = 0
        self._epoch = config.epoch
        self._version = 0
        self._blocked: tuple[Sequence, int] | None = None
        self._refused: list[tuple[str, RequestRefused]] = []
        self._house_due_s = 0.0

    # ---- requests

    def add(self, request: Request) -> None:
        """Queue a request. RequestRefused at once for what can never run, or when the queue is full."""
        try:
            if request.request_id in self._sequences:
                raise RequestRefused("duplicate_request", f"request id {request.request_id!r} is in use")
            check_request(request, self.config)
            if len(self._waiting) >= self.config.queue_limit:
                raise RequestRefused("queue_full", f"{len(self._waiting)} requests wait already; retry later")
        except RequestRefused:
            self.counters.refused += 1
            raise
        seq = self._enqueue(request, rank_of(request.priority))
        self._sequences[request.request_id] = seq
        if request.deadline_ms is not None:
            self._waiting.set_deadline(seq, seq.arrival_s + 0.001 * request.deadline_ms)

    def abort(self, request_id: str) -> bool:
        """Forget a request, whatever it is doing, and free its blocks. False when the id is unknown."""
        seq = self._sequences.get(request_id)
        if seq is None:
            return False
        self._finish(seq, "abort")
        return True

    @property
    def has_work(self) -> bool:
        """True while `plan` may have something to compute."""
        return bool(self._running or self._waiting)

    def drain_refused(self) -> list[tuple[str, RequestRefused]]:
        """Queued requests refused since the last call (deadline passed), with the reason."""
        refused, self._refused = self._refused, []
        return refused

    # ---- one step

    def plan(self) -> StepPlan | None:
        """The next step's work, decodes first; None when nothing can be computed."""
        now = self._clock()
        if now >= self._house_due_s:
            self._keep_house(now)
        if not self.has_work:
            return None
        budget = self.pace.budget(sum(seq.remaining == 1 for seq in self._running))
        if self._waiting:
            self._admit(budget, now)
        while True:
            plan = self._pick(budget)
            if plan.items or not self._running:
                return plan if plan.items else None
            self._preempt(self._running[-1])

    def commit(
        self, plan: StepPlan, sampled: SequenceOf[SampledToken | None], step_s: float
    ) -> list[TokenOutput]:
        """Take in a finished step: `sampled` is aligned with the plan's items, `step_s` is its duration."""
        if len(sampled) != len(plan.items):
            raise ValueError(f"{len(sampled)} results for the {len(plan.items)} items of a plan")
        now = self._clock()
        self.pace.observe(plan.num_decodes, plan.num_tokens - plan.num_decodes, step_s)
        outputs = []
        for item, token in zip(plan.items, sampled, strict=True):
            seq, count = item.seq, item.count
            if seq.status is not Status.RUNNING or seq.num_computed != item.start:
                continue
            self._tables.advance(seq, count)
            self.counters.count(seq, item.start, count)
            if token is not None and token.prompt_logprobs is not None:
                seq.prompt_logprobs.extend(token.prompt_logprobs)
            if item.samples and token is not None:
                output = accept_token(seq, token, now)
                self.counters.generated_tokens += output.token_id is not None
                outputs.append(output)
                if output.finish_reason is not None:
                    self._finish(seq, output.finish_reason)
            elif seq.pin_id is not None:
                pin = self._pin_of(seq)
                pin.computed_tokens += count
                if not seq.remaining:
                    self._settle(seq, pin)
        return outputs

    def fail(self, plan: StepPlan, message: str) -> list[TokenOutput]:
        """The step raised: end its requests with an error. Pins among them warm again later."""
        outputs = []
        for seq in [item.seq for item in plan.items]:
            if seq.status is not Status.RUNNING:
                continue
            if seq.pin_id is None:
                outputs.append(TokenOutput(seq.request_id, None, "error", message=message))
            else:
                self._pin_of(seq).retry_s = self._clock() + self.config.warm_retry_s
            self._finish(seq, "error")
        return outputs

    # ---- pins and cache

    def pin(self, spec: PinSpec) -> PinStatus:
        """Create a pin, or refresh the one of that id. RequestRefused for ids outside the vocabulary or a
        prefix longer than the context; a pin that does not fit the budget is kept as `over_budget`."""
        check_token_ids(spec.token_ids, self.config)
        if len(spec.token_ids) >= self.config.context_length:
            raise RequestRefused(
                "context_length_exceeded",
                f"the pin has {len(spec.token_ids)} tokens, the context holds {self.config.context_length}",
            )
        now = self._clock()
        pin = self._pins.get(spec.pin_id)
        if pin is not None and pin.same_prefix(spec):
            pin.refresh(spec.ttl_s, now)
            return pin.status(now)
        self.unpin(spec.pin_id)
        pin = Pin(spec, self._tables.hashes_of(spec.seed, spec.token_ids), now)
        self._pins.add(pin)
        if pin.state == "warming":
            self._warm(pin)
        return pin.status(now)

    def unpin(self, pin_id: str) -> bool:
        """Release a pin; its blocks become ordinary cached ones. False when there is none of that id."""
        if self._pins.drop(pin_id) is None:
            return False
        seq = self._warming.get(pin_id)
        if seq is not None:
            self._finish(seq, "abort")
        self._version += 1
        self._house_due_s = 0.0
        return True

    def pins(self) -> list[PinStatus]:
        """Every pin, oldest first."""
        now = self._clock()
        return [pin.status(now) for pin in self._pins]

    def clear(self) -> None:
        """Empty the prefix cache. Running requests go on; pins give up their blocks and warm again."""
        for seq in list(self._warming.values()):
            self._finish(seq, "abort")
        self._pins.rewarm(self._clock())
        self._tables.clear(self._running)
        self._epoch += 1
        self._version += 1
        self._house_due_s = 0.0

    def drain_events(self) -> list[CacheEvent]:
        """Prefix-cache changes since the last call, in order."""
        return self._tables.cache.drain_events()

    def stats(self) -> CacheStats:
        """All figures at this moment."""
        return CacheStats.of(
            self._tables.cache,
            self.counters,
            self.pace,
            running=self._running,
            waiting=list(self._waiting),
            max_seqs=self.config.max_seqs,
            pinned=self._pins.pinned_blocks,
            pin_budget=self._pins.budget,
            epoch=self._epoch,
        )

    def check(self) -> None:
        """Raise AssertionError unless every invariant of the core holds."""
        self._tables.check(self._running, [pin.blocks for pin in self._pins])
        self._pins.check()
        assert len(self._running) <= self.config.max_seqs
        assert self._running == sorted(self._running, key=_key)
        assert all(seq.status is Status.RUNNING for seq in self._running)
        assert all(seq.status is Status.WAITING and not seq.block_table for seq in self._waiting)
        known = {*self._sequences.values(), *self._warming.values()}
        assert known == {*self._running, *self._waiting}, "a sequence is neither waiting nor running"

    # ---- between steps

    def _keep_house(self, now: float) -> None:
        self._house_due_s = now + _HOUSEKEEPING_S
        for pin_id in self._pins.expired(now):
            self.unpin(pin_id)
        for pin in self._pins:
            if pin.state == "warming" and pin.spec.pin_id not in self._warming and pin.retry_s <= now:
                self._warm(pin)
        for seq in self._waiting.expired(now):
            self._finish(seq, "error")
            self.counters.refused += 1
            message = f"the request waited longer than its deadline of {seq.request.deadline_ms} ms"
            self._refused.append((seq.request_id, RequestRefused("deadline_exceeded", message)))

    def _enqueue(self, request: Request, rank: int, pin_id: str | None = None) -> Sequence:
        self._arrivals += 1
        limit = length_limit(request, self.config)
        seq = Sequence(
            request, rank=rank, order=self._arrivals, arrival_s=self._clock(), limit=limit, pin_id=pin_id
        )
        self._waiting.push(seq)
        return seq

    def _warm(self, pin: Pin) -> None:
        spec = pin.spec
        token_ids = spec.token_ids[: len(pin.hashes) * self.config.block_size]
        request = Request(f"pin {spec.pin_id}", token_ids, spec.seed, SamplingParams(max_tokens=0))
        seq = self._enqueue(request, self.config.warm_rank, spec.pin_id)
        self._warming[spec.pin_id] = seq
        self._tables.attach(seq)
        if seq.remaining:
            self._tables.detach(seq)
        else:
            self._settle(seq, pin)

    def _settle(self, seq: Sequence, pin: Pin) -> None:
        if seq.registered == len(pin.hashes):
            self._pins.settle(pin, seq.block_table)
        else:
            pin.retry_s = self._clock() + self.config.warm_retry_s
        self._finish(seq, "stop")

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        if seq.status is Status.RUNNING:
            self._running.remove(seq)
        else:
            self._waiting.remove(seq)
        self._tables.detach(seq)
        seq.status = Status.FINISHED
        seq.finish_reason = reason
        self._version += 1
        if seq.pin_id is not None:
            del self._warming[seq.pin_id]
        else:
            del self._sequences[seq.request_id]
            self.counters.finished += 1

    # ---- planning

    def _admit(self, budget: int, now: float) -> None:
        """Start waiting sequences, most urgent first, while this step has prefill work to give them."""
        for seq in list(self._waiting):
            if seq.waits_for is not None and self._awaits(seq, self._tables.filled_by(seq.waits_for)):
                continue
            if (
                self._prefill_ahead(seq) >= budget
                or self._blocked == (seq, self._version)
                or not self._start(seq, now)
            ):
                return

    def _prefill_ahead(self, seq: Sequence) -> int:
        """Prompt tokens of more important running sequences that are still to compute."""
        return sum(other.remaining for other in self._running if other.remaining > 1 and other.key < seq.key)

    def _awaits(self, seq: Sequence, filler: Sequence | None) -> bool:
        """True when `filler` is computing what `seq` needs, and is not of a less urgent class."""
        return filler is not None and filler.rank <= seq.rank

    def _start(self, seq: Sequence, now: float) -> bool:
        """Give `seq` a slot and its blocks, or let it wait for one that fills its prefix; False: no room."""
        self._tables.attach(seq)
        if not seq.remaining and seq.pin_id is not None:
            self._settle(seq, self._pin_of(seq))
            return True
        filler = self._tables.filler(seq)
        if filler is not None and self._awaits(seq, filler[1]):
            self._tables.detach(seq)
            seq.waits_for = filler[0]
            return True
        victims = room_for(seq, self._running, self._tables, self.config)
        if victims is None:
            self._tables.detach(seq)
            self._blocked = (seq, self._version)
            return False
        for victim in victims:
            self._preempt(victim)
        self._tables.fill(seq)
        self._waiting.remove(seq)
        insort(self._running, seq, key=_key)
        seq.status = Status.RUNNING
        seq.waits_for = None
        if seq.started_s is None:
            seq.started_s = now
            if seq.pin_id is None:
                seq.cached_tokens = seq.num_computed
                self.counters.hit_tokens += seq.cached_tokens
                self.counters.query_tokens += seq.prompt_len
        return True

    def _pick(self, budget: int) -> StepPlan:
        """Decodes of all running sequences that get room for a token, then prefill chunks by urgency."""
        items: list[SequenceStep] = []
        prefilling: list[Sequence] = []
        for seq in tuple(self._running):
            if seq.status is not Status.RUNNING:
                continue
            if seq.remaining > 1:
                prefilling.append(seq)
            elif self._grow(seq):
                items.append(SequenceStep(seq, seq.num_computed, 1, seq.pin_id is None))
        num_decodes = len(items)
        budget = left = min(budget, self.config.max_step_tokens - num_decodes)
        for seq in prefilling:
            if seq.status is Status.RUNNING and left > 0:
                count = self._chunk(seq, left)
                samples = count == seq.remaining and seq.pin_id is None
                items.append(SequenceStep(seq, seq.num_computed, count, samples))
                left -= count
        return StepPlan(tuple(items), num_decodes + budget - left, num_decodes)

    def _chunk(self, seq: Sequence, budget: int) -> int:
        """Tokens of the next chunk: all that remain, or what fits, up to a block's end if one is in reach."""
        if seq.remaining <= budget:
            return seq.remaining
        past_boundary = (seq.num_computed + budget) % self.config.block_size
        return budget - past_boundary if past_boundary < budget else budget

    def _grow(self, seq: Sequence) -> bool:
        """Room for one more position; takes it from the least important newer sequence that is not immune."""
        while not self._tables.grow(seq):
            limit = self.config.max_preemptions
            victim = next((other for other in reversed(self._running) if other.preemptions < limit), None)
            if victim is None or victim.key <= seq.key:
                return False
            self._preempt(victim)
        return True

    def _preempt(self, seq: Sequence) -> None:
        """Back to the queue; its full blocks stay in the cache until their memory is needed."""
        self._running.remove(seq)
        self._tables.detach(seq)
        seq.status = Status.WAITING
        seq.preemptions += 1
        seq.prompt_logprobs.clear()
        self._waiting.push(seq)
        self.counters.preemptions += 1
        self._version += 1

    def _pin_of(self, seq: Sequence) -> Pin:
        pin = None if seq.pin_id is None else self._pins.get(seq.pin_id)
        assert pin is not None, f"{seq} warms no pin"
        return pin


#: How often deadlines, pin lifetimes and retries are looked at, in seconds.
_HOUSEKEEPING_S = 0.05


def _key(seq: Sequence) -> tuple[int, int]:
    return seq.key
