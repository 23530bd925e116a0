"""The data plane over HTTP: a gateway in front of scripted upstreams."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import aiohttp
import orjson
import pytest
from conftest import Running, StartGateway, StartStub, policy_text
from stub_upstream import DONE, Answer, Asked, completion, delta, sse, usage_event, whole
from waiting import eventually

from policies import load_policy

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
STREAM = {**CHAT, "stream": True}
GOOD = [delta("Hel"), delta("lo"), delta(finish="stop"), usage_event(), DONE]
KEYS = "tenants:\n  a: {keys: [{plain: key-a}], max_class: system}\n  b: {keys: [{plain: key-b}]}"


def metric(running: Running, name: str, **labels: str) -> float:
    return running.gateway.metrics.registry.get_sample_value(name, labels) or 0.0


async def settled(running: Running, count: int = 1) -> list[Any]:
    """The ledger's latest entries, once there are `count`, and nothing is held any more."""
    await eventually(lambda: len(running.gateway.ledger.recent(1000)) >= count)
    for pool in running.gateway.pools.values():
        assert all(replica.inflight == 0 for replica in pool.replicas.values())
    for gate in running.gateway.services.gates.values():
        assert gate.in_use == 0
        gate.check()
    return running.gateway.ledger.recent(1000)


# --- whole answers ------------------------------------------------------------------------------------------


async def test_a_whole_answer_passes_byte_for_byte(stub: StartStub, serve: StartGateway) -> None:
    body = b'{"id" : "c1", "choices":[], "usage":{"prompt_tokens":26,"completion_tokens":3},"x":1.0}'
    upstream = await stub(lambda asked: whole(body))
    gateway = await serve([upstream.url])
    raw = b'{"model":"m", "messages":[{"role":"user","content":"hi"}], "temperature":0.0,"zz":[1.50]}'
    async with gateway.session.post(
        gateway.base + "/v1/chat/completions", data=raw, headers={"Content-Type": "application/json"}
    ) as response:
        assert response.status == 200
        assert await response.read() == body
    assert upstream.posts[0].body == raw
    assert upstream.posts[0].path == "/v1/chat/completions"
    (entry,) = await settled(gateway)
    assert (entry.prompt_tokens, entry.completion_tokens, entry.outcome) == (26, 3, "ok")


async def test_response_headers(stub: StartStub, serve: StartGateway) -> None:
    upstream = await stub()
    gateway = await serve([upstream.url], mode="enforce")
    status, headers, _ = await gateway.post(CHAT, headers={"x-request-id": "my-id.1"})
    assert status == 200
    assert headers["x-request-id"] == "my-id.1" and upstream.posts[0].headers["x-request-id"] == "my-id.1"
    assert headers["x-warmfront-route"] == "chat" and headers["x-warmfront-class"] == "interactive"
    assert headers["x-warmfront-policy"] == gateway.gateway.policy.version
    assert headers["x-warmfront-replica"].startswith("p@127.0.0.1")
    assert headers["x-warmfront-canon"].startswith("enforce; ruleset=")
    hidden = await serve([upstream.url], expose_headers=False)
    _, headers, _ = await hidden.post(CHAT, headers={"x-request-id": "bad id\t"})
    assert headers["x-request-id"].startswith("req-")
    assert not [name for name in headers if name.lower().startswith("x-warmfront")]


async def test_client_credentials_and_hop_headers_stay_here(stub: StartStub, serve: StartGateway) -> None:
    upstream = await stub()
    gateway = await serve([upstream.url], extra=KEYS)
    headers = {"Authorization": "Bearer key-a", "Cookie": "c=1", "X-Forwarded-For": "x", "Traceparent": "bad"}
    await gateway.post(CHAT, headers=headers)
    sent = upstream.posts[0].headers
    assert not {"authorization", "cookie", "x-forwarded-for", "traceparent"} & set(sent)


async def test_short_paths_and_completions(stub: StartStub, serve: StartGateway) -> None:
    upstream = await stub()
    gateway = await serve([upstream.url])
    assert (await gateway.post(CHAT, "/chat/completions"))[0] == 200
    assert (await gateway.post({"model": "m", "prompt": "x"}, "/completions"))[0] == 200
    assert (await gateway.post({"model": "m", "prompt": [1, 2]}, "/v1/completions"))[0] == 200
    assert [asked.path for asked in upstream.posts] == [
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/completions",
    ]


