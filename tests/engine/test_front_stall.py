"""A step process that is frozen: the front says so, goes on answering, and takes it back when it goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp

LIMITS = ("--fake", "--stall-s", "0.8", "--kv-tokens", "1024")


async def get(http: aiohttp.ClientSession, path: str) -> tuple[int, dict[str, Any]]:
    async with http.get(path) as response:
        return response.status, await response.json()


async def until(condition: Callable[[], Awaitable[bool]], within_s: float = 8.0) -> None:
    deadline = time.monotonic() + within_s
    while not await condition():
        assert time.monotonic() < deadline, "the condition never held"
        await asyncio.sleep(0.05)


async def test_a_frozen_step_process_is_stalled_until_it_goes_on(start_replica: Any) -> None:
    with start_replica(*LIMITS) as replica, _Frozen() as frozen:
        async with aiohttp.ClientSession(replica.url) as http:
            _, info = await get(http, "/engine/info")
            await asyncio.sleep(1.2)
            assert await get(http, "/health") == (200, {"status": "ok"}), "idle is not stalled"
            _, before = await get(http, "/engine/cache")
            assert (before["stalled"], before["step_age_s"] < 0.5) == (False, True)
            frozen.freeze(info["step_pid"])

            async def stalled() -> bool:
                return await get(http, "/health") == (503, {"status": "stalled"})

            await until(stalled)
            began = time.monotonic()
            answers = await asyncio.gather(*(get(http, "/engine/cache") for _ in range(3)))
            assert time.monotonic() - began < 2.0
            for status, figures in answers:
                assert (status, figures["stalled"], figures["total"]) == (200, True, 64)
                assert figures["step_age_s"] > 0.8
            async with http.get("/metrics") as response:
                (line,) = [
                    line
                    for line in (await response.text()).splitlines()
                    if line.startswith("warmfront_engine_step_age_seconds")
                ]
            assert float(line.split()[1]) > 0.8
            frozen.thaw()

            async def well() -> bool:
                return await get(http, "/health") == (200, {"status": "ok"})

            await until(well)
            _, after = await get(http, "/engine/cache")
            assert (after["stalled"], after["epoch"]) == (False, before["epoch"])
            async with http.post("/engine/cache/clear") as response:
                cleared = await response.json()
            assert cleared["epoch"] == before["epoch"] + 1, "each query has its own answer"


async def test_a_front_that_was_stopped_itself_blames_nobody(start_replica: Any) -> None:
    with start_replica(*LIMITS) as replica, _Frozen() as frozen:
        async with aiohttp.ClientSession(replica.url) as http:
            assert (await get(http, "/health"))[0] == 200
            frozen.freeze(replica.process.pid)
            await asyncio.sleep(1.5)
            frozen.thaw()
            assert await get(http, "/health") == (200, {"status": "ok"})


async def test_a_frozen_step_process_goes_with_a_killed_front(start_replica: Any) -> None:
    with start_replica(*LIMITS) as replica:
        async with aiohttp.ClientSession(replica.url) as http:
            _, info = await get(http, "/engine/info")
        os.kill(info["step_pid"], signal.SIGSTOP)
        replica.process.kill()

        async def gone() -> bool:
            return not alive(info["step_pid"])

        await until(gone)


async def test_a_pin_beyond_the_pool_is_refused_with_both_sizes(start_replica: Any) -> None:
    pin = {"id": "p", "token_ids": [1] * 2000, "seed": "00" * 16}
    with start_replica(*LIMITS) as replica:
        async with (
            aiohttp.ClientSession(replica.url) as http,
            http.post("/engine/pins", json=pin) as response,
        ):
            error = (await response.json())["error"]
    assert (response.status, error["code"]) == (400, "context_length_exceeded")
    assert "2000 tokens" in error["message"]
    assert "KV pool" in error["message"]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class _Frozen:
    """A process under SIGSTOP, which goes on at the end whatever happened."""

    def __init__(self) -> None:
        self._pid = 0

    def __enter__(self) -> _Frozen:
        return self

    def __exit__(self, *_: object) -> None:
        self.thaw()

    def freeze(self, pid: int) -> None:
        self._pid = pid
        os.kill(pid, signal.SIGSTOP)

    def thaw(self) -> None:
        if self._pid and alive(self._pid):
            os.kill(self._pid, signal.SIGCONT)
