"""The step loop on a real socket, in a thread and as its own process."""

import dataclasses
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgpack
import pytest
import zmq

from canonicalizer.chain import block_hashes
from engine.config import EngineConfig, step_environment
from engine.core.pins import PinSpec
from engine.core.request import Request, SamplingParams
from engine.core.scheduler import Scheduler
from engine.core.sequence import token_bytes
from engine.model.fake import FakeRunner
from engine.worker import step_main, wire
from engine.worker.events import NoEvents, ZmqEvents
from engine.worker.step import StepLoop, describe, scheduler_config

SEED = b"s" * 16
PROMPT = tuple(range(40))


def request(name, prompt=PROMPT, max_tokens=4, **more):
    return wire.Add(Request(name, tuple(prompt), SEED, SamplingParams(max_tokens=max_tokens), **more))


class Front:
    """The other end of the socket."""

    def __init__(self, context, endpoint):
        self.socket = context.socket(zmq.PAIR)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(endpoint)

    def send(self, *commands):
        for command in commands:
            self.socket.send(wire.encode_command(command))

    def wait_for(self, kind, seconds=10.0, where=lambda report: True):
        """The next report of that kind, passing over others."""
        until = time.monotonic() + seconds
        while self.socket.poll(max(0, int(1000 * (until - time.monotonic())))):
            report = wire.decode_report(self.socket.recv())
            if isinstance(report, kind) and where(report):
                return report
        raise AssertionError(f"no {kind} within {seconds} s")

    def answers(self, *names):
        """Tokens of these requests, up to their ends; and their last outputs."""
        tokens, last = {name: [] for name in names}, {}
        while len(last) < len(names):
            for output in self.wait_for(wire.Tokens).outputs:
                if output.token_id is not None:
                    tokens[output.request_id].append(output.token_id)
                if output.finish_reason is not None:
                    last[output.request_id] = output
        return tokens, last


class Loop:
    """A step loop in a thread."""

    def __init__(self, tmp_path, *, events=False, alive=lambda: True, **settings):
        self.context = zmq.Context()
        config = EngineConfig(fake=True, runtime_dir=str(tmp_path), kv_tokens=1024, **settings)
        self.front = Front(self.context, config.command_endpoint)
        self.channel = self.context.socket(zmq.PAIR)
        self.channel.connect(config.command_endpoint)
        self.runner = step_main.load_runner(config)
        self.events, self.replay = f"ipc://{tmp_path}/ev", f"ipc://{tmp_path}/ev-replay"
        self.publisher = ZmqEvents(self.context, self.events, self.replay) if events else NoEvents()
        self.scheduler = Scheduler(scheduler_config(config, self.runner))
        self.loop = StepLoop(self.scheduler, self.runner, self.channel, self.publisher, alive=alive)
        self.thread = threading.Thread(target=self.loop.run)
        self.thread.start()

    def close(self):
        self.loop.stop()
        self.thread.join(5)
        assert not self.thread.is_alive()
        self.scheduler.check()
        self.publisher.close()
        self.channel.close(0)
        self.front.socket.close(0)
        self.context.term()


@pytest.fixture
def start(tmp_path):
    loops = []

    def started(**settings):
        loops.append(Loop(tmp_path, **settings))
        return loops[-1]

    yield started
    for loop in loops:
        loop.close()


def test_answers_come_token_by_token_and_say_how_they_ended(start):
    loop = start()
    loop.front.send(request("a"), request("b", PROMPT[:9], 3))
    tokens, last = loop.front.answers("a", "b")
    assert tokens == {"a": loop.runner.answer(PROMPT, 4), "b": loop.runner.answer(PROMPT[:9], 3)}
    assert {output.finish_reason for output in last.values()} == {"length"}
    loop.front.send(request("c"))
    loop.front.wait_for(wire.Tokens, where=lambda report: report.outputs[0].first.cached_tokens == 32)


def test_a_step_sends_one_message_for_all_its_tokens(start):
    loop = start(fake_decode_ms=5)
    loop.front.send(*(request(f"{i}", PROMPT[i:], 20) for i in range(4)))
    sizes = []
    while sum(sizes) < 80:
        sizes.append(len(loop.front.wait_for(wire.Tokens).outputs))
    assert max(sizes) == 4
    assert len(sizes) < 40


def test_malformed_commands_and_refusals_are_answered_and_the_loop_goes_on(start):
    loop = start()
    loop.front.socket.send(b"\xc1\xc1")
    assert loop.front.wait_for(wire.Failed).code == "bad_message"
    loop.front.socket.send(msgpack.packb(["add", {"request_id": "x"}]))
    assert loop.front.wait_for(wire.Failed).request_id == "x"
    loop.front.send(request("long", range(5000)))
    refused = loop.front.wait_for(wire.Failed)
    assert (refused.request_id, refused.code) == ("long", "invalid_request")
    loop.front.send(request("long", [1] * 1024))
    assert loop.front.wait_for(wire.Failed).code == "context_length_exceeded"
    loop.front.send(wire.PinPrefix(PinSpec("p", (-1,), SEED)))
    assert "pin 'p': token_ids[0] is -1" in loop.front.wait_for(wire.Failed).message
    loop.front.send(request("a"))
    assert loop.front.answers("a")[0]["a"] == loop.runner.answer(PROMPT, 4)


