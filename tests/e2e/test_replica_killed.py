"""A replica killed mid-stream: an in-band error ends its stream, others finish, it comes back cold."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from typing import Any

import aiohttp

from tests.e2e.conftest import MODEL, Stack


async def stream(
    session: aiohttp.ClientSession, stack: Stack, text: str, started: asyncio.Event
) -> dict[str, Any]:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 100,
        "ignore_eos": True,
        "stream": True,
    }
    headers = {"Authorization": "Bearer key-acme"}
    found: dict[str, Any] = {"chunks": 0, "error": None, "done": 0, "finish": []}
    async with session.post(f"{stack.base_url}/v1/chat/completions", json=body, headers=headers) as response:
        found["replica"] = response.headers["x-warmfront-replica"]
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue
            data = line[6:].strip()
            if data == b"[DONE]":
                found["done"] += 1
                continue
            event = json.loads(data)
            if "error" in event:
                found["error"] = event["error"]
                continue
            found["chunks"] += 1
            found["finish"] += [c["finish_reason"] for c in event["choices"] if c["finish_reason"]]
            if found["chunks"] == 5:
                started.set()
    return found


async def state(session: aiohttp.ClientSession, stack: Stack) -> dict[str, Any]:
    async with session.get(f"{stack.admin_url}/admin/state") as response:
        value: dict[str, Any] = await response.json()
        return value


async def test_sigkill_mid_stream(stack: Stack) -> None:
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{stack.admin_url}/admin/state") as response:
            before = await response.json()
        bases = {replica["id"]: replica["base_url"] for replica in before["replicas"]}
        started = [asyncio.Event() for _ in range(4)]
        tasks = [
            asyncio.create_task(stream(session, stack, f"Tell a long story about number {n}.", started[n]))
            for n in range(4)
        ]
        await asyncio.gather(*(event.wait() for event in started))
        victim = max((await state(session, stack))["replicas"], key=lambda r: r["inflight"])["id"]
        async with session.get(f"{bases[victim]}/engine/info") as response:
            step_pid = (await response.json())["pid"]
        os.kill(step_pid, signal.SIGKILL)
        results = await asyncio.gather(*tasks)
        lost = [item for item in results if item["replica"] == victim]
        kept = [item for item in results if item["replica"] != victim]
        assert lost and all(item["error"] and item["done"] == 0 and not item["finish"] for item in lost)
        assert all(item["error"]["message"] for item in lost)
        assert all(
            item["done"] == 1 and item["finish"] == ["length"] and item["error"] is None for item in kept
        )

        row = next(r for r in (await state(session, stack))["replicas"] if r["id"] == victim)
        assert row["state"] == "ready" or row["resident_blocks"] == 0
        deadline = time.monotonic() + 60
        while True:
            row = next(r for r in (await state(session, stack))["replicas"] if r["id"] == victim)
            if row["state"] == "ready" or time.monotonic() > deadline:
                break
            assert row["resident_blocks"] == 0 and row["inflight"] == 0
            await asyncio.sleep(0.2)
        assert row["state"] == "ready"
        again = await asyncio.gather(
            *(stream(session, stack, f"Say hello to number {n}.", asyncio.Event()) for n in range(2))
        )
        assert all(item["done"] == 1 and item["error"] is None for item in again)
