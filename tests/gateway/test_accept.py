"""Which bodies and which senders are let in."""

from __future__ import annotations

import aiohttp
import orjson
import pytest
from conftest import Running, StartGateway, StartStub

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
RAW = orjson.dumps(CHAT)
KEYS = "tenants:\n  a: {keys: [{plain: key-a}]}"


async def send(running: Running, body: object = RAW, **headers: str) -> tuple[int, str | None]:
    """(status, error code) of a POST with these headers alone."""
    skip = [] if "Content-Type" in headers else ["Content-Type"]
    url = running.base + "/v1/chat/completions"
    async with running.session.post(url, data=body, headers=headers, skip_auto_headers=skip) as response:
        answer = await response.json()
        return response.status, answer.get("error", {}).get("code")


@pytest.mark.parametrize(
    "kind", ["application/json", "Application/JSON; charset=utf-8", "application/x+json"]
)
async def test_json_types(stub: StartStub, serve: StartGateway, kind: str) -> None:
    gateway = await serve([(await stub()).url])
    assert (await send(gateway, **{"Content-Type": kind}))[0] == 200


@pytest.mark.parametrize(
    "kind",
    [
        "text/plain",
        "text/plain; application/json",
        "text/plain;charset=json",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=json",
        "+json",
        "json",
        "application/jsonp",
    ],
)
async def test_other_types(stub: StartStub, serve: StartGateway, kind: str) -> None:
    upstream = await stub()
    gateway = await serve([upstream.url])
    assert await send(gateway, **{"Content-Type": kind}) == (415, "unsupported_media_type")
    assert not upstream.posts


async def test_a_body_without_a_type_is_no_pages(stub: StartStub, serve: StartGateway) -> None:
    gateway = await serve([(await stub()).url])
    assert (await send(gateway))[0] == 200
    assert await send(gateway, Origin="http://localhost:3000") == (415, "unsupported_media_type")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:8080"}, 200),
        ({"Host": "[::1]:8080"}, 200),
        ({"Origin": "http://localhost:3000"}, 200),
        ({"Origin": "https://127.0.0.1"}, 200),
        ({"Host": "rebound.evil.org"}, 403),
        ({"Host": "127.evil.org"}, 403),
        ({"Host": ""}, 403),
        ({"Origin": "https://evil.org"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://localhost.evil.org"}, 403),
    ],
)
async def test_without_keys_only_this_machine_is_answered(
    stub: StartStub, serve: StartGateway, headers: dict[str, str], status: int
) -> None:
    upstream = await stub()
    gateway = await serve([upstream.url])
    answered, code = await send(gateway, **{"Content-Type": "application/json", **headers})
    assert (answered, code) == (status, None if status == 200 else "foreign_origin")
    assert len(upstream.posts) == (status == 200)
    assert gateway.gateway.ledger.recent(1)[0].status == status
    assert (await gateway.get("/v1/models", **headers))[0] == status
    assert (await gateway.get("/healthz", **headers))[0] == 200


async def test_with_keys_any_site_may_send(stub: StartStub, serve: StartGateway) -> None:
    gateway = await serve([(await stub()).url], extra=KEYS)
    headers = {"Content-Type": "application/json", "Host": "llm.example", "Origin": "https://app.example"}
    assert (await send(gateway, **headers, **{"x-api-key": "key-a"}))[0] == 200
    assert (await send(gateway, **headers))[0] == 401


async def test_a_form_is_refused(stub: StartStub, serve: StartGateway) -> None:
    gateway = await serve([(await stub()).url])
    form = aiohttp.FormData({"model": "m"})
    async with gateway.session.post(gateway.base + "/v1/completions", data=form) as response:
        assert response.status == 415
