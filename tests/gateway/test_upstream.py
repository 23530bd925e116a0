"""The upstream client: pooling, framing of bodies, broken and silent upstreams, back-pressure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from conftest import StartStub
from stub_upstream import Answer, chunk, sse, whole

from gateway.upstream.client import Call, Origin, UpstreamBroken, UpstreamClient
from gateway.upstream.connection import HIGH_WATER


@pytest.fixture
async def client() -> AsyncIterator[UpstreamClient]:
    client = UpstreamClient(connect_timeout_s=1.0, pool_idle_s=4.0)
    yield client
    await client.close()
    assert client.open_connections == 0


def post(client: UpstreamClient, url: str, body: bytes = b"{}") -> Call:
    return client.call(Origin.from_url(url), "POST", "/v1/x", b"X-A: b\r\n", body)


async def fetch(client: UpstreamClient, url: str, body: bytes = b"{}") -> bytes:
    call = post(client, url, body)
    try:
        await call.start()
        assert await call.head(2.0)
        return await call.read(1 << 20, 2.0)
    finally:
        call.release()


def test_origins() -> None:
    origin = Origin.from_url("https://[::1]:8443/base/")
    assert (origin.host, origin.port, origin.tls, origin.prefix) == ("::1", 8443, True, "/base")
    assert origin.host_header == "[::1]:8443"
    assert Origin.from_url("http://h").host_header == "h"
    with pytest.raises(ValueError, match="not an http"):
        Origin.from_url("ftp://h")


async def test_connections_are_used_again(client: UpstreamClient, stub: StartStub) -> None:
    upstream = await stub()
    for _ in range(5):
        assert b"Hello" in await fetch(client, upstream.url)
    assert upstream.connections == 1
    assert upstream.posts[0].headers["x-a"] == "b"
    assert upstream.posts[0].headers["content-length"] == "2"


async def test_chunked_bodies_in_any_cut(client: UpstreamClient, stub: StartStub) -> None:
    wire = (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        + chunk(b"hello ")
        + b"5;ext=1\r\nworld\r\n0\r\nTrailer: x\r\n\r\n"
    )
    for size in (1, 2, 3, 7, 1000):
        pieces = [wire[i : i + size] for i in range(0, len(wire), size)]
        steps = [step for piece in pieces for step in (0.0005, piece)]
        upstream = await stub(lambda asked, steps=steps: Answer(steps))
        assert await fetch(client, upstream.url) == b"hello world"
        assert await fetch(client, upstream.url) == b"hello world"
        assert upstream.connections == 1


async def test_interim_answers_are_skipped(client: UpstreamClient, stub: StartStub) -> None:
    final = whole({"a": 1}).steps[0]
    upstream = await stub(lambda asked: Answer([b"HTTP/1.1 100 Continue\r\n\r\n" + final]))
    assert await fetch(client, upstream.url) == b'{"a": 1}'


async def test_a_body_until_close(client: UpstreamClient, stub: StartStub) -> None:
    upstream = await stub(lambda asked: Answer([b"HTTP/1.1 200 OK\r\n\r\nall of it"], close=True))
    assert await fetch(client, upstream.url) == b"all of it"
    assert await fetch(client, upstream.url) == b"all of it"
    assert upstream.connections == 2


@pytest.mark.parametrize(
    "wire",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\ntoo long",
        b"HTTP/1.1 200 OK\r\nContent-Length: -3\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nbad line\r\n\r\n",
        b"SSH-2.0-x\r\n\r\n",
    ],
)
async def test_broken_answers(client: UpstreamClient, stub: StartStub, wire: bytes) -> None:
    upstream = await stub(lambda asked: Answer([wire] if wire else [], close=True))
    with pytest.raises(UpstreamBroken):
        await fetch(client, upstream.url)


async def test_a_refused_connection(client: UpstreamClient, stub: StartStub) -> None:
    upstream = await stub()
    url = upstream.url
    await upstream.stop()
    with pytest.raises(UpstreamBroken) as broken:
        await fetch(client, url)
    assert broken.value.refused


async def test_a_stale_connection_is_replaced_once(client: UpstreamClient, stub: StartStub) -> None:
    # Public report D26: the other side closes a kept-alive connection just as the next request is sent.
    seen: list[int] = []

    def reply(asked: object) -> Answer:
        seen.append(1)
        return Answer([], close=True) if len(seen) == 2 else whole({"n": len(seen)})

    upstream = await stub(reply)
    assert await fetch(client, upstream.url) == b'{"n": 1}'
    assert await fetch(client, upstream.url) == b'{"n": 3}'
    assert upstream.connections == 2


async def test_a_fresh_connection_that_dies_is_not_retried(client: UpstreamClient, stub: StartStub) -> None:
    upstream = await stub(lambda asked: Answer([], close=True))
    with pytest.raises(UpstreamBroken):
        await fetch(client, upstream.url)
    assert len(upstream.posts) == 1


async def test_idle_connections_are_dropped(stub: StartStub) -> None:
    client = UpstreamClient(connect_timeout_s=1.0, pool_idle_s=0.02)
    upstream = await stub()
    await fetch(client, upstream.url)
    await asyncio.sleep(0.03)
    client.sweep()
    await asyncio.sleep(0.01)
    assert client.open_connections == 0
    await fetch(client, upstream.url)
    assert upstream.connections == 2
    await client.close()


async def test_silence_can_be_waited_out(client: UpstreamClient, stub: StartStub) -> None:
    upstream = await stub(lambda asked: sse([0.05, b"data: 1\n\n", 0.05, b"data: 2\n\n"]))
    call = post(client, upstream.url)
    await call.start()
    assert await call.head(1.0)
    silent = 0
    got = b""
    while (piece := await call.piece(0.01)) != b"":
        if piece is None:
            silent += 1
        else:
            got += piece
    assert got == b"data: 1\n\ndata: 2\n\n"
    assert silent >= 2
    call.release()
    assert client.open_connections == 1


async def test_no_head_in_time(client: UpstreamClient, stub: StartStub) -> None:
    upstream = await stub(lambda asked: Answer([5.0]))
    call = post(client, upstream.url)
    await call.start()
    assert not await call.head(0.02)
    call.abort()
    await asyncio.wait_for(upstream.posts[0].gone.wait(), 1)


async def test_a_reader_that_waits_stops_the_upstream(client: UpstreamClient, stub: StartStub) -> None:
    event = b"data: " + b"x" * 16000 + b"\n\n"
    upstream = await stub(lambda asked: sse([event] * 2000))
    call = post(client, upstream.url)
    await call.start()
    await call.head(1.0)
    await asyncio.sleep(0.3)
    assert upstream.written < HIGH_WATER + 16 * 1024 * 1024  # ours plus the sockets' own buffers
    assert upstream.written < 2000 * len(event)
    total = 0
    while piece := await call.piece(2.0):
        assert len(piece) <= HIGH_WATER + 512 * 1024
        total += len(piece)
    assert total == 2000 * len(event)
    call.release()


async def test_an_answer_over_the_limit(client: UpstreamClient, stub: StartStub) -> None:
    upstream = await stub(lambda asked: whole({"a": "x" * 5000}))
    call = post(client, upstream.url)
    await call.start()
    await call.head(1.0)
    with pytest.raises(UpstreamBroken, match="longer"):
        await call.read(100, 1.0)
    call.release()


async def test_get(client: UpstreamClient, stub: StartStub) -> None:
    upstream = await stub()
    status, body = await client.get(Origin.from_url(upstream.url), "/v1/models", timeout=1.0)
    assert status == 200 and b"list" in body


async def test_a_large_request_body(client: UpstreamClient, stub: StartStub) -> None:
    upstream = await stub()
    body = b'{"x":"' + b"y" * 2_000_000 + b'"}'
    await fetch(client, upstream.url, body)
    assert upstream.posts[0].body == body
