"""PinKeeper: against a stub that holds pins, and against the engine's fake model."""

import asyncio
import os
import signal
import time

import aiohttp
import pytest
import zmq.asyncio
from aiohttp import web
from waiting import eventually as until

from canonicalizer.chain import block_hashes, chain_seed
from gateway.pin_placement import DesiredPin
from gateway.pins import PinKeeper
from gateway.routing import PoolState, PrefixIndex, Replica, ReplicaMonitor, RouteQuery, Router
from gateway.routing.monitor import Probing
from gateway.supervise import Backoff, BundledSpec, Supervisor


def pin(name: str, *, replicas=1, ttl_s: float | None = None, tokens: int = 1_000) -> DesiredPin:
    hashes = tuple(name.encode().ljust(12, b"-")[:12] + n.to_bytes(4, "big") for n in range(tokens // 16))
    seed = name.encode().ljust(16, b"-")
    return DesiredPin(name, "acme", "p", tuple(range(1, tokens + 1)), seed, hashes, ttl_s, replicas)


class StubEngine:
    """Keeps pins in memory: warming until the next GET, then resident (or `verdict`) and in the index."""

    def __init__(self, index: PrefixIndex, name: str) -> None:
        self.index = index
        self.name = name
        self.pins: dict[str, dict] = {}
        self.posts: list[dict] = []
        self.deletes: list[str] = []
        self.verdict = "resident"
        self.fail, self.refusal = False, ""
        self.blocks: dict[str, tuple[bytes, ...]] = {}
        self.replica = Replica(name, pool="p", base_url="http://x")

    async def start(self) -> None:
        app = web.Application()
        app.add_routes(
            [
                web.get("/engine/pins", self._list),
                web.post("/engine/pins", self._post),
                web.delete("/engine/pins/{id}", self._delete),
            ]
        )
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.replica.base_url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def _list(self, request: web.Request) -> web.Response:
        if self.fail:
            raise web.HTTPInternalServerError
        for id, status in self.pins.items():
            if status["state"] == "warming":
                status["state"] = self.verdict
                if self.verdict == "resident":
                    status["computed_tokens"] = status["tokens"]
                    self.index.store(self.name, self.blocks.get(id, ()))
        return web.json_response({"pins": list(self.pins.values())})

    async def _post(self, request: web.Request) -> web.Response:
        if self.fail:
            raise web.HTTPInternalServerError
        if self.refusal:
            return web.json_response({"error": {"message": self.refusal}}, status=400)
        body = await request.json()
        self.posts.append(body)
        tokens = len(body["token_ids"])
        fresh = {"id": body["id"], "state": "warming", "tokens": tokens, "computed_tokens": 0}
        return web.json_response(self.pins.setdefault(body["id"], fresh))

    async def _delete(self, request: web.Request) -> web.Response:
        id = request.match_info["id"]
        self.deletes.append(id)
        if self.pins.pop(id, None) is None:
            raise web.HTTPNotFound
        return web.json_response({})

    def restart(self) -> None:
        """Everything is lost, then it serves again."""
        self.replica.mark_down("SIGKILL")
        self.index.clear(self.name)
        self.pins.clear()
        self.replica.mark_starting()


class Fleet:
    def __init__(self, session: aiohttp.ClientSession, engines: list[StubEngine], index: PrefixIndex) -> None:
        self.engines = engines
        self.index = index
        self.pool = PoolState("p", [engine.replica for engine in engines])
        self.keeper = PinKeeper(
            {"p": self.pool}, session, index, interval_s=0.05, poll_s=0.01, grace_s=0.3, timeout_s=2.0
        )

    def want(self, *pins: DesiredPin) -> None:
        for engine in self.engines:
            engine.blocks.update({pin.id: pin.hashes for pin in pins})
        self.keeper.set_desired(pins)

    @property
    def states(self) -> dict[tuple[str, str], str]:
        return {(row.pin, row.replica): row.state for row in self.keeper.states()}


@pytest.fixture
async def fleet():
    index = PrefixIndex()
    engines = [StubEngine(index, f"r{n}") for n in range(2)]
    async with aiohttp.ClientSession() as session:
        for engine in engines:
            await engine.start()
        fleet = Fleet(session, engines, index)
        yield fleet
        await fleet.keeper.stop()
        for engine in engines:
            await engine.runner.cleanup()


async def test_pins_are_placed_evenly_warmed_and_counted(fleet):
    fleet.want(*(pin(f"tenant-{n}") for n in range(8)))
    fleet.keeper.start()
    assert set(fleet.states.values()) == {"pending"}
    assert not await fleet.keeper.wait_resident(0.1)
    for engine in fleet.engines:
        engine.replica.mark_ready()
    assert await fleet.keeper.wait_resident(5.0)
    assert [len(engine.pins) for engine in fleet.engines] == [4, 4]
    assert set(fleet.states.values()) == {"resident"}
    assert fleet.keeper.warmup_tokens == 8_000
    assert 0 < fleet.keeper.warmup_s < 5
    post = fleet.engines[0].posts[0]
    assert sorted(post) == ["id", "seed", "tenant", "token_ids", "ttl_s"]
    assert (post["tenant"], len(post["token_ids"]), len(post["seed"])) == ("acme", 1_000, 32)


async def test_a_request_for_a_pinned_prefix_is_routed_to_its_holder(fleet):
    pins = [pin(f"tenant-{n}") for n in range(8)]
    fleet.want(*pins)
    fleet.keeper.start()
    for engine in fleet.engines:
        engine.replica.mark_ready()
    assert await fleet.keeper.wait_resident(5.0)
    router = Router(fleet.index)
    for wanted in pins:
        decision = router.choose(fleet.pool, RouteQuery(tokens=1_040, hashes=wanted.hashes))
        assert [decision.replica.id] == fleet.keeper.holders_of(wanted.name)
        assert decision.cached_tokens == 992


async def test_nothing_is_posted_again_while_all_is_well(fleet):
    fleet.want(pin("a"))
    fleet.keeper.start()
    for engine in fleet.engines:
        engine.replica.mark_ready()
    assert await fleet.keeper.wait_resident(5.0)
    await asyncio.sleep(0.3)
    assert sum(len(engine.posts) for engine in fleet.engines) == 1


async def test_a_restarted_replica_is_warmed_again(fleet):
    fleet.want(pin("a", replicas="all"))
    fleet.keeper.start()
    for engine in fleet.engines:
        engine.replica.mark_ready()
    assert await fleet.keeper.wait_resident(5.0)
    engine = fleet.engines[0]
    engine.restart()
    assert fleet.states == {("a", "r0"): "pending", ("a", "r1"): "resident"}
    engine.replica.mark_ready()
    assert await fleet.keeper.wait_resident(5.0)
    assert [len(engine.posts) for engine in fleet.engines] == [2, 1]
    assert fleet.keeper.warmup_tokens == 3_000


async def test_a_cleared_cache_is_warmed_again(fleet):
    fleet.want(pin("a"))
    fleet.keeper.start()
    for engine in fleet.engines:
        engine.replica.mark_ready()
    assert await fleet.keeper.wait_resident(5.0)
    (holder,) = [engine for engine in fleet.engines if engine.pins]
    holder.pins.clear()
    fleet.index.clear(holder.name)
    holder.replica.mark_cache_lost()
    assert "pending" in fleet.states.values()
    assert await fleet.keeper.wait_resident(5.0)


async def test_a_pin_that_vanished_is_noticed(fleet):
    fleet.want(pin("a"))
    fleet.keeper.start()
    for engine in fleet.engines:
        engine.replica.mark_ready()
    assert await fleet.keeper.wait_resident(5.0)
    (holder,) = [engine for engine in fleet.engines if engine.pins]
    holder.pins.clear()
    await until(lambda: len(holder.posts) == 2)
    assert await fleet.keeper.wait_resident(5.0)


async def test_a_holder_that_stays_down_loses_its_pins(fleet):
    fleet.want(pin("a"), pin("b"))
    fleet.keeper.start()
    for engine in fleet.engines:
        engine.replica.mark_ready()
    assert await fleet.keeper.wait_resident(5.0)
    fleet.engines[0].restart()
    fleet.engines[0].replica.mark_down("no weights")
    assert sorted(fleet.states.values()) == ["pending", "resident"]
    await until(lambda: set(fleet.states.values()) == {"resident"})
    assert len(fleet.engines[1].pins) == 2
    fleet.engines[0].replica.mark_ready()  # back: what moved stays where it is warm
    await asyncio.sleep(0.2)
    assert len(fleet.engines[1].pins) == 2


async def test_pins_that_are_no_longer_wanted_are_released(fleet):
    first, second = pin("a"), pin("b")
    fleet.want(first, second)
    fleet.keeper.start()
    for engine in fleet.engines:
        engine.replica.mark_ready()
    assert await fleet.keeper.wait_resident(5.0)
    changed = pin("b", tokens=1_008)  # new text under an old name
    fleet.want(changed)
    assert await fleet.keeper.wait_resident(5.0)
    held = {id for engine in fleet.engines for id in engine.pins}
    await until(lambda: {id for engine in fleet.engines for id in engine.pins} == {changed.id})
    assert {id for engine in fleet.engines for id in engine.deletes} == {first.id, second.id}
    assert held >= {changed.id}
    fleet.want()
    await until(lambda: not any(engine.pins for engine in fleet.engines))
    assert fleet.keeper.states() == []
    assert await fleet.keeper.wait_resident(0.5)


async def test_over_budget_is_said_and_not_waited_for(fleet):
    for engine in fleet.engines:
        engine.verdict = "over_budget"
        engine.replica.mark_ready()
    fleet.want(pin("a"))
    fleet.keeper.start()
    began = time.monotonic()
    assert not await fleet.keeper.wait_resident(5.0)
    assert time.monotonic() - began < 2.0
    assert list(fleet.states.values()) == ["over_budget"]


async def test_an_error_is_shown_and_tried_again(fleet):
    for engine in fleet.engines:
        engine.replica.mark_ready()
    fleet.want(pin("a"))
    fleet.keeper.start()
    assert await fleet.keeper.wait_resident(5.0)
    for engine in fleet.engines:
        engine.fail = True
        engine.replica.mark_cache_lost()
    await until(lambda: [row.state for row in fleet.keeper.states()] == ["error"])
    assert "500" in fleet.keeper.states()[0].reason
    for engine in fleet.engines:
        engine.fail = False
    assert await fleet.keeper.wait_resident(5.0)


async def test_a_refusal_is_shown_in_the_engines_words(fleet):
    words = "The pin is too long. " * 30
    for engine in fleet.engines:
        engine.refusal = words
        engine.replica.mark_ready()
    fleet.want(pin("a"))
    fleet.keeper.start()
    await until(lambda: [row.state for row in fleet.keeper.states()] == ["error"])
    assert fleet.keeper.states()[0].reason == words


async def test_pins_of_a_stalled_replica_are_checked_when_it_goes_on(fleet):
    for engine in fleet.engines:
        engine.replica.mark_ready()
    fleet.want(pin("a", replicas="all"))
    fleet.keeper.start()
    assert await fleet.keeper.wait_resident(5.0)
    kept, lost = fleet.engines
    for engine in fleet.engines:
        engine.replica.mark_stalled()
    assert {(row.state, row.reason) for row in fleet.keeper.states()} == {("pending", "stalled")}
    lost.pins.clear()
    for engine in fleet.engines:
        engine.replica.mark_ready()
    await until(lambda: bool(lost.pins))
    assert await fleet.keeper.wait_resident(5.0)
    assert (len(kept.posts), len(lost.posts)) == (1, 2)


async def test_a_time_to_live_is_renewed(fleet):
    for engine in fleet.engines:
        engine.replica.mark_ready()
    fleet.want(pin("a", ttl_s=0.3))
    fleet.keeper.start()
    assert await fleet.keeper.wait_resident(5.0)
    await until(lambda: sum(len(engine.posts) for engine in fleet.engines) >= 3)
    assert list(fleet.states.values()) == ["resident"]
    assert fleet.keeper.warmup_tokens == 1_000


async def test_residence_waits_for_the_index(fleet):
    for engine in fleet.engines:
        engine.replica.mark_ready()
    wanted = pin("a")
    fleet.keeper.set_desired([wanted])  # the stub does not know its blocks: no events come
    fleet.keeper.start()
    await until(lambda: list(fleet.states.values()) == ["resident"])
    assert not await fleet.keeper.wait_resident(0.1)
    fleet.index.store(fleet.keeper.holders_of("a")[0], wanted.hashes)
    assert await fleet.keeper.wait_resident(1.0)


async def test_an_unknown_pool_is_refused_and_other_engines_hold_no_pins(fleet):
    with pytest.raises(ValueError, match="pin a: pool 'q' does not exist"):
        fleet.keeper.set_desired([DesiredPin("a", "t", "q", (1,), bytes(16), ())])
    for engine in fleet.engines:
        engine.replica.dialect = "vllm"
    fleet.want(pin("a"))
    fleet.keeper.start()
    assert fleet.states == {("a", ""): "pending"}


async def test_a_new_replica_is_taken_in(fleet):
    newcomer = fleet.engines[1]
    fleet.pool.discard("r1")
    fleet.engines[0].replica.mark_ready()
    newcomer.replica.mark_ready()
    fleet.want(pin("a", replicas="all"))
    fleet.keeper.start()
    assert await fleet.keeper.wait_resident(5.0)
    fleet.pool.add(newcomer.replica)
    fleet.keeper.reconcile()
    assert await fleet.keeper.wait_resident(5.0)
    assert len(newcomer.pins) == 1
    fleet.pool.discard("r1")
    fleet.keeper.reconcile()
    assert list(fleet.states) == [("a", "r0")]


@pytest.fixture
async def engines(tmp_path):
    """Two supervised replicas with the fake model, watched and pinned."""
    spec = BundledSpec(pool="p", model_dir="", served_name="fake", arguments=("--fake",))
    supervisor = Supervisor(spec, runtime_dir=tmp_path, backoff=Backoff(first_s=0.1))
    pool, index, context = PoolState("p", supervisor.replicas), PrefixIndex(), zmq.asyncio.Context()
    async with aiohttp.ClientSession() as session:
        probing = Probing(interval_s=0.2, waiting_s=0.1)
        monitors = [
            ReplicaMonitor(replica, session, index, context=context, probing=probing)
            for replica in supervisor.replicas
        ]
        keeper = PinKeeper({"p": pool}, session, index)
        for monitor in monitors:
            monitor.start()
        supervisor.start()
        yield supervisor, keeper, index
        await keeper.stop()
        await asyncio.gather(*(monitor.stop() for monitor in monitors))
    await supervisor.stop(grace_s=3.0)
    context.destroy(linger=0)


async def test_with_the_engine_pins_survive_a_kill(engines):
    """Pins become resident, the index learns it from events; the same again after a SIGKILL."""
    supervisor, keeper, index = engines
    keeper.set_desired([engine_pin(f"tenant-{n}") for n in range(4)])
    keeper.start()
    assert await keeper.wait_resident(20.0)
    assert keeper.warmup_tokens == 4 * 96
    assert [index.blocks(replica.id) for replica in supervisor.replicas] == [12, 12]
    pid = supervisor.processes[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await until(lambda: supervisor.replicas[0].state == "down")
    assert not await keeper.wait_resident(0.05)
    assert await keeper.wait_resident(20.0)
    assert [index.blocks(replica.id) for replica in supervisor.replicas] == [12, 12]
    assert keeper.warmup_tokens == 6 * 96


def engine_pin(name: str) -> DesiredPin:
    seed = chain_seed("model", name)
    tokens = tuple(range(1, 101))
    raw = b"".join(token.to_bytes(4, "little") for token in tokens)
    return DesiredPin(name, "t", "p", tokens, seed, tuple(block_hashes(seed, raw)))