def test_a_runner_that_raises_fails_that_step_alone(start, caplog):
    loop = start()
    execute = loop.runner.execute
    poisoned = []

    def failing(plan):
        if any(item.seq.request_id == "poison" for item in plan.items):
            poisoned.append(len(plan.items))
            raise MemoryError("no memory for logits")
        return execute(plan)

    loop.runner.execute = failing
    with caplog.at_level(logging.CRITICAL):
        loop.front.send(request("poison"))
        _, last = loop.front.answers("poison")
    assert last["poison"].finish_reason == "error"
    assert last["poison"].message == "the step failed: MemoryError: no memory for logits"
    loop.front.send(request("a"), wire.QueryStats())
    assert loop.front.answers("a")[0]["a"] == loop.runner.answer(PROMPT, 4)
    assert poisoned == [1]
    loop.front.send(wire.QueryStats())
    assert loop.front.wait_for(wire.Stats).values["used"] == 0


def test_an_abort_stops_the_tokens_and_frees_the_blocks(start):
    loop = start(fake_decode_ms=2)
    loop.front.send(request("a", max_tokens=900))
    loop.front.wait_for(wire.Tokens)
    loop.front.send(wire.Abort("a"), wire.Abort("never seen"), wire.QueryStats())
    values = loop.front.wait_for(wire.Stats, where=lambda report: not report.values["running"]).values
    assert values["used"] == 0
    assert values["free"] + values["cached"] == values["total"] == 64


def test_pins_report_each_state_and_clear_warms_them_again(start):
    loop = start(fake_prefill_tokens_per_s=2000)
    loop.front.send(wire.PinPrefix(PinSpec("p", tuple(range(64)), SEED)))
    (pin,) = loop.front.wait_for(wire.Pins).pins
    assert (pin["id"], pin["state"], pin["blocks"]) == ("p", "warming", 4)

    def resident(report):
        return [pin["state"] for pin in report.pins] == ["resident"]

    loop.front.wait_for(wire.Pins, where=resident)
    loop.front.send(wire.ClearCache())
    assert loop.front.wait_for(wire.Pins).pins[0]["state"] == "warming"
    loop.front.wait_for(wire.Pins, where=resident)
    loop.front.send(wire.Unpin("p"))
    assert loop.front.wait_for(wire.Pins).pins == ()


def test_a_deadline_that_passes_in_the_queue_is_an_error(start):
    loop = start(max_seqs=1, fake_decode_ms=5)
    loop.front.send(request("a", max_tokens=60), request("b", PROMPT[:9], deadline_ms=20))
    refused = loop.front.wait_for(wire.Failed)
    assert (refused.request_id, refused.code) == ("b", "deadline_exceeded")


def test_stats_are_published_while_working_and_when_asked(start):
    loop = start(fake_decode_ms=10)
    loop.front.send(request("a", max_tokens=60))
    values = loop.front.wait_for(wire.Stats, where=lambda report: report.values["running"] == 1).values
    assert values["free_slots"] == 15
    loop.front.send(wire.QueryStats())
    assert loop.front.wait_for(wire.Stats, 1.0).values["epoch"] == values["epoch"] > 0


def test_an_idle_loop_sleeps_and_still_hears_commands(start):
    loop = start()
    plans = []
    plan = loop.scheduler.plan
    loop.scheduler.plan = lambda: plans.append(1) or plan()
    time.sleep(0.6)
    assert len(plans) < 6
    started = time.monotonic()
    loop.front.send(wire.QueryStats())
    loop.front.wait_for(wire.Stats)
    assert time.monotonic() - started < 0.2


def test_an_idle_loop_gives_a_sign_of_life(start):
    loop = start()
    seen = [loop.front.wait_for(wire.Stats, 2.0) for _ in range(3)]
    assert not any(report.answer for report in seen)
    loop.front.send(wire.QueryStats())
    assert loop.front.wait_for(wire.Stats, where=lambda report: report.answer).values["total"] == 64


def test_a_long_prefill_speaks_between_its_steps(start):
    loop = start(fake_prefill_tokens_per_s=200, max_step_tokens=64)
    loop.front.send(request("a", range(200), 1))
    began = time.monotonic()
    while loop.front.wait_for((wire.Stats, wire.Tokens), 1.0).__class__ is not wire.Tokens:
        assert time.monotonic() - began < 5.0


def test_cache_events_reach_a_subscriber_that_joins_by_replay(start):
    loop = start(events=True)
    loop.front.send(request("a", max_tokens=1))
    loop.front.answers("a")
    peer = loop.context.socket(zmq.DEALER)
    peer.setsockopt(zmq.RCVTIMEO, 3000)
    peer.connect(loop.replay)
    try:
        peer.send_multipart([b"", bytes(8)])
        _, number, payload = peer.recv_multipart()
    finally:
        peer.close(0)
    assert number == bytes(8)
    ((kind, hashes, parent, token_ids, size, *_),) = msgpack.unpackb(payload)[1]
    assert (kind, parent, token_ids, size) == ("BlockStored", None, list(PROMPT[:32]), 16)
    assert hashes == block_hashes(SEED, token_bytes(PROMPT))