async def test_an_alias_reaches_the_upstream_as_its_model(stub: StartStub, serve: StartGateway) -> None:
    upstream = await stub()
    gateway = await serve([upstream.url])
    assert (await gateway.post({**CHAT, "model": "alias"}))[0] == 200
    assert upstream.posts[0].json["model"] == "m"


# --- bad input ----------------------------------------------------------------------------------------------


async def test_models_and_health(stub: StartStub, serve: StartGateway) -> None:
    upstream = await stub()
    gateway = await serve([upstream.url])
    for path in ("/healthz", "/health"):
        assert await gateway.get(path) == (200, {"status": "ok"})
    status, ready = await gateway.get("/readyz")
    assert status == 200 and ready["pools"]["p"]["ready"] == 1
    for path in ("/v1/models", "/models", "/v1/models/"):
        status, listed = await gateway.get(path)
        assert status == 200 and [model["id"] for model in listed["data"]] == ["m", "alias"]
    assert (await gateway.get("/v1/models/alias"))[1]["id"] == "alias"
    status, missing = await gateway.get("/v1/models/nope")
    assert status == 404 and missing["error"]["code"] == "model_not_found"
    for path in ("/v1/nope", "/v1/modelsx", "/"):
        status, missing = await gateway.get(path)
        assert status == 404 and missing["error"]["code"] == "unknown_url"
    status, wrong = await gateway.get("/v1/chat/completions")
    assert status == 405 and wrong["error"]["code"] == "method_not_allowed"
    assert (await gateway.post({}, "/v1/models"))[0] == 405


async def test_not_ready_without_a_replica(stub: StartStub, serve: StartGateway) -> None:
    upstream = await stub()
    url = upstream.url
    await upstream.stop()
    gateway = await serve([url], ready=0)
    status, ready = await gateway.get("/readyz")
    assert status == 503 and ready["status"] == "starting"
    status, headers, body = await gateway.post(CHAT)
    assert status == 503 and body["error"]["code"] == "no_replica" and int(headers["Retry-After"]) >= 1


@pytest.mark.parametrize("stream", [False, True])
async def test_validation_is_the_same_with_and_without_streaming(
    stub: StartStub, serve: StartGateway, stream: bool
) -> None:  # public reports A22, B17
    upstream = await stub()
    gateway = await serve([upstream.url])
    for changes, expected, param, code in (
        ({"model": "no-such-model"}, 404, "model", "model_not_found"),
        ({"n": 0}, 400, "n", None),
        ({"messages": []}, 400, "messages", None),
    ):
        status, headers, body = await gateway.post({**CHAT, **changes, "stream": stream})
        assert (status, body["error"]["param"], body["error"]["code"]) == (expected, param, code)
        assert body["error"]["type"] == "invalid_request_error"
        assert body["error"]["request_id"] == headers["x-request-id"]
    status, _, body = await gateway.post(b'{"model": "m", "messages": [', headers={})
    assert status == 400 and body["error"]["code"] == "invalid_json"
    assert not upstream.posts
    assert (await gateway.post(CHAT))[0] == 200


async def test_bodies_over_the_limit(stub: StartStub, serve: StartGateway) -> None:
    upstream = await stub()
    gateway = await serve([upstream.url], max_body_bytes=20_000)
    status, _, body = await gateway.post(orjson.dumps({**CHAT, "x": "y" * 30_000}))
    assert status == 413 and body["error"]["code"] == "request_too_large"

    async def pieces() -> Any:
        for _ in range(100):
            yield b"x" * 1000

    async with gateway.session.post(
        gateway.base + "/v1/chat/completions", data=pieces(), headers={"Content-Type": "application/json"}
    ) as response:
        assert response.status == 413
    bomb = gzip.compress(b" " * 5_000_000)
    headers = {"Content-Encoding": "gzip"}
    assert (await gateway.post(bomb, headers=headers))[0] == 413
    assert (await gateway.post(gzip.compress(orjson.dumps(CHAT)), headers=headers))[0] == 200
    assert upstream.posts[0].json == CHAT and "content-encoding" not in upstream.posts[0].headers


