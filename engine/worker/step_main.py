"""`python -m engine.worker.step_main CONFIG_JSON`: the step process of one replica.

Owns the process: it loads the model, opens the sockets, says "ready", and runs the step loop. What must
always hold: it ends when its parent ends, however and whenever that happens (the kernel's parent-death
signal, the parent's id, and the connection to its socket: one of them sees even a parent that died before
this process had started), even while it is stopped or stuck in a step, so that no orphan keeps memory or
cores. Torch is imported here, and only if the
configuration names a real model; its environment must have been set by the parent (`step_environment`).
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence

import zmq
from zmq.utils.monitor import recv_monitor_message

from engine.config import ConfigError, EngineConfig
from engine.core.scheduler import Scheduler
from engine.model.fake import FakeRunner
from engine.worker import wire
from engine.worker.events import EventPublisher, NoEvents, ZmqEvents
from engine.worker.step import Runner, StepLoop, describe, scheduler_config

log = logging.getLogger("engine.step")
CONNECT_TIMEOUT_S = 10.0
_PR_SET_PDEATHSIG = 1


def load_runner(config: EngineConfig) -> Runner:
    """The model that the configuration names, or its stand-in."""
    if config.fake:
        return FakeRunner(
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            vocab_size=config.fake_vocab_size,
            first_token=config.fake_first_token,
            context_length=config.fake_context_length,
            eos_ids=frozenset() if config.fake_eos_id < 0 else frozenset({config.fake_eos_id}),
            mean_output=config.fake_mean_output,
            prefill_tokens_per_s=config.fake_prefill_tokens_per_s,
            decode_ms=config.fake_decode_ms,
        )
    from engine.model.runner import Runner as TorchRunner

    return TorchRunner(
        config.model_dir,
        dtype=config.dtype,
        mode=config.mode,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        threads=config.threads,
        max_tokens_per_step=config.max_step_tokens,
    )


class Connection:
    """Whether the front's end of the command socket is there: made before `connect`, asked often."""

    def __init__(self, channel: zmq.Socket[bytes]) -> None:
        self._events = channel.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._up = False

    def wait(self, seconds: float) -> bool:
        """True once the front has answered; False when it does not within `seconds`."""
        self._events.poll(int(1000 * seconds))
        return self.is_up()

    def is_up(self) -> bool:
        """False before the front has answered, and after it has gone."""
        while self._events.poll(0):
            self._up = recv_monitor_message(self._events)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
        return self._up


def serve(config: EngineConfig, parent: int) -> None:
    """Load, announce, loop; returns after a shutdown command, SIGTERM or the parent's death.

    ConnectionError when no front listens on the command socket.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        channel = context.socket(zmq.PAIR)
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            channel.setsockopt(option, 0)
        connection = Connection(channel)
        channel.connect(config.command_endpoint)
        if not connection.wait(CONNECT_TIMEOUT_S):
            raise ConnectionError(f"no front listens on {config.command_endpoint}")
        publisher: EventPublisher = NoEvents()
        if config.events:
            publisher = ZmqEvents(context, config.events, config.replay_endpoint)
        runner = load_runner(config)
        began = time.monotonic()
        runner.warm_up()
        warm_up_s = time.monotonic() - began
        limits = scheduler_config(config, runner)

        def alive() -> bool:
            return connection.is_up() and os.getppid() == parent

        loop = StepLoop(Scheduler(limits), runner, channel, publisher, alive=alive)
        signal.signal(signal.SIGTERM, lambda *_: loop.stop())
        channel.send(wire.encode_report(wire.Ready(describe(config, limits, runner, warm_up_s=warm_up_s))))
        loop.run()
        channel.disable_monitor()
    finally:
        context.destroy(linger=200)


def die_with_parent(parent: int) -> bool:
    """Ask the kernel for SIGKILL when the parent ends; False when it has ended already.

    Not SIGTERM: a process that is stopped, or that never returns from a kernel, would not act on it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


def main(argv: Sequence[str] | None = None) -> int:
    """The process's exit code: 0 after a shutdown, 1 when the model cannot be served, 2 when used wrongly."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    parent = os.getppid()
    if len(arguments) != 1:
        print("usage: python -m engine.worker.step_main CONFIG_JSON", file=sys.stderr)
        return 2
    try:
        config = EngineConfig.from_json(arguments[0])
    except (ConfigError, TypeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not die_with_parent(parent):
        return 0
    try:
        serve(config, parent)
    except Exception as error:
        log.exception("replica %s cannot serve: %s", config.name, error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