def test_the_loop_ends_with_its_parent_or_when_told(start):
    orphan = start(alive=lambda: False)
    orphan.thread.join(3)
    assert not orphan.thread.is_alive()


def test_a_shutdown_command_ends_the_loop(start):
    loop = start()
    loop.front.send(wire.Shutdown())
    loop.thread.join(3)
    assert not loop.thread.is_alive()


def test_the_configuration_narrows_the_models_limits():
    config = EngineConfig(kv_tokens=1024, context_length=300)
    runner = FakeRunner(num_blocks=64, context_length=200)
    assert scheduler_config(config, runner).context_length == 200
    runner.context_length = 4096
    limits = scheduler_config(config, runner)
    assert limits.context_length == 300
    config = dataclasses.replace(config, context_length=None)
    info = describe(config, scheduler_config(config, runner), runner)
    assert info["context_length"] == 52 * 16 + 1
    assert (info["num_blocks"], info["block_size"], info["vocab_size"]) == (64, 16, 1024)
    assert info["fingerprint"] == runner.fingerprint


# ---- as a process


@pytest.fixture
def process(tmp_path):
    context = zmq.Context()
    config = EngineConfig(
        fake=True, runtime_dir=str(tmp_path), kv_tokens=1024, events=f"ipc://{tmp_path}/ev", fake_eos_id=2
    )
    front = Front(context, config.command_endpoint)
    command = [sys.executable, "-m", "engine.worker.step_main", config.to_json()]
    child = subprocess.Popen(command, env=step_environment(config), cwd=os.getcwd())
    yield front, child
    if child.poll() is None:
        child.kill()
    child.wait(5)
    front.socket.close(0)
    context.term()


def test_the_process_says_ready_serves_and_shuts_down(process):
    front, child = process
    info = front.wait_for(wire.Ready).info
    assert (info["step_pid"], info["eos_ids"], info["num_blocks"]) == (child.pid, [2], 64)
    front.send(request("a"))
    assert front.answers("a")[0]["a"] == FakeRunner(num_blocks=1).answer(PROMPT, 4)
    front.send(wire.Shutdown())
    assert child.wait(5) == 0


def test_the_process_leaves_on_sigterm(process):
    front, child = process
    front.wait_for(wire.Ready)
    child.send_signal(signal.SIGTERM)
    assert child.wait(5) == 0


def test_the_process_dies_with_its_parent(tmp_path):
    config = EngineConfig(fake=True, runtime_dir=str(tmp_path), kv_tokens=1024)
    context = zmq.Context()
    front = Front(context, config.command_endpoint)
    starter = "import subprocess, sys, time; subprocess.Popen(sys.argv[1:]); time.sleep(60)"
    command = [sys.executable, "-m", "engine.worker.step_main", config.to_json()]
    parent = subprocess.Popen([sys.executable, "-c", starter, *command])
    try:
        pid = front.wait_for(wire.Ready).info["step_pid"]
    finally:
        parent.kill()
        parent.wait(5)
        front.socket.close(0)
        context.term()
    status = Path(f"/proc/{pid}/status")
    for _ in range(100):
        if not status.exists() or "\nState:\tZ" in status.read_text():
            break
        time.sleep(0.05)
    else:
        raise AssertionError(f"process {pid} outlived its parent")


@pytest.mark.parametrize("arguments", [[], ["{}", "{}"], ["not json"], ['{"colour": 1}'], ['{"threads": 0}']])
def test_wrong_use_is_exit_code_2(arguments, capsys):
    assert step_main.main(arguments) == 2
    assert capsys.readouterr().err


def test_without_a_front_the_process_gives_up(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(step_main, "CONNECT_TIMEOUT_S", 0.2)
    config = EngineConfig(fake=True, runtime_dir=str(tmp_path))
    with caplog.at_level(logging.CRITICAL), pytest.raises(ConnectionError, match="no front listens"):
        step_main.serve(config, os.getppid())


def test_what_cannot_be_served_ends_the_process_with_code_1(tmp_path):
    context = zmq.Context()
    config = EngineConfig(fake=True, runtime_dir=str(tmp_path), events="ipc:///nowhere/ev")
    front = Front(context, config.command_endpoint)
    command = [sys.executable, "-m", "engine.worker.step_main", config.to_json()]
    try:
        ended = subprocess.run(command, env=step_environment(config), capture_output=True, timeout=60)
    finally:
        front.socket.close(0)
        context.term()
    assert ended.returncode == 1
    assert b"replica r0 cannot serve" in ended.stderr


def test_the_process_leaves_when_the_front_closes_its_socket(process):
    front, child = process
    front.wait_for(wire.Ready)
    front.socket.close(0)
    assert child.wait(5) == 0