async def test_content_types(stub: StartStub, serve: StartGateway) -> None:
    upstream = await stub()
    gateway = await serve([upstream.url])
    raw = orjson.dumps(CHAT)
    status, _, body = await gateway.post(raw, headers={"Content-Type": "text/plain"})
    assert status == 415 and body["error"]["code"] == "unsupported_media_type"
    for encoding in ("br", "zstd", "compress", "gzip, gzip"):
        status, _, body = await gateway.post(raw, headers={"Content-Encoding": encoding})
        assert (status, body["error"]["code"]) == (415, "unsupported_content_encoding")
    assert (await gateway.post(raw, headers={"Content-Type": "application/json; charset=utf-8"}))[0] == 200


async def test_a_body_that_stalls(stub: StartStub, serve: StartGateway) -> None:
    upstream = await stub()
    gateway = await serve([upstream.url], body_timeout_s=0.05)
    answer = await raw_http(
        gateway, b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
    )
    assert answer.startswith(b"HTTP/1.1 408 ") and b"request_timeout" in answer


async def raw_http(running: Running, request: bytes, *, more: bytes | None = None) -> bytes:
    """What comes back for raw bytes until the connection closes or is silent; `more` follows a first
    answer.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", running.gateway.port)
    writer.write(request)
    got = b""
    try:
        while True:
            async with asyncio.timeout(1.0):
                data = await reader.read(65536)
            if not data:
                break
            got += data
            if more is not None:
                writer.write(more)
                more = None
    except TimeoutError:
        pass
    writer.close()
    return got


async def test_expect_continue(stub: StartStub, serve: StartGateway) -> None:  # public report D23
    upstream = await stub()
    gateway = await serve([upstream.url], max_body_bytes=20_000)
    raw = orjson.dumps(CHAT)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n"
    head += b"Content-Length: %d\r\n\r\n"
    answer = await raw_http(gateway, head % len(raw), more=raw)
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK")
    assert "expect" not in upstream.posts[0].headers
    answer = await raw_http(gateway, head % 50_000)
    assert answer.startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    "lines",
    [
        b"Content-Length: 5\r\nTransfer-Encoding: chunked",
        b"Content-Length: 5\r\nContent-Length: 6",
        b"Content-Length: +5",
        b"Content-Length: 5\r\n folded",
    ],
)
async def test_ambiguous_framing_is_refused(stub: StartStub, serve: StartGateway, lines: bytes) -> None:
    upstream = await stub()  # public report D22
    gateway = await serve([upstream.url])
    smuggled = b"0\r\n\r\nGET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    answer = await raw_http(gateway, head + lines + b"\r\n\r\n" + smuggled)
    assert b" 400 " in answer.split(b"\r\n")[0] and b"invalid_http" in answer
    assert answer.count(b"HTTP/1.") == 1 and b"folded" not in answer


# --- tenants, classes, admission ----------------------------------------------------------------------------


async def test_keys(stub: StartStub, serve: StartGateway) -> None:  # public report D16
    upstream = await stub()
    gateway = await serve([upstream.url], extra=KEYS)
    bodies = []
    for headers in ({}, {"Authorization": "Bearer sk-expired-EXAMPLE-0001"}, {"x-api-key": "nope"}):
        status, answered, body = await gateway.post(CHAT, headers=headers)
        assert status == 401 and answered["WWW-Authenticate"] == "Bearer"
        body["error"].pop("request_id")
        bodies.append(body)
    assert bodies[0] == bodies[1] == bodies[2]
    assert bodies[0]["error"]["code"] == "invalid_api_key" and "EXAMPLE" not in str(bodies)
    assert (await gateway.get("/v1/models"))[0] == 401
    assert (await gateway.post(CHAT, headers={"x-api-key": "key-b"}))[0] == 200
    assert [entry.tenant for entry in await settled(gateway, 4)][0] == "b"


async def test_a_client_may_lower_its_class_and_not_raise_it(stub: StartStub, serve: StartGateway) -> None:
    upstream = await stub()
    gateway = await serve([upstream.url], extra=KEYS)
    for key, asked, expected in (
        ("key-b", "system", "interactive"),
        ("key-b", "batch", "batch"),
        ("key-a", "system", "system"),
    ):
        headers = {"x-api-key": key, "x-warmfront-class": asked}
        assert (await gateway.post(CHAT, headers=headers))[1]["x-warmfront-class"] == expected


async def test_slots_and_queues(stub: StartStub, serve: StartGateway) -> None:
    running = 0

    def reply(asked: Asked) -> Answer:
        nonlocal running
        running += 1
        return Answer([0.15, *whole(completion()).steps])

    upstream = await stub(reply)
    extra = "classes:\n  interactive: {share: 0.5, queue_limit: 2, queue_timeout: 5s}"
    gateway = await serve([upstream.url], extra=extra, default_slots=2)
    tasks = [asyncio.create_task(gateway.post(CHAT)) for _ in range(6)]
    await asyncio.sleep(0.08)
    assert running == 2
    results = await asyncio.gather(*tasks)
    assert sorted(status for status, _, _ in results) == [200, 200, 200, 200, 503, 503]
    refused = next(body for status, _, body in results if status == 503)
    assert refused["error"]["code"] == "queue_full"
    await settled(gateway, 6)


# --- streams ------------------------------------------------------------------------------------------------


async def stream(running: Running, body: dict[str, Any] = STREAM, **kwargs: Any) -> tuple[int, Any, bytes]:
    return await running.post(body, **kwargs)


async def test_a_stream_passes_byte_for_byte(stub: StartStub, serve: StartGateway) -> None:
    events = [b": hello\n\n", b'event: x\ndata: {"a":1}\n\n', *GOOD]
    upstream = await stub(lambda asked: sse(events))
    gateway = await serve([upstream.url])
    asked = {**STREAM, "stream_options": {"include_usage": True}}
    status, headers, body = await stream(gateway, asked)
    assert status == 200 and body == b"".join(events)
    assert headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert upstream.posts[0].json == asked
    assert "x-warmfront-replica" in headers


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
async def test_usage_is_hidden_and_counted(
    stub: StartStub, serve: StartGateway, options: dict[str, Any] | None
) -> None:  # public reports A05, A07
    upstream = await stub(lambda asked: sse(GOOD))
    gateway = await serve([upstream.url])
    status, _, body = await stream(gateway, {**STREAM, "stream_options": options})
    assert status == 200 and b"usage" not in body and body.count(DONE) == 1
    assert body == b"".join(event for event in GOOD if b"usage" not in event)
    assert upstream.posts[0].json["stream_options"] == {"include_usage": True}
    (entry,) = await settled(gateway)
    assert (entry.prompt_tokens, entry.completion_tokens) == (26, 3)
    assert metric(gateway, "warmfront_prompt_tokens_total", model="m", route="chat") == 26


async def test_one_byte_a_segment(stub: StartStub, serve: StartGateway) -> None:  # public report B16
    text = b"".join([delta("☂漢"), delta("x").replace(b"\n\n", b"\r\n\r\n"), delta(finish="stop"), DONE])
    upstream = await stub(
        lambda asked: sse([step for i in range(len(text)) for step in (text[i : i + 1], 0.0001)][:-1])
    )
    gateway = await serve([upstream.url])
    assert (await stream(gateway))[2] == text


async def test_connections_stay_in_step(stub: StartStub, serve: StartGateway) -> None:  # public report D20
    upstream = await stub(
        lambda asked: sse(GOOD) if asked.json.get("stream") else whole(completion("é☂" * 9))
    )
    gateway = await serve([upstream.url], mode="enforce")
    for i in range(40):
        head = f"Current time: 2026-03-01T09:05:{i:02d}Z\n" if i % 3 else "🕰️"
        messages = [{"role": "system", "content": head + "x"}, {"role": "user", "content": "☂"}]
        status, _, _ = await gateway.post({"model": "m", "messages": messages, "stream": bool(i % 2)})
        assert status == 200
    assert upstream.connections <= 3
    assert all(json.loads(asked.body)["model"] == "m" for asked in upstream.posts)


async def test_the_parts_of_ttft_add_up(stub: StartStub, serve: StartGateway) -> None:
    extension = {
        "timings": {"queue_s": 0.01, "prefill_s": 0.02, "first_sample_s": 0.005},
        "prefill_tokens": 9,
    }
    events = [0.06, delta("a"), 0.03, delta(finish="stop"), usage_event(warmfront=extension), DONE]
    upstream = await stub(lambda asked: sse(events))
    gateway = await serve([upstream.url])
    _, _, body = await stream(gateway)
    assert b"warmfront" not in body
    (entry,) = await settled(gateway)
    parts = entry.as_dict()["parts"]
    assert entry.ttft_s == pytest.approx(sum(parts.values()))
    assert 0.05 < entry.ttft_s < entry.total_s
    assert (parts["engine_queue"], parts["prefill"], parts["first_sample"]) == (0.01, 0.02, 0.005)
    assert parts["return"] > 0.01


async def test_parts_without_an_engines_report(stub: StartStub, serve: StartGateway) -> None:
    upstream = await stub(lambda asked: sse([0.05, *GOOD]))
    gateway = await serve([upstream.url])
    await stream(gateway)
    (entry,) = await settled(gateway)
    parts = entry.as_dict()["parts"]
    assert entry.ttft_s == pytest.approx(sum(parts.values()))
    assert parts["prefill"] > 0.04 and parts["return"] < 0.04


async def test_a_first_event_that_is_an_error(stub: StartStub, serve: StartGateway) -> None:  # report B13
    error = b'data: {"error":{"message":"bad input","code":400}}\n\n'
    upstream = await stub(lambda asked: sse([b": ping\n\n", error]))
    gateway = await serve([upstream.url])
    status, _, body = await stream(gateway)
    assert status == 400 and body["error"]["message"] == "bad input"
    assert len(upstream.posts) == 1


async def test_an_empty_stream_is_retried_and_then_a_502(stub: StartStub, serve: StartGateway) -> None:
    empty = await stub(lambda asked: sse([]))  # public report B14, run 1
    gateway = await serve([empty.url])
    status, _, body = await stream(gateway)
    assert status == 502 and body["error"]["type"] == "server_error"
    other = await stub(lambda asked: sse([b": only a comment\n\n"]))
    both = await serve([empty.url, other.url])
    assert (await stream(both))[0] == 502
    assert metric(both, "warmfront_upstream_retries_total", reason="empty") == 1
    good = await stub(lambda asked: sse(GOOD))
    rescued = await serve([empty.url, good.url])
    for _ in range(6):
        assert (await stream(rescued))[0] == 200


@pytest.mark.parametrize("clean", [True, False])
async def test_a_truncated_stream(stub: StartStub, serve: StartGateway, clean: bool) -> None:
    chunks = [delta("a"), delta("b"), delta("c")]  # public reports B14 run 2, D11
    first = await stub(lambda asked: sse(chunks, end=clean))
    second = await stub(lambda asked: sse(chunks, end=clean))
    gateway = await serve([first.url, second.url])
    status, _, body = await stream(gateway)
    assert status == 200 and body.startswith(b"".join(chunks))
    last = json.loads(body[len(b"".join(chunks)) :].removeprefix(b"data: "))
    assert last["error"]["code"] == "upstream_truncated"
    assert b"[DONE]" not in body and b'"finish_reason":"stop"' not in body
    assert len(first.posts) + len(second.posts) == 1
    (entry,) = await settled(gateway)
    assert entry.outcome == "truncated"


async def test_finished_without_done_is_complete(stub: StartStub, serve: StartGateway) -> None:
    upstream = await stub(lambda asked: sse(GOOD[:3]))
    gateway = await serve([upstream.url])
    _, _, body = await stream(gateway)
    assert body == b"".join(GOOD[:3])
    assert (await settled(gateway))[0].outcome == "ok"


async def test_an_error_in_mid_stream_is_the_end(stub: StartStub, serve: StartGateway) -> None:
    error = b'data: {"error":{"message":"boom"}}\n\n'
    upstream = await stub(lambda asked: sse([delta("a"), error, DONE]))
    gateway = await serve([upstream.url])
    _, _, body = await stream(gateway)
    assert body == delta("a") + error
    assert (await settled(gateway))[0].outcome == "upstream_error"


async def test_pings_until_the_first_data(stub: StartStub, serve: StartGateway) -> None:  # report B10
    upstream = await stub(lambda asked: Answer([0.2, *sse([0.1, *GOOD]).steps]))
    gateway = await serve([upstream.url], commit_after_s=0.05, ping_interval_s=0.05)
    status, _, body = await stream(gateway)
    assert status == 200
    pings = body.count(b": ping\n\n")
    assert 3 <= pings <= 7
    assert body.replace(b": ping\n\n", b"") == b"".join(event for event in GOOD if b"usage" not in event)
    assert (await settled(gateway))[0].completion_tokens == 3


async def test_a_late_failure_is_an_in_band_error(stub: StartStub, serve: StartGateway) -> None:
    upstream = await stub(lambda asked: Answer([0.15, *whole({"error": {"message": "no"}}, 500).steps]))
    gateway = await serve([upstream.url], commit_after_s=0.05, ping_interval_s=0.05)
    status, _, body = await stream(gateway)
    assert status == 200 and body.startswith(b": ping\n\n")
    assert json.loads(body.split(b"data: ")[1])["error"]["message"] == "no"
    assert b"[DONE]" not in body
    assert (await settled(gateway))[0].outcome == "upstream_error"


async def test_no_pings_when_switched_off(stub: StartStub, serve: StartGateway) -> None:
    upstream = await stub(lambda asked: Answer([0.1, *whole({"error": {"message": "no"}}, 400).steps]))
    gateway = await serve([upstream.url], commit_after_s=0.02, ping_interval_s=0)
    assert (await stream(gateway))[0] == 400


async def test_a_silent_upstream_is_given_up(stub: StartStub, serve: StartGateway) -> None:
    upstream = await stub(lambda asked: sse([delta("a"), 5.0]) if asked.json.get("stream") else Answer([5.0]))
    gateway = await serve([upstream.url], upstream_idle_s=0.1, retry_burst=0.0)
    _, _, body = await stream(gateway)
    assert b"upstream_truncated" in body
    assert (await gateway.post(CHAT))[0] == 502


async def test_a_stream_request_answered_with_json(stub: StartStub, serve: StartGateway) -> None:
    upstream = await stub(lambda asked: whole({"error": {"message": "x", "code": 422}}))
    gateway = await serve([upstream.url])
    assert (await stream(gateway))[0] == 422
    plain = await stub(lambda asked: whole(completion()))
    odd = await serve([plain.url])
    assert (await stream(odd))[0] == 502


# --- retries ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [CHAT, STREAM])
async def test_another_replica_is_tried_before_the_first_byte(
    stub: StartStub, serve: StartGateway, body: dict[str, Any]
) -> None:
    bad = [
        await stub(lambda asked: whole({"error": {"message": "busy"}}, 503)),
        await stub(lambda asked: Answer([], close=True)),
    ]
    good = await stub(lambda asked: sse(GOOD) if asked.json.get("stream") else whole(completion()))
    gateway = await serve([*(each.url for each in bad), good.url], retry_burst=100.0)
    for _ in range(8):
        assert (await gateway.post(body))[0] == 200
    entries = await settled(gateway, 8)
    assert all(entry.outcome == "ok" for entry in entries)
    assert max(entry.attempts for entry in entries) > 1


async def test_client_errors_are_not_retried(stub: StartStub, serve: StartGateway) -> None:
    error = {"error": {"message": "bad", "type": "invalid_request_error", "param": "top_p", "code": "x"}}
    upstream = await stub(lambda asked: whole(error, 422))
    other = await stub(lambda asked: whole(error, 422))
    gateway = await serve([upstream.url, other.url])
    for body in (CHAT, STREAM):
        status, _, answer = await gateway.post(body)
        answer["error"].pop("request_id")
        assert status == 422 and answer == error
    assert len(upstream.posts) + len(other.posts) == 2


async def test_foreign_error_shapes_become_openais(stub: StartStub, serve: StartGateway) -> None:
    shapes = [
        {"detail": "nope"},
        {"object": "error", "message": "nope"},
        {"error": "nope"},
        {"detail": ["x"]},
    ]
    upstream = await stub(lambda asked: whole(shapes.pop(0), 400))
    gateway = await serve([upstream.url])
    messages = [(await gateway.post(CHAT))[2]["error"]["message"] for _ in range(4)]
    assert messages == ["nope", "nope", "nope", '["x"]']


async def test_an_upstream_that_refuses_the_gateway_is_our_fault(
    stub: StartStub, serve: StartGateway
) -> None:
    upstream = await stub(lambda asked: whole({"error": {"message": "key sk-1 is bad"}}, 401))
    gateway = await serve([upstream.url])
    status, _, body = await gateway.post(CHAT)
    assert status == 502 and "sk-1" not in str(body)


async def test_retries_have_a_budget(stub: StartStub, serve: StartGateway) -> None:
    first = await stub(lambda asked: whole({}, 500))
    second = await stub(lambda asked: whole({}, 500))
    gateway = await serve([first.url, second.url], retry_burst=2.0, retry_ratio=0.0)
    for _ in range(10):
        assert (await gateway.post(CHAT))[0] == 500
    assert len(first.posts) + len(second.posts) == 12


async def test_a_dead_replica_is_marked_down(stub: StartStub, serve: StartGateway) -> None:
    dead, alive = await stub(), await stub()
    gateway = await serve([dead.url, alive.url], poll_interval_s=60.0)
    await dead.stop()
    for _ in range(10):
        assert (await gateway.post(CHAT))[0] == 200
    states = {replica.state for replica in gateway.gateway.pools["p"].replicas.values()}
    assert states == {"ready", "down"}


@pytest.mark.parametrize("body", [b"not json", b"[]", orjson.dumps({"error": {"message": "x"}}), b""])
async def test_a_200_that_is_no_answer(stub: StartStub, serve: StartGateway, body: bytes) -> None:
    upstream = await stub(lambda asked: whole(body))
    gateway = await serve([upstream.url])
    assert (await gateway.post(CHAT))[0] == 502


# --- clients that leave, stall or crowd ---------------------------------------------------------------------


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_client_that_leaves_ends_the_upstreams_work(
    stub: StartStub, serve: StartGateway, streaming: bool
) -> None:  # public report B08
    def reply(asked: Asked) -> Answer:
        return sse([delta("a"), 30.0, DONE]) if streaming else Answer([30.0])

    upstream = await stub(reply)
    gateway = await serve([upstream.url])

    async def leave() -> None:
        request = gateway.session.post(
            gateway.base + "/v1/chat/completions", json={**CHAT, "stream": streaming}
        )
        if streaming:
            async with request as response:
                await response.content.readany()
                response.close()
        else:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await request

    await asyncio.gather(*(leave() for _ in range(20)))
    async with asyncio.timeout(2):
        await asyncio.gather(*(asked.gone.wait() for asked in upstream.posts))
    entries = await settled(gateway, 20)
    assert {entry.outcome for entry in entries} == {"client_gone"}
    assert {entry.status for entry in entries} == {499}


async def test_a_client_that_does_not_read(stub: StartStub, serve: StartGateway) -> None:  # report B11
    event = delta("x" * 16_000)
    slow_down = 1500 * len(event)

    def reply(asked: Asked) -> Answer:
        return sse([event] * 1500) if asked.json.get("flood") else sse(GOOD)

    upstream = await stub(reply)
    gateway = await serve([upstream.url], write_timeout_s=0.3)
    raw = orjson.dumps({**STREAM, "flood": True})
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.gateway.port, limit=1024)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(raw)
        + raw
    )
    await asyncio.sleep(0.15)
    assert upstream.written < slow_down / 1.5  # bounded by the buffers on the way
    started = asyncio.get_running_loop().time()
    assert (await stream(gateway))[0] == 200  # others are served meanwhile
    assert asyncio.get_running_loop().time() - started < 0.25
    await eventually(lambda: len(gateway.gateway.ledger.recent(10)) == 2)
    assert {entry.outcome for entry in await settled(gateway, 2)} == {"ok", "stalled_client"}
    writer.close()
    del reader


async def test_many_streams_at_once(stub: StartStub, serve: StartGateway) -> None:  # public report D25
    upstream = await stub(lambda asked: sse([delta("a"), 0.4, delta(finish="stop"), DONE]))
    gateway = await serve([upstream.url], default_slots=1000)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def one() -> int:
            async with session.post(gateway.base + "/v1/chat/completions", json=STREAM) as response:
                await response.read()
                return response.status

        tasks = [asyncio.create_task(one()) for _ in range(200)]
        await eventually(lambda: len(upstream.posts) == 200, 3.0)
        assert set(await asyncio.gather(*tasks)) == {200}
    await settled(gateway, 200)


# --- canonicalization on the way, policies, lifetime --------------------------------------------------------


def with_clock(second: int, **more: Any) -> dict[str, Any]:
    system = f"Current time: 2026-03-01T09:05:{second:02d}Z\nUser: Ada\n\n" + "You answer questions. " * 40
    return {
        "model": "m",
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": "hi"}],
        **more,
    }


async def test_enforce_sends_equal_prefixes(stub: StartStub, serve: StartGateway) -> None:
    upstream = await stub()
    gateway = await serve([upstream.url], mode="enforce")
    for second in range(3):
        await gateway.post(with_clock(second))
    systems = {asked.json["messages"][0]["content"] for asked in upstream.posts}
    assert len(systems) == 1 and "2026" not in systems.pop()
    entries = await settled(gateway, 3)
    assert entries[0].captured_tokens > 150 and entries[2].captured_tokens == 0
    status, headers, _ = await gateway.post(with_clock(9), headers={"x-warmfront-canon": "off"})
    assert headers["x-warmfront-canon"].startswith("off") and "2026" in str(upstream.posts[-1].json)


async def test_observe_sends_what_came(stub: StartStub, serve: StartGateway) -> None:
    upstream = await stub()
    gateway = await serve([upstream.url], mode="observe")
    for second in range(4):
        await gateway.post(orjson.dumps(with_clock(second)))
    assert [asked.body for asked in upstream.posts] == [
        orjson.dumps(with_clock(second)) for second in range(4)
    ]
    labels = {"model": "m", "route": "chat"}
    await eventually(lambda: metric(gateway, "warmfront_recoverable_tokens_total", **labels))


async def test_a_policy_is_replaced_as_a_whole(stub: StartStub, serve: StartGateway) -> None:
    first, second = await stub(), await stub()
    gateway = await serve([first.url])
    before = gateway.gateway.policy
    await gateway.gateway.apply_policy(load_policy(policy_text([second.url], mode="enforce")))
    assert await gateway.gateway.pools["p"].wait_ready(1, 5)
    assert gateway.gateway.policy.version != before.version
    status, headers, _ = await gateway.post(CHAT)
    assert status == 200 and len(second.posts) == 1 and not first.posts
    assert headers["x-warmfront-policy"] == gateway.gateway.policy.version
    renamed = policy_text([second.url]).replace("  p:\n", "  q:\n").replace("pool: p", "pool: q")
    await gateway.gateway.apply_policy(load_policy(renamed))
    assert list(gateway.gateway.pools) == ["q"]
    assert await gateway.gateway.pools["q"].wait_ready(1, 5)
    assert (await gateway.post(CHAT))[0] == 200


async def test_without_tenants_only_loopback_is_served(serve: StartGateway) -> None:
    with pytest.raises(ValueError, match="loopback"):
        await serve(["http://127.0.0.1:9"], host="0.0.0.0", ready=0)


async def test_stopping_lets_streams_finish(stub: StartStub, serve: StartGateway) -> None:
    upstream = await stub(lambda asked: sse([delta("a"), 0.2, *GOOD]))
    gateway = await serve([upstream.url], drain_timeout_s=2.0)
    task = asyncio.create_task(stream(gateway))
    await asyncio.sleep(0.1)
    await gateway.gateway.stop()
    _, _, body = await task
    assert body.endswith(DONE)


async def test_gauges_and_canary(stub: StartStub, serve: StartGateway) -> None:
    upstream = await stub()
    gateway = await serve([upstream.url], mode="enforce")
    await gateway.post(with_clock(1))
    gateway.gateway.publish_gauges()
    replica = next(iter(gateway.gateway.pools["p"].replicas))
    assert metric(gateway, "warmfront_replica_up", pool="p", replica=replica) == 1
    assert metric(gateway, "warmfront_replica_resident_blocks", pool="p", replica=replica) > 10
    assert metric(gateway, "warmfront_canon_enforcing", route="chat") == 1
    await asyncio.sleep(0.12)
    assert metric(gateway, "warmfront_loop_delay_seconds_count") >= 1
