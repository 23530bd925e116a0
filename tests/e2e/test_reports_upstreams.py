"""Faults that users of other gateways reported, tried before a scripted upstream on a real socket.

Every test is named after its case; the comment cites the public report. Times and sizes are scaled down.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import pytest

from gateway.app import Gateway
from gateway.bench.server import start_server
from tests.e2e.conftest import free_port
from tests.e2e.external import BODY, gateway_before, policy_text, shy_socket, upstreams, url_of
from tests.e2e.raw_http import CHAT, PING, Reply, post
from tests.gateway.stub_upstream import (
    DONE,
    SSE_HEAD,
    Answer,
    Asked,
    Step,
    chunk,
    delta,
    sse,
    usage_event,
    whole,
)
from tests.gateway.stub_upstream import completion as stub_completion
from tests.gateway.waiting import eventually


def raw_of(events: list[bytes]) -> bytes:
    return b"".join(events)


async def ask(gateway: Gateway, body: dict[str, Any] = BODY) -> Reply:
    return await asyncio.to_thread(post, url_of(gateway), CHAT, body)


async def recorded(gateway: Gateway, count: int = 1) -> list[Any]:
    """The ledger's entries once there are `count`."""
    await eventually(lambda: len(gateway.ledger.recent(100)) >= count)
    return gateway.ledger.recent(100)


# --- bodies and accounts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [True, False])
async def test_a07_a_usage_chunk_without_choices(
    tmp_path: Path, asked: bool
) -> None:  # BerriAI/litellm#25410
    usage = usage_event(26, 3)
    events = [delta("a clear answer"), delta(finish="stop"), usage, DONE]
    body = {**BODY, "stream_options": {"include_usage": True}} if asked else BODY
    async with (
        upstreams(lambda _: sse(events)) as (stub,),
        gateway_before(tmp_path, [stub]) as gateway,
    ):
        reply = await ask(gateway, body)
        assert reply.body == b"".join(events if asked else [event for event in events if event != usage])
        assert stub.posts[0].json["stream_options"] == {"include_usage": True}
        (entry,) = await recorded(gateway)
        assert (entry.prompt_tokens, entry.completion_tokens) == (26, 3)
        labels = {"model": "m", "route": "chat"}
        value = gateway.metrics.registry.get_sample_value
        assert value("warmfront_prompt_tokens_total", labels) == 26
        assert value("warmfront_completion_tokens_total", labels) == 3


async def test_a20_an_external_engine_gets_the_limit_as_given(tmp_path: Path) -> None:
    body = {**BODY, "stream": False, "max_completion_tokens": 700}
    async with (
        upstreams(lambda _: whole(stub_completion())) as (stub,),
        gateway_before(tmp_path, [stub]) as gateway,
    ):
        assert (await ask(gateway, body)).status == 200
        assert stub.posts[0].json == body


