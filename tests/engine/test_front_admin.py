"""Health, description, cache, pins and metrics of a replica."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio


@pytest.fixture(scope="module")
def server(start_replica: Any) -> Iterator[Any]:
    with start_replica(
        "--fake", "--name", "r7", "--kv-tokens", "16384", "--served-model-name", "tiny"
    ) as running:
        yield running


@pytest_asyncio.fixture
async def http(server: Any) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(server.url, timeout=aiohttp.ClientTimeout(30)) as session:
        yield session


async def get(http: aiohttp.ClientSession, path: str) -> dict[str, Any]:
    async with http.get(path) as response:
        assert response.status == 200
        body: dict[str, Any] = await response.json()
        return body


async def test_health_and_info(http: aiohttp.ClientSession) -> None:
    assert await get(http, "/health") == {"status": "ok"}
    info = await get(http, "/engine/info")
    assert (info["model"], info["name"], info["block_size"], info["num_blocks"]) == ("tiny", "r7", 16, 1024)
    assert info["events"].startswith("ipc://")
    assert info["events_replay"].startswith("ipc://")
    assert {
        "fingerprint",
        "context_length",
        "max_seqs",
        "dtype",
        "mode",
        "model_dir",
        "pid",
        "threads",
    } <= set(info)


async def test_the_extension_is_refused_without_private(http: aiohttp.ClientSession) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "warmfront": {}}
    async with http.post("/v1/chat/completions", json=body) as response:
        error = (await response.json())["error"]
    assert (response.status, error["param"]) == (400, "warmfront")


async def test_cache_figures_and_clear(http: aiohttp.ClientSession) -> None:
    body = {"model": "tiny", "prompt": "x" * 100, "max_tokens": 2}
    async with http.post("/v1/completions", json=body) as response:
        assert response.status == 200
    before = await get(http, "/engine/cache")
    assert before["cached"] > 0
    assert before["free"] + before["cached"] + before["used"] == before["total"] == 1024
    async with http.post("/engine/cache/clear") as response:
        after = await response.json()
    assert (after["cached"], after["epoch"]) == (0, before["epoch"] + 1)
    assert {"running", "waiting", "free_slots", "prefill_tokens_pending", "query_tokens_total"} <= set(after)


async def test_pins_from_warming_to_gone(http: aiohttp.ClientSession) -> None:
    pin = {"id": "p1", "token_ids": list(range(64)), "seed": "00" * 16, "ttl_s": None, "tenant": "acme"}
    async with http.post("/engine/pins", json=pin) as response:
        made = await response.json()
    assert (made["id"], made["tokens"], made["blocks"]) == ("p1", 64, 4)
    for _ in range(100):
        listed = await get(http, "/engine/pins")
        if listed["pins"][0]["state"] == "resident":
            break
        await asyncio.sleep(0.02)
    assert listed["pins"][0]["state"] == "resident"
    assert listed["pinned_blocks"] == 4
    assert listed["budget_blocks"] >= 4
    async with http.delete("/engine/pins/p1") as response:
        assert (await response.json())["state"] == "released"
    assert (await get(http, "/engine/pins"))["pins"] == []
    async with http.delete("/engine/pins/p1") as response:
        assert response.status == 404


@pytest.mark.parametrize(
    ("param", "change"),
    [
        ("id", {"id": None}),
        ("id", {"id": "a/b"}),
        ("token_ids", {"token_ids": [258]}),
        ("token_ids", {"token_ids": None}),
        ("token_ids", {"token_ids": [1] * 9000}),
        ("seed", {"seed": "x"}),
        ("ttl_s", {"ttl_s": 0}),
    ],
)
async def test_a_bad_pin_is_refused_by_name(
    http: aiohttp.ClientSession, param: str, change: dict[str, Any]
) -> None:
    pin = {"id": "p2", "token_ids": [1] * 32, "seed": "00" * 16, **change}
    async with http.post("/engine/pins", json=pin) as response:
        error = (await response.json())["error"]
    assert (response.status, error["param"]) == (400, param)


async def test_metrics(http: aiohttp.ClientSession) -> None:
    async with http.post(
        "/v1/completions", json={"model": "tiny", "prompt": "x", "max_tokens": 3}
    ) as response:
        assert response.status == 200
    async with http.get("/metrics") as response:
        text = await response.text()
    assert 'warmfront_engine_requests_total{code="200",endpoint="/completions"}' in text
    assert "warmfront_engine_blocks 1024.0" in text
    assert "warmfront_engine_output_tokens_total" in text
    assert "warmfront_engine_query_tokens_total" in text
    assert "warmfront_engine_ttft_seconds_bucket" in text
