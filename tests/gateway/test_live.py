"""Calls to a replica that goes down do not wait for it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator

import pytest
from conftest import StartStub
from stub_upstream import Answer, sse

from gateway.routing.replica import Replica
from gateway.upstream.client import Call, Origin, UpstreamBroken, UpstreamClient
from gateway.upstream.live import LiveCalls


@pytest.fixture
async def client() -> AsyncIterator[UpstreamClient]:
    client = UpstreamClient(connect_timeout_s=1.0, pool_idle_s=4.0)
    yield client
    await client.close()
    assert client.open_connections == 0


def ready(url: str) -> Replica:
    replica = Replica("r", pool="p", base_url=url)
    replica.mark_ready()
    return replica


def call_to(client: UpstreamClient, replica: Replica) -> Call:
    return client.call(Origin.from_url(replica.base_url), "POST", "/v1/x", b"", b"{}")


async def test_a_call_without_an_answer_fails_at_once(client: UpstreamClient, stub: StartStub) -> None:
    upstream = await stub(lambda asked: Answer([9.0]))
    replica, live = ready(upstream.url), LiveCalls()
    call = call_to(client, replica)
    with live.watching(replica, call):
        await call.start()
        assert live.count(replica) == 1
        replica.mark_cache_lost()
        assert not await call.head(0.05)
        asyncio.get_running_loop().call_later(0.05, replica.mark_down, "x")
        with pytest.raises(UpstreamBroken, match="went down"):
            await asyncio.wait_for(call.head(9.0), 1.0)
    call.release()
    assert live.count(replica) == 0
    await asyncio.wait_for(upstream.posts[0].gone.wait(), 1)


async def test_a_kept_connection_is_not_tried_again(client: UpstreamClient, stub: StartStub) -> None:
    upstream = await stub(lambda asked: sse([b"data: 1\n\n"]) if len(upstream.posts) == 1 else Answer([9.0]))
    replica, live = ready(upstream.url), LiveCalls()
    first = call_to(client, replica)
    await first.start()
    assert await first.head(1.0)
    await first.read(1000, 1.0)
    first.release()
    second = call_to(client, replica)
    with live.watching(replica, second):
        await second.start()
        assert not await second.head(0.05)
        replica.mark_down("x")
        with pytest.raises(UpstreamBroken, match="went down"):
            await asyncio.wait_for(second.head(9.0), 1.0)
    second.release()
    assert (upstream.connections, len(upstream.posts)) == (1, 2)


async def test_a_call_that_only_connects(client: UpstreamClient, stub: StartStub) -> None:
    replica, live = ready((await stub()).url), LiveCalls()
    call = call_to(client, replica)
    with live.watching(replica, call):
        starting = asyncio.create_task(call.start())
        await asyncio.sleep(0)
        replica.mark_down("x")
        with pytest.raises(UpstreamBroken, match="went down"):
            await starting
    call.release()


@pytest.mark.parametrize("drains", [True, False])
async def test_an_answer_that_goes_on_is_read_to_its_end(
    client: UpstreamClient, stub: StartStub, drains: bool
) -> None:
    more = [0.05, b"data: x\n\n"] * 8 if drains else [9.0]
    upstream = await stub(lambda asked: sse([b"data: 1\n\n", *more]))
    replica, live = ready(upstream.url), LiveCalls(grace_s=0.15)
    call = call_to(client, replica)
    with live.watching(replica, call):
        await call.start()
        assert await call.head(1.0)
        replica.mark_down("x")
        if drains:
            assert (await call.read(1000, 1.0)).count(b"x") == 8
        else:
            with pytest.raises(UpstreamBroken, match="went down"):
                await call.read(1000, 9.0)
    call.release()


async def test_a_replica_that_is_gone_is_not_kept() -> None:
    live = LiveCalls()
    replica = ready("http://127.0.0.1:9")
    client = UpstreamClient(connect_timeout_s=1.0, pool_idle_s=4.0)
    for _ in range(3):
        with live.watching(replica, call_to(client, replica)):
            pass
    replica.mark_down("x")
    assert len(live._calls) == 1
    del replica
    gc.collect()
    assert len(live._calls) == 0