@pytest.mark.parametrize("edited", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_a31_zeros_reach_an_external_engine(tmp_path: Path, stream: bool, edited: bool) -> None:
    # SamSaffron/term-llm#277, SamSaffron/term-llm#278
    zeros = {
        "temperature": 0,
        "top_p": 0.0,
        "seed": 0,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "top_k": 0,
        "max_tokens": 0,
        "logprobs": False,
        "stop": [],
        "logit_bias": {},
        "user": "",
    }
    clock = {"role": "system", "content": "Current time: 2026-03-02T09:41:07Z\nYou are the harbour office."}
    messages = [clock, *BODY["messages"]] if edited else BODY["messages"]
    body = {**BODY, "messages": messages, **zeros, "stream": stream}
    events = [delta("a"), delta(finish="stop"), DONE]

    def reply(request: Asked) -> Answer:
        return sse(events) if request.json["stream"] else whole(stub_completion())

    async with upstreams(reply) as (stub,), gateway_before(tmp_path, [stub]) as gateway:
        # Three, because garbage collection in this process may put one of them over its time budget.
        assert [(await ask(gateway, body)).status for _ in range(3)] == [200] * 3
        asked = next(a for a in stub.posts if not edited or b"09:41:07Z\\nYou" not in a.body)
        sent = asked.json
        if edited:
            assert "09:41:07" not in sent["messages"][0]["content"]
            sent["messages"] = messages
        assert sent.pop("stream_options", None) == ({"include_usage": True} if stream else None)
        assert sent == body and list(sent) == list(body)
        assert b'"top_p": 0.0, "seed": 0,' in asked.body, "number forms stay as they were written"


# --- upstreams that are slow, huge or broken ----------------------------------------------------------------


@pytest.mark.parametrize("where", ["before the head", "after the head", "after the upstream's own comment"])
async def test_b10_comments_bridge_a_long_silence(tmp_path: Path, where: str) -> None:
    # BerriAI/litellm#34819, antirez/ds4#222; 130 s and 60 s become 2 s and 0.9 s
    events: list[Step] = [delta("at last"), delta(finish="stop"), usage_event(9, 2), DONE]
    streams = {
        "before the head": Answer([2.0, *sse(events).steps]),
        "after the head": sse([2.0, *events]),
        "after the upstream's own comment": sse([b": thinking\n\n", 2.0, *events]),
    }
    stubs = upstreams(lambda _: streams[where])
    settings = {"commit_after_s": 0.15, "ping_interval_s": 0.15}
    async with stubs as (stub,), gateway_before(tmp_path, [stub], **settings) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        raw = json.dumps(BODY).encode()
        writer.write(
            b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b"
            % (CHAT.encode(), len(raw), raw)
        )
        got = b""
        while b"[DONE]" not in got:
            async with asyncio.timeout(0.9):  # the proxy on the way would cut here
                got += await reader.readuntil(b"\n\n")
        writer.close()
        assert got.startswith(b"HTTP/1.1 200 ") and b"text/event-stream; charset=utf-8" in got
        assert got.count(PING.encode() + b"\n\n") >= 5
        assert got.index(PING.encode()) < got.index(b"data: ")
        (entry,) = await recorded(gateway)
        assert entry.completion_tokens == 2 and entry.ttft_s is not None and entry.ttft_s > 1.9


async def test_b10_comments_can_be_off(tmp_path: Path) -> None:
    events: list[Step] = [0.4, delta("a"), delta(finish="stop"), DONE]
    stubs = upstreams(lambda _: sse(events))
    async with stubs as (stub,), gateway_before(tmp_path, [stub], ping_interval_s=0) as gateway:
        assert (await ask(gateway)).body == raw_of([step for step in events if isinstance(step, bytes)])


def resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no resident size")


async def test_b11_a_client_that_does_not_read_costs_no_memory(tmp_path: Path) -> None:
    # OpenCTI-Platform/opencti#13908, MAXeaglet/commandcode-proxy#20
    event = chunk(delta("x" * 16_000))
    flood = Answer([SSE_HEAD, *[event] * 4000])
    events = [delta("ok"), delta(finish="stop"), DONE]

    async def normal(base_url: str) -> float:
        started = time.perf_counter()
        reply = await asyncio.to_thread(post, base_url, CHAT, BODY)
        assert reply.body == raw_of(events)
        return time.perf_counter() - started

    async with upstreams(lambda asked: flood if asked.json.get("user") else sse(events)) as (stub,):
        policy = tmp_path / "warmfront.yaml"
        policy.write_text(policy_text(stub.url), encoding="utf-8")
        server = await start_server(policy, free_port(), free_port(), tmp_path / "server.log")
        try:
            before = median([await normal(server.base_url) for _ in range(5)])
            resident = resident_bytes(server.process.pid)
            with shy_socket(urlsplit(server.base_url).port or 0) as client:
                raw = json.dumps({**BODY, "user": "flood"}).encode()
                head = b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (
                    CHAT.encode(),
                    len(raw),
                )
                client.sendall(head + raw)
                grown = 0
                meanwhile = []
                for _ in range(10):
                    meanwhile.append(await normal(server.base_url))
                    grown = max(grown, resident_bytes(server.process.pid) - resident)
                    await asyncio.sleep(0.05)
                assert stub.written < len(flood.steps) * len(event) / 2, "the upstream is held back"
                assert grown < 12_000_000
                assert median(meanwhile) < max(10 * before, 0.25)
                assert client.recv(64).startswith(b"HTTP/1.1 200 ")
            flooded = next(asked for asked in stub.posts if asked.json.get("user"))
            async with asyncio.timeout(5):
                await flooded.gone.wait()
        finally:
            await server.stop()


async def test_b11_a_stalled_client_is_cut_and_its_request_aborted(tmp_path: Path) -> None:
    flood = Answer([SSE_HEAD, *[chunk(delta("x" * 16_000))] * 2000])
    async with (
        upstreams(lambda _: flood) as (stub,),
        gateway_before(tmp_path, [stub], write_timeout_s=0.4) as gateway,
    ):
        with shy_socket(gateway.port) as client:
            raw = json.dumps(BODY).encode()
            head = b"POST %b HTTP/1.1\r\nHost: localhost\r\n" % CHAT.encode()
            head += b"Content-Length: %d\r\n\r\n" % len(raw)
            client.sendall(head + raw)
            await eventually(lambda: stub.posts and stub.posts[0].gone.is_set())
            entries = await recorded(gateway)
            assert [entry.outcome for entry in entries] == ["stalled_client"]
            assert all(replica.inflight == 0 for replica in gateway.pools["p"].replicas.values())


ERRORS: list[tuple[str, bytes, int]] = [
    ("own-code", b'{"error":{"message":"no such voice","code":400}}', 400),
    ("code-as-text", b'{"error":{"message":"slow down","code":"429"}}', 429),
    ("by-type", b'{"error":{"message":"too long","type":"invalid_request_error","code":"x"}}', 400),
    ("no-code", b'{"error":{"message":"it broke"}}', 502),
    ("text-only", b'{"error":"it broke"}', 502),
    ("unwrapped", b'{"object":"error","message":"too long","type":"BadRequestError","code":400}', 400),
    ("own-key-refused", b'{"error":{"message":"bad key sk-1","code":401}}', 502),
]


@pytest.mark.parametrize(("name", "error", "status"), ERRORS, ids=[case[0] for case in ERRORS])
async def test_b13_a_first_event_that_is_an_error(
    tmp_path: Path, name: str, error: bytes, status: int
) -> None:
    # openclaw/clawrouter#101
    event = b"data: " + error + b"\n\n"
    for events in ([event], [b": hello\n\n", b": hello\n\n", event, DONE], [b"event: error\n" + event]):
        async with (
            upstreams(lambda _, events=events: sse(events)) as (stub,),
            gateway_before(tmp_path, [stub]) as gateway,
        ):
            reply = await ask(gateway)
            assert reply.status == status and reply.error["message"] and "sk-1" not in reply.error["message"]
            (entry,) = await recorded(gateway)
            assert entry.status == status and entry.outcome != "ok"
            assert len(stub.posts) == 1


async def test_b13_the_search_for_a_first_event_is_bounded(tmp_path: Path) -> None:
    comments: list[Step] = [b": " + b"x" * 1000 + b"\n\n"] * 200
    async with (
        upstreams(lambda _: sse([*comments, delta("late"), DONE])) as (stub,),
        gateway_before(tmp_path, [stub]) as gateway,
    ):
        assert (await ask(gateway)).status == 502


async def test_b13_a_servers_own_fault_is_tried_elsewhere(tmp_path: Path) -> None:
    broken = sse([b'data: {"error":{"message":"out of memory","code":500}}\n\n'])
    good = [delta("fine"), delta(finish="stop"), DONE]
    async with (
        upstreams(lambda _: broken, lambda _: sse(good)) as stubs,
        gateway_before(tmp_path, stubs) as gateway,
    ):
        replies = [await ask(gateway) for _ in range(5)]
        assert all(reply.body == raw_of(good) for reply in replies)


@pytest.mark.parametrize("clean", [True, False], ids=["closed", "cut"])
async def test_b14_a_stream_without_any_event(tmp_path: Path, clean: bool) -> None:
    # lemonade-sdk/lemonade#2826, mastra-ai/mastra#22097
    async with (
        upstreams(lambda _: sse([], end=clean), lambda _: sse([b": up\n\n"], end=clean)) as stubs,
        gateway_before(tmp_path, stubs) as gateway,
    ):
        reply = await ask(gateway)
        assert reply.status == 502 and reply.error["type"] == "server_error"
        assert sorted(len(stub.posts) for stub in stubs) == [1, 1], "nothing was sent, so another was tried"
        (entry,) = await recorded(gateway)
        assert entry.outcome == "upstream_error"


@pytest.mark.parametrize("clean", [True, False], ids=["closed", "cut"])
async def test_b14_a_stream_that_ends_half_way(tmp_path: Path, clean: bool) -> None:
    events: list[Step] = [delta("one"), delta(" two"), delta(" three")]
    async with (
        upstreams(lambda _: sse(events, end=clean)) as (stub,),
        gateway_before(tmp_path, [stub]) as gateway,
    ):
        reply = await ask(gateway)
        sent, last = reply.body[: -len(reply.body.split(b"\n\n")[-2]) - 2], reply.body.split(b"\n\n")[-2]
        assert sent == raw_of([step for step in events if isinstance(step, bytes)])
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "upstream_truncated"
        assert b"[DONE]" not in reply.body and b'"finish_reason":"stop"' not in reply.body
        (entry,) = await recorded(gateway)
        assert entry.outcome == "truncated" and len(stub.posts) == 1


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([delta("a"), delta(finish="stop"), DONE, DONE], [delta("a"), delta(finish="stop"), DONE]),
        ([delta("a"), delta(finish="stop"), DONE, delta("b")], [delta("a"), delta(finish="stop"), DONE]),
        ([delta("a"), delta(finish="stop")], [delta("a"), delta(finish="stop")]),
    ],
    ids=["twice", "more-after", "none"],
)
async def test_b14_done_comes_at_most_once_and_is_not_made_up(
    tmp_path: Path, events: list[bytes], expected: list[bytes]
) -> None:
    async with upstreams(lambda _: sse(events)) as (stub,), gateway_before(tmp_path, [stub]) as gateway:
        assert (await ask(gateway)).body == raw_of(expected)
        assert [entry.outcome for entry in await recorded(gateway)] == ["ok"]


