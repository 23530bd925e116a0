"""ReplicaMonitor against a stub engine over real HTTP: readiness, load, loss, restart."""

import asyncio
import time

import aiohttp
import pytest
from aiohttp import web

from gateway.routing import PrefixIndex, Replica, ReplicaMonitor
from gateway.routing.monitor import Probing

PROBING = Probing(interval_s=0.02, waiting_s=0.02, timeout_s=0.5, failures=2)
BLOCKS = [n.to_bytes(16, "big") for n in range(10)]


class StubEngine:
    """Answers as a bundled replica does; `healthy`, `info` and `load` are what tests change."""

    def __init__(self) -> None:
        self.healthy = True
        self.health: dict = {"status": "ok"}
        self.info: dict = {"pid": 1, "max_seqs": 4}
        self.load: dict = {"free": 100, "running": 0, "waiting": 0}
        self.keys: list[str | None] = []
        self.runner: web.AppRunner | None = None
        self.port = 0

    async def start(self) -> None:
        app = web.Application()
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._health),
                web.get("/engine/info", self._info),
                web.get("/engine/cache", self._cache),
            ]
        )
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self.runner.addresses[0][1]

    async def stop(self) -> None:
        if self.runner is not None:
            await self.runner.cleanup()
            self.runner = None

    async def _health(self, request: web.Request) -> web.Response:
        self.keys.append(request.headers.get("authorization"))
        status = 200 if self.health["status"] == "ok" and self.healthy else 503
        return web.json_response(self.health, status=status)

    async def _info(self, request: web.Request) -> web.Response:
        return await self._answer(self.info)

    async def _cache(self, request: web.Request) -> web.Response:
        return await self._answer(self.load)

    def stall(self, stalled: bool) -> None:
        """The step process falls silent, or goes on."""
        self.health = {"status": "stalled" if stalled else "ok"}
        self.load = {**self.load, "stalled": stalled, "step_age_s": 30.0 if stalled else 0.0}

    async def _answer(self, body: dict) -> web.Response:
        return web.json_response(body, status=200 if self.healthy else 503)


async def until(condition, timeout_s: float = 3.0) -> None:
    for _ in range(int(timeout_s / 0.005)):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("the condition never held")


@pytest.fixture
async def engine():
    engine = StubEngine()
    await engine.start()
    yield engine
    await engine.stop()


@pytest.fixture
async def session():
    async with aiohttp.ClientSession() as session:
        yield session


class Watched:
    def __init__(self, engine: StubEngine, session: aiohttp.ClientSession, dialect: str = "bundled") -> None:
        self.index = PrefixIndex()
        self.replica = Replica(
            "r0", pool="p", base_url=f"http://127.0.0.1:{engine.port}", dialect=dialect, api_key="k"
        )
        self.monitor = ReplicaMonitor(self.replica, session, self.index, probing=PROBING)


@pytest.fixture
async def watched(engine, session):
    watched = Watched(engine, session)
    yield watched
    await watched.monitor.stop()


async def test_ready_means_that_health_says_so(engine, watched):
    engine.healthy = False
    watched.monitor.start()
    await until(lambda: "503" in watched.replica.reason)
    assert watched.replica.state == "starting"
    engine.healthy = True
    await until(lambda: watched.replica.ready)
    assert watched.replica.info["max_seqs"] == 4
    assert watched.replica.free_blocks == 100
    assert 0 < watched.replica.round_trip_s < 1
    assert engine.keys[-1] == "Bearer k"


async def test_load_is_taken_over_and_probes_leave_requests_alone(engine, watched):
    watched.monitor.start()
    await until(lambda: watched.replica.ready)
    work = watched.replica.promise(100, 5)
    engine.load = {"free": 50, "cached": 10, "pinned": 4}
    await until(lambda: watched.replica.load.get("free") == 50)
    assert watched.replica.inflight == 1
    assert watched.replica.free_blocks == 60
    watched.replica.release(work)


async def test_a_replica_that_stops_answering_is_down_and_comes_back(engine, watched):
    watched.monitor.start()
    await until(lambda: watched.replica.ready)
    watched.index.store("r0", BLOCKS)
    await engine.stop()
    await until(lambda: watched.replica.state == "down")
    assert watched.index.blocks("r0") == 0
    await engine.start()
    await until(lambda: watched.replica.ready)


async def test_one_failed_probe_does_not_take_a_replica_down(engine, watched):
    watched.monitor.start()
    await until(lambda: watched.replica.ready)
    watched.index.store("r0", BLOCKS)
    engine.healthy = False
    await until(lambda: watched.monitor._failures == 1)
    engine.healthy = True
    await asyncio.sleep(0.1)
    assert watched.replica.ready
    assert watched.index.blocks("r0") == len(BLOCKS)


