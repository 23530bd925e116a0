"""Supervised engines whose step or front process is frozen: out of rotation, taken back, or started anew."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import aiohttp
import pytest
import zmq.asyncio
from waiting import eventually

from canonicalizer.chain import block_hashes, chain_seed
from gateway.pin_placement import DesiredPin
from gateway.pins import PinKeeper
from gateway.routing import NoReplica, PoolState, PrefixIndex, ReplicaMonitor, RouteQuery, Router
from gateway.routing.monitor import Probing
from gateway.supervise import Backoff, BundledSpec, Supervisor

STALL_S = 4.0  # until a replica that does not serve is killed


async def until(condition) -> None:
    await eventually(condition, timeout_s=20.0)


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def engine_pin(name: str) -> DesiredPin:
    seed = chain_seed("model", name)
    tokens = tuple(range(1, 101))
    raw = b"".join(token.to_bytes(4, "little") for token in tokens)
    return DesiredPin(name, "t", "p", tokens, seed, tuple(block_hashes(seed, raw)), replicas="all")


class Engine:
    """One supervised replica with a pin, and all that watches it."""

    def __init__(self, supervisor: Supervisor, session: aiohttp.ClientSession, context) -> None:
        self.supervisor = supervisor
        (self.replica,) = supervisor.replicas
        (self.process,) = supervisor.processes
        self.pool, self.index = PoolState("p", [self.replica]), PrefixIndex()
        self.router = Router(self.index)
        self.keeper = PinKeeper({"p": self.pool}, session, self.index, interval_s=0.2, timeout_s=1.0)
        probing = Probing(interval_s=0.2, waiting_s=0.1, timeout_s=1.5, failures=2)
        self.monitor = ReplicaMonitor(self.replica, session, self.index, context=context, probing=probing)

    @property
    def step_pid(self) -> int:
        return self.replica.info["step_pid"]

    def no_request_goes_there(self) -> bool:
        with pytest.raises(NoReplica):
            self.router.choose(self.pool, RouteQuery(tokens=10))
        return True


@pytest.fixture
async def engine(tmp_path):
    arguments = ("--fake", "--kv-tokens", "2048", "--stall-s", "0.8")
    spec = BundledSpec(pool="p", model_dir="", served_name="fake", replicas=1, arguments=arguments)
    supervisor = Supervisor(spec, runtime_dir=tmp_path, backoff=Backoff(first_s=0.1), stall_s=STALL_S)
    context = zmq.asyncio.Context()
    async with aiohttp.ClientSession() as session:
        engine = Engine(supervisor, session, context)
        engine.monitor.start()
        supervisor.start()
        engine.keeper.set_desired([engine_pin("acme")])
        engine.keeper.start()
        assert await engine.keeper.wait_resident(20.0)
        yield engine
        await engine.keeper.stop()
        await engine.monitor.stop()
    await supervisor.stop(grace_s=2.0)
    context.destroy(linger=0)


async def test_a_frozen_step_process_is_left_alone_until_it_goes_on(engine):
    replica, pid, epoch = engine.replica, engine.process.pid, engine.replica.epoch
    work = replica.promise(100, 5)
    os.kill(engine.step_pid, signal.SIGSTOP)
    await until(lambda: replica.state == "down")
    assert (replica.reason, replica.inflight) == ("stalled", 0)
    assert engine.no_request_goes_there()
    await asyncio.sleep(0.5)
    assert (replica.state, replica.reason) == ("down", "stalled")
    os.kill(engine.step_pid, signal.SIGCONT)
    await until(lambda: replica.ready)
    replica.release(work)
    assert (engine.process.pid, engine.process.restarts, replica.epoch) == (pid, 0, epoch)
    assert engine.router.choose(engine.pool, RouteQuery(tokens=10)).replica is replica
    assert engine.index.holds(replica.id, engine_pin("acme").hashes)
    assert await engine.keeper.wait_resident(5.0)
    assert engine.keeper.warmup_tokens == 96, "nothing was computed again"


@pytest.mark.parametrize("frozen", ["step", "front"])
async def test_a_replica_that_stays_frozen_is_killed_and_started_again(engine, frozen):
    replica, pid, step_pid = engine.replica, engine.process.pid, engine.step_pid
    reasons: list[str] = []
    replica.listen(lambda r: reasons.append(r.reason))
    os.kill(step_pid if frozen == "step" else pid, signal.SIGSTOP)
    await until(lambda: replica.state == "down")
    assert replica.reason == ("stalled" if frozen == "step" else "TimeoutError")
    await until(lambda: engine.process.restarts == 1)
    await until(lambda: not alive(pid) and not alive(step_pid))
    assert replica.reason.startswith("killed: it did not serve for 4 s") or replica.state != "down"
    assert await engine.keeper.wait_resident(20.0)
    assert engine.process.pid != pid
    assert engine.keeper.warmup_tokens == 2 * 96
    assert engine.index.holds(replica.id, engine_pin("acme").hashes)
