"""Replicas that go down under a request, and what the cache is parted by."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from conftest import Running, StartGateway, StartStub
from stub_upstream import DONE, Answer, Asked, completion, delta, sse, usage_event, whole
from waiting import eventually

from gateway.routing.router import RouteQuery

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi " * 200}]}
STREAM = {**CHAT, "stream": True}
GOOD = [delta("Hel"), delta(finish="stop"), usage_event(), DONE]
KEYS = "tenants:\n  a: {keys: [{plain: key-a}]}\n  b: {keys: [{plain: key-b}]}"


def mark_down(running: Running, url: str) -> None:
    for replica in running.gateway.pools["p"].replicas.values():
        if replica.base_url == url:
            replica.mark_down("probe failed")


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_replica_that_goes_down_before_its_answer(
    stub: StartStub, serve: StartGateway, streaming: bool
) -> None:
    asked: list[str] = []

    def reply(request: Asked) -> Answer:
        asked.append(request.headers["host"])
        if len(asked) == 1:
            return Answer([30.0])
        return sse(GOOD) if streaming else whole(completion())

    first, second = await stub(reply), await stub(reply)
    gateway = await serve([first.url, second.url], poll_interval_s=60.0)
    task = asyncio.create_task(gateway.post(STREAM if streaming else CHAT))
    await eventually(lambda: len(asked) == 1)
    await asyncio.sleep(0.02)
    mark_down(gateway, f"http://{asked[0]}")
    status, _, _ = await asyncio.wait_for(task, 2.0)
    assert status == 200 and asked[0] != asked[1]


@pytest.mark.parametrize("streaming", [True, False])
async def test_the_last_replica_goes_down(stub: StartStub, serve: StartGateway, streaming: bool) -> None:
    upstream = await stub(lambda asked: Answer([30.0]))
    gateway = await serve([upstream.url], poll_interval_s=60.0)
    task = asyncio.create_task(gateway.post({**CHAT, "stream": streaming}))
    await eventually(lambda: len(upstream.posts) == 1)
    mark_down(gateway, upstream.url)
    status, _, body = await asyncio.wait_for(task, 2.0)
    assert status == 502 and body["error"]["code"] == "upstream_error"


async def test_a_replica_that_goes_down_in_mid_answer(stub: StartStub, serve: StartGateway) -> None:
    upstream = await stub(lambda asked: sse([delta("a"), 30.0, DONE]))
    gateway = await serve([upstream.url], poll_interval_s=60.0)
    task = asyncio.create_task(gateway.post(STREAM))
    await eventually(lambda: len(upstream.posts) == 1)
    await asyncio.sleep(0.1)
    mark_down(gateway, upstream.url)
    status, _, body = await asyncio.wait_for(task, 5.0)
    assert status == 200 and body.startswith(delta("a")) and DONE not in body
    assert json.loads(body.split(b"data: ")[-1])["error"]["code"] == "upstream_truncated"


async def test_vllm_without_priority_scheduling_is_asked_again(stub: StartStub, serve: StartGateway) -> None:
    refused = {"message": "Got priority 1 but Priority scheduling is not enabled.", "code": 400}

    def reply(asked: Asked) -> Answer:
        return whole({"error": refused}, 400) if "priority" in asked.json else whole(completion())

    upstream = await stub(reply)
    gateway = await serve([upstream.url], dialect="vllm", retry_burst=0.0)
    for _ in range(3):
        assert (await gateway.post({**CHAT, "priority": -5}))[0] == 200
    assert [asked.json.get("priority") for asked in upstream.posts] == [1, None, None, None]


async def test_a_salt_parts_a_tenants_cache_and_no_more(stub: StartStub, serve: StartGateway) -> None:
    upstream = await stub()
    gateway = await serve([upstream.url], dialect="vllm", extra=KEYS)
    salts: dict[tuple[str, str | None], str] = {}
    for _ in range(2):
        for key in ("key-a", "key-b"):
            for salt in (None, "", "x", "y"):
                status, _, _ = await gateway.post({**CHAT, "cache_salt": salt}, headers={"x-api-key": key})
                assert status == 200
                sent = upstream.posts[-1].json["cache_salt"]
                assert salts.setdefault((key, salt), sent) == sent
                assert sent != salt and len(sent) == 32
    assert len(set(salts.values())) == 8
    hits = [entry.captured_tokens > 0 for entry in reversed(gateway.gateway.ledger.recent(16))]
    assert hits == [False] * 8 + [True] * 8, "routing sees what is parted"
    stolen = salts["key-a", None]
    await gateway.post({**CHAT, "cache_salt": stolen}, headers={"x-api-key": "key-b"})
    assert upstream.posts[-1].json["cache_salt"] not in salts.values()


async def test_a_salt_of_the_wrong_kind(stub: StartStub, serve: StartGateway) -> None:
    gateway = await serve([(await stub()).url])
    for salt in (3, ["x"], "x" * 257):
        status, _, body = await gateway.post({**CHAT, "cache_salt": salt})
        assert (status, body["error"]["param"]) == (400, "cache_salt")


async def test_deep_nesting_never_reaches_a_handler(stub: StartStub, serve: StartGateway) -> None:
    upstream = await stub()
    gateway = await serve([upstream.url], mode="enforce")
    for depth in (129, 500, 1000, 5000):
        tools = b'[{"x":' + b"[" * depth + b"]" * depth + b"}]"
        raw = json.dumps(CHAT).encode()[:-1] + b', "tools":' + tools + b"}"
        assert (await gateway.post(raw))[0] == 400
    assert not upstream.posts


async def test_zero_is_a_limit(stub: StartStub, serve: StartGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = await serve([(await stub()).url])
    router = gateway.gateway.services.router
    seen: list[int] = []
    choose = router.choose

    def spy(pool: Any, query: RouteQuery, exclude: frozenset[str]) -> Any:
        seen.append(query.max_tokens)
        return choose(pool, query, exclude)

    monkeypatch.setattr(router, "choose", spy)
    for given in (0, 7, None):
        await gateway.post({**CHAT, "max_tokens": given})
    assert seen == [0, 7, gateway.gateway.policy.limits.default_max_tokens]


@pytest.mark.parametrize("before", [[], GOOD[:1]])
@pytest.mark.parametrize("ending", [b"", b"\n", b"\r\n", b"\r"])
async def test_a_last_event_without_its_blank_line(
    stub: StartStub, serve: StartGateway, before: list[bytes], ending: bytes
) -> None:
    last = delta(finish="stop").rstrip(b"\n")
    upstream = await stub(lambda asked: sse([*before, last + ending]))
    gateway = await serve([upstream.url])
    _, _, body = await gateway.post(STREAM)
    assert body.startswith(b"".join(before) + last) and body.endswith(b"\n") and b"error" not in body
    await eventually(lambda: len(gateway.gateway.ledger.recent(10)) == 1)
    (entry,) = gateway.gateway.ledger.recent(10)
    assert (entry.outcome, entry.counted) == ("ok", True)
    assert entry.ttft_s is not None


async def test_a_last_event_that_is_cut(stub: StartStub, serve: StartGateway) -> None:
    upstream = await stub(lambda asked: sse([delta("a"), delta(finish="stop")[:-10]]))
    gateway = await serve([upstream.url])
    _, _, body = await gateway.post(STREAM)
    assert body.startswith(delta("a") + b"data: {") and b"upstream_truncated" in body
    assert b'"finish_reason":"stop"' not in body


async def test_a_last_event_that_is_an_error(stub: StartStub, serve: StartGateway) -> None:
    error = b'data: {"error":{"message":"bad input","code":400}}'
    upstream = await stub(lambda asked: sse([error]))
    gateway = await serve([upstream.url])
    status, _, body = await gateway.post(STREAM)
    assert status == 400 and body["error"]["message"] == "bad input"
