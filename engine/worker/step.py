"""The step loop: commands in, one step of the model, tokens out, again.

Owns nothing but the order of things; the scheduler decides, the runner computes. What must always hold: the
loop waits only when there is nothing to compute; one "tokens" message a step at most; the front hears
something every `STATS_INTERVAL_S` or after each step, whichever is later, so that silence means a step that
never ends; no command and no exception of the runner ends the loop, and whatever fails, its blocks are free
again before the next step.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Protocol

import zmq

from engine.config import EngineConfig
from engine.core.request import RequestRefused
from engine.core.scheduler import Scheduler, SchedulerConfig
from engine.core.sequence import SampledToken, StepPlan
from engine.worker import wire
from engine.worker.events import EventPublisher

log = logging.getLogger("engine.step")

STATS_INTERVAL_S = 0.25


class Runner(Protocol):
    """What the loop needs of a model."""

    vocab_size: int
    context_length: int

    def warm_up(self) -> None:
        """Touch every path once, so that the first request is not the slow one."""

    def execute(self, plan: StepPlan) -> list[SampledToken | None]:
        """Compute a plan; one entry for each of its items."""


class StepLoop:
    """Runs until told to stop; `alive` says whether its parent still is (checked a few times a second)."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        channel: zmq.Socket[bytes],
        publisher: EventPublisher,
        *,
        alive: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._channel = channel
        self._publisher = publisher
        self._alive = alive
        self._clock = clock
        self._running = True
        self._reported_at = clock()
        self._reported_pins: list[tuple[str, str]] = []
        self._poller = zmq.Poller()
        for socket in (channel, *publisher.sockets):
            self._poller.register(socket, zmq.POLLIN)

    def stop(self) -> None:
        """Leave the loop after the current step."""
        self._running = False

    def run(self) -> None:
        """Loop until `stop`, a shutdown command, or the parent's death."""
        while self._running:
            self._receive()
            worked = self._step()
            self._publisher.publish(self._scheduler.drain_events())
            self._publisher.serve_replays()
            self._report()
            if not worked and self._running:
                self._poller.poll(int(1000 * STATS_INTERVAL_S))

    def _receive(self) -> None:
        while True:
            try:
                data = self._channel.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                command = wire.decode_command(data)
            except wire.WireError as error:
                self._send(wire.Failed(error.request_id, str(error), "bad_message"))
            else:
                self._handle(command)

    def _handle(self, command: wire.Command) -> None:
        scheduler = self._scheduler
        match command:
            case wire.Add(request):
                try:
                    scheduler.add(request)
                except RequestRefused as refusal:
                    self._send(wire.Failed(request.request_id, str(refusal), refusal.code))
            case wire.Abort(request_id):
                scheduler.abort(request_id)
            case wire.PinPrefix(spec):
                try:
                    scheduler.pin(spec)
                except RequestRefused as refusal:
                    self._send(wire.Failed(None, f"pin {spec.pin_id!r}: {refusal}", refusal.code))
                else:
                    self._send_pins()
            case wire.Unpin(pin_id):
                scheduler.unpin(pin_id)
                self._send_pins()
            case wire.ClearCache():
                scheduler.clear()
                self._send_pins()
            case wire.QueryStats():
                self._send_stats(answer=True)
            case wire.Shutdown():
                self.stop()

    def _step(self) -> bool:
        """Compute one step; False when there was nothing to compute."""
        scheduler = self._scheduler
        plan = scheduler.plan()
        for request_id, refusal in scheduler.drain_refused():
            self._send(wire.Failed(request_id, str(refusal), refusal.code))
        if plan is None:
            return False
        started = time.perf_counter()
        try:
            sampled = self._runner.execute(plan)
            outputs = scheduler.commit(plan, sampled, time.perf_counter() - started)
        except Exception as error:
            log.exception("a step of %d sequences failed", len(plan.items))
            outputs = scheduler.fail(plan, f"the step failed: {type(error).__name__}: {error}")
        if outputs:
            self._send(wire.Tokens(tuple(outputs)))
        return True

    def _report(self) -> None:
        """Every STATS_INTERVAL_S: stats (a sign of life), pins if they changed, a look after the parent."""
        now = self._clock()
        if now - self._reported_at < STATS_INTERVAL_S:
            return
        self._reported_at = now
        if not self._alive():
            self.stop()
        self._send_stats(answer=False)
        if [(pin.id, pin.state) for pin in self._scheduler.pins()] != self._reported_pins:
            self._send_pins()

    def _send_stats(self, *, answer: bool) -> None:
        self._send(wire.Stats(asdict(self._scheduler.stats()), answer))

    def _send_pins(self) -> None:
        pins = self._scheduler.pins()
        self._reported_pins = [(pin.id, pin.state) for pin in pins]
        self._send(wire.Pins(tuple(asdict(pin) for pin in pins)))

    def _send(self, report: wire.Report) -> None:
        with contextlib.suppress(zmq.Again):
            self._channel.send(wire.encode_report(report), zmq.NOBLOCK)


def scheduler_config(config: EngineConfig, runner: Runner) -> SchedulerConfig:
    """The scheduler's settings for this replica: the model's limits, narrowed by the configuration."""
    context_length = min(config.context_length or runner.context_length, runner.context_length)
    return SchedulerConfig(
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        max_seqs=config.max_seqs,
        max_step_tokens=config.max_step_tokens,
        target_step_s=0.001 * config.target_step_ms,
        context_length=context_length,
        vocab_size=runner.vocab_size,
        watermark=config.watermark,
        pin_budget=config.pin_budget,
        queue_limit=config.queue_limit,
        expected_output=config.expected_output,
        epoch=int(time.time()),
    )


def describe(
    config: EngineConfig, limits: SchedulerConfig, runner: Runner, *, warm_up_s: float = 0.0
) -> dict[str, Any]:
    """The "ready" message: what the front needs to check requests, and `/engine/info` to show.

    `context_length` is the longest sequence this replica serves: the model's, or what its pool can hold.
    `warm_up_s` is how long the largest step and a few others took together, in seconds: a bound to judge
    silence by.
    """
    return {
        "context_length": limits.max_len,
        "vocab_size": runner.vocab_size,
        "eos_ids": sorted(getattr(runner, "eos_ids", ())),
        "fingerprint": str(getattr(runner, "fingerprint", "")),
        "num_blocks": limits.num_blocks,
        "block_size": limits.block_size,
        "kv_bytes_per_block": int(getattr(runner, "kv_bytes_per_block", 0)),
        "max_seqs": limits.max_seqs,
        "pin_budget_blocks": limits.pin_budget_blocks,
        "dtype": str(getattr(runner, "dtype", config.dtype)),
        "mode": config.mode,
        "threads": config.threads,
        "events": config.events,
        "events_replay": config.replay_endpoint,
        "step_pid": os.getpid(),
        "started": time.time(),
        "warm_up_s": warm_up_s,
    }