async def test_b14_an_answer_that_is_cut_short(tmp_path: Path) -> None:
    body = whole(stub_completion()).steps[0]
    assert isinstance(body, bytes)
    async with (
        upstreams(lambda _: Answer([body[:-9]], close=True)) as (stub,),
        gateway_before(tmp_path, [stub]) as gateway,
    ):
        reply = await ask(gateway, {**BODY, "stream": False})
        assert reply.status == 502 and reply.error["type"] == "server_error"


def one_byte_a_segment(data: bytes) -> list[Step]:
    return [step for byte in data for step in (bytes((byte,)), 0.0002)]


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"], ids=["lf", "crlf"])
@pytest.mark.parametrize("framing", ["chunk per byte", "one chunk"])
async def test_b16_characters_and_ends_split_between_segments(
    tmp_path: Path, end: bytes, framing: str
) -> None:
    # headroomlabs-ai/headroom#350, open-metadata/OpenMetadata#29531
    text = raw_of([delta("☂漢"), delta("é👩‍🚒\u2028\x85x"), delta(finish="stop"), DONE]).replace(b"\n\n", end)
    pieces = one_byte_a_segment(text) if framing == "chunk per byte" else []
    steps = sse(pieces).steps if pieces else [SSE_HEAD, *one_byte_a_segment(chunk(text) + b"0\r\n\r\n")]
    async with upstreams(lambda _: Answer(steps)) as (stub,), gateway_before(tmp_path, [stub]) as gateway:
        reply = await ask(gateway)
        assert reply.body == text
        assert reply.content_type == "text/event-stream; charset=utf-8"


async def test_b16_a_whole_answer_split_between_segments(tmp_path: Path) -> None:
    raw = json.dumps(stub_completion("☂漢 é"), ensure_ascii=False).encode()
    answer = whole(raw).steps[0]
    assert isinstance(answer, bytes)
    stubs = upstreams(lambda _: Answer(one_byte_a_segment(answer)))
    async with stubs as (stub,), gateway_before(tmp_path, [stub]) as gateway:
        assert (await ask(gateway, {**BODY, "stream": False})).body == raw
