"""The load generator against a real socket: order of turns, concurrency, timings, what counts as failure."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from gateway.bench.load import LoadOptions, chat_url, run_load
from gateway.bench.workload import Conversation, Turn


class Stub:
    """A chat server that answers the number of messages it got, and remembers every body."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.active = 0
        self.peak = 0
        self.mode = "good"

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers.get("Authorization"))
        if self.mode == "refuse":
            return web.json_response({"error": {"message": "no"}}, status=429)
        self.active += 1
        self.peak = max(self.peak, self.active)
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "x-warmfront-replica": "r1"}
        )
        await response.prepare(request)
        await response.write(b": ping\n\n")
        await self._event(response, {"choices": [{"index": 0, "delta": {"role": "assistant"}}]})
        await asyncio.sleep(0.05)
        for word in ("m", str(len(body["messages"]))):
            await self._event(response, {"choices": [{"index": 0, "delta": {"content": word}}]})
            await asyncio.sleep(0.02)
        self.active -= 1
        if self.mode == "truncate":
            return response
        if self.mode == "error":
            await self._event(response, {"error": {"message": "replica lost"}})
            return response
        usage = {"prompt_tokens": 40, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 32}}
        await self._event(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _event(self, response: web.StreamResponse, value: dict[str, Any]) -> None:
        await response.write(b"data: " + json.dumps(value).encode() + b"\n\n")


@pytest.fixture
async def stub() -> AsyncIterator[tuple[Stub, str]]:
    stub = Stub()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", stub.chat)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    yield stub, f"http://127.0.0.1:{port}"
    await runner.cleanup()


def conversations(number: int, turns: int = 1) -> list[Conversation]:
    return [
        Conversation(f"c{n}", tuple(Turn(f"q{t}", f"s{t}", 4) for t in range(turns)), api_key=f"k{n}")
        for n in range(number)
    ]


async def test_closed_loop_keeps_turn_order_and_concurrency(stub: tuple[Stub, str]) -> None:
    server, url = stub
    seen: list[tuple[int, int, int]] = []
    result = await run_load(
        conversations(5, 2), LoadOptions(url, "m", concurrency=2), lambda *a: seen.append(a)
    )
    assert len(result.requests) == 10 and all(item.ok for item in result.requests)
    assert server.peak == 2
    assert seen[-1] == (10, 10, 0)
    second = [body for body in server.bodies if len(body["messages"]) > 2]
    assert len(second) == 5
    assert [m["role"] for m in second[0]["messages"]] == ["system", "user", "assistant", "user"]
    assert second[0]["messages"][2]["content"] == "m2" and second[0]["messages"][0]["content"] == "s1"
    assert set(server.keys) == {f"Bearer k{n}" for n in range(5)}


async def test_first_token_is_counted_at_content_not_at_the_role_chunk(stub: tuple[Stub, str]) -> None:
    result = await run_load(conversations(1), LoadOptions(stub[1], "m"))
    item = result.requests[0]
    assert item.ttft_s is not None and item.ttft_s >= 0.05
    assert len(item.gaps_s) == 1 and item.gaps_s[0] >= 0.015
    assert (item.prompt_tokens, item.cached_tokens, item.output_tokens) == (40, 32, 2)
    assert item.tpot_s is not None and item.replica == "r1"


async def test_open_loop_does_not_wait_for_completions(stub: tuple[Stub, str]) -> None:
    options = LoadOptions(stub[1], "m", rate_per_s=200, arrivals="constant")
    result = await run_load(conversations(8), options)
    assert len(result.requests) == 8 and stub[0].peak > 2


@pytest.mark.parametrize(
    ("mode", "message"),
    [("refuse", "HTTP 429"), ("truncate", "without \\[DONE\\]"), ("error", "replica lost")],
)
async def test_failures_are_named_and_carry_no_success(
    stub: tuple[Stub, str], mode: str, message: str
) -> None:
    stub[0].mode = mode
    result = await run_load(conversations(1), LoadOptions(stub[1], "m"))
    assert re.search(message, result.requests[0].error or "")


async def test_a_server_that_is_not_there_fails_the_request_only() -> None:
    result = await run_load(conversations(2), LoadOptions("http://127.0.0.1:9", "m"))
    assert [item.ok for item in result.requests] == [False, False]


def test_chat_url_takes_the_base_with_or_without_v1() -> None:
    assert chat_url("http://h/v1/") == chat_url("http://h") == "http://h/v1/chat/completions"