async def test_another_process_behind_the_same_address_is_a_restart(engine, watched):
    watched.monitor.start()
    await until(lambda: watched.replica.ready)
    watched.index.store("r0", BLOCKS)
    epoch = watched.replica.epoch
    engine.healthy = False
    await until(lambda: watched.monitor._failures == 1)
    engine.info = {"pid": 2}
    engine.healthy = True
    await until(lambda: watched.replica.info.get("pid") == 2)
    await until(lambda: watched.replica.ready)
    assert watched.replica.epoch > epoch
    assert watched.index.blocks("r0") == 0


async def test_a_restart_between_two_probes_shows_in_the_epoch(engine, watched):
    engine.load = {"free": 9, "epoch": 100}
    watched.monitor.start()
    await until(lambda: watched.replica.ready)
    watched.index.store("r0", BLOCKS)
    engine.load = {"free": 9, "epoch": 101}  # cleared: the events say what is left
    await until(lambda: watched.replica.load["epoch"] == 101)
    assert watched.index.blocks("r0") == len(BLOCKS)
    engine.info, engine.load = {"pid": 2}, {"free": 9, "epoch": 200}
    await until(lambda: watched.replica.load.get("epoch") == 200)
    assert watched.index.blocks("r0") == 0


async def test_down_is_acted_upon_at_once(engine, watched):
    watched.monitor.start()
    await until(lambda: watched.replica.ready)
    watched.index.store("r0", BLOCKS)
    engine.healthy = False
    watched.replica.mark_down("SIGKILL")
    assert watched.index.blocks("r0") == 0


async def test_an_engine_without_events_gets_an_approximation(engine, session):
    watched = Watched(engine, session, dialect="openai")
    watched.monitor.start()
    await until(lambda: watched.replica.ready)
    assert watched.replica.approximate is not None
    watched.replica.approximate.insert(BLOCKS, now=time.monotonic())
    assert watched.index.blocks("r0") == len(BLOCKS)
    await asyncio.sleep(0.1)
    assert watched.index.blocks("r0") == len(BLOCKS)
    engine.healthy = False
    await until(lambda: watched.replica.state == "down")
    assert watched.index.blocks("r0") == 0
    await watched.monitor.stop()


async def test_events_are_followed_before_a_replica_is_ready(engine, session, tmp_path):
    """A publisher that never answers the replay delays readiness by no more than its patience."""
    engine.info = {"pid": 1, "events": f"ipc://{tmp_path}/e", "events_replay": f"ipc://{tmp_path}/r"}
    watched = Watched(engine, session)
    watched.monitor.start()
    await until(lambda: watched.replica.ready)
    assert watched.monitor.subscriber is not None
    assert watched.replica.approximate is None
    watched.monitor._on_cleared()
    assert watched.replica.epoch == 1
    watched.replica.mark_down("gone")
    assert watched.monitor.subscriber is None
    await watched.monitor.stop()


async def test_a_stalled_replica_gets_no_requests_and_keeps_its_entries(engine, watched):
    watched.monitor.start()
    replica = watched.replica
    await until(lambda: replica.ready)
    watched.index.store("r0", BLOCKS)
    work, epoch = replica.promise(100, 5), replica.epoch
    engine.stall(True)
    await until(lambda: replica.state == "down")
    assert (replica.reason, replica.inflight, replica.promised_tokens) == ("stalled", 0, 0)
    await asyncio.sleep(0.1)
    assert (replica.state, replica.reason) == ("down", "stalled")
    assert watched.index.blocks("r0") == len(BLOCKS)
    replica.release(work)
    engine.stall(False)
    await until(lambda: replica.ready)
    assert (replica.epoch, replica.inflight, replica.reason) == (epoch, 0, "")
    assert watched.index.blocks("r0") == len(BLOCKS)


async def test_a_stalled_replica_that_another_process_replaced_starts_empty(engine, watched):
    watched.monitor.start()
    replica = watched.replica
    await until(lambda: replica.ready)
    watched.index.store("r0", BLOCKS)
    epoch = replica.epoch
    engine.stall(True)
    await until(lambda: replica.stalled)
    engine.info = {"pid": 2}
    engine.stall(False)
    await until(lambda: replica.ready)
    assert replica.epoch > epoch
    assert watched.index.blocks("r0") == 0


async def test_a_stalled_replica_that_goes_down_loses_its_entries(engine, watched):
    watched.monitor.start()
    await until(lambda: watched.replica.ready)
    watched.index.store("r0", BLOCKS)
    engine.stall(True)
    await until(lambda: watched.replica.stalled)
    watched.replica.mark_down("SIGKILL")
    assert (watched.replica.reason, watched.replica.stalled) == ("SIGKILL", False)
    assert watched.index.blocks("r0") == 0
