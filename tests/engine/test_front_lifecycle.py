"""Clients that leave, readers that stall, a step process that dies, signals: nothing stays behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

GO_ON = [{"role": "user", "content": "go on"}]
LONG = {"model": "fake", "messages": GO_ON, "max_tokens": 4000, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(start_replica: Any) -> Iterator[Any]:
    speed = ("--fake-decode-ms", "1", "--fake-prefill-tokens-per-s", "2000")
    limits = ("--max-seqs", "32", "--ping-s", "0.1", "--write-timeout-s", "0.3", "--body-timeout-s", "0.3")
    with start_replica("--fake", *speed, *limits) as replica:
        yield replica


def session(url: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(30))


async def cache(http: aiohttp.ClientSession) -> dict[str, Any]:
    async with http.get("/engine/cache") as response:
        figures: dict[str, Any] = await response.json()
        return figures


async def until_idle(http: aiohttp.ClientSession, within_s: float) -> dict[str, Any]:
    deadline = time.monotonic() + within_s
    while True:
        figures = await cache(http)
        if not (figures["running"] or figures["waiting"] or figures["streams"]):
            return figures
        assert time.monotonic() < deadline, f"still busy: {figures}"
        await asyncio.sleep(0.02)


async def leave_after_three_chunks(http: aiohttp.ClientSession) -> None:
    async with http.post("/v1/chat/completions", json={**LONG, "stream": True}) as response:
        for _ in range(6):
            await response.content.readline()
        response.close()


async def test_clients_that_leave_free_their_sequences(server: Any) -> None:
    async with session(server.url) as http:
        for _ in range(5):
            await asyncio.gather(*(leave_after_three_chunks(http) for _ in range(20)))
        figures = await until_idle(http, 1.5)
        assert figures["used"] == 0
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3), http.post("/v1/chat/completions", json=LONG):
                pass
        figures = await until_idle(http, 1.5)
        assert figures["free"] + figures["cached"] == figures["total"]
        short = {**LONG, "max_tokens": 2}
        async with http.post("/v1/chat/completions", json=short) as response:
            assert response.status == 200


async def test_a_comment_keeps_the_connection_alive_until_the_first_token(server: Any) -> None:
    async with session(server.url) as http:
        slow = [{"role": "user", "content": "x" * 1000}]
        body = {**LONG, "stream": True, "max_tokens": 3, "messages": slow}
        async with http.post("/v1/chat/completions", json=body) as response:
            blocks = (await response.read()).split(b"\n\n")
        pings = [block for block in blocks if block == b": ping"]
        assert len(pings) >= 3
        assert blocks[: len(pings)] == pings
        assert blocks[-2] == b"data: [DONE]"


async def test_a_reader_that_takes_nothing_is_cut(server: Any) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    wide = {**LONG, "stream": True, "n": 8, "max_tokens": 2000, "logprobs": True, "top_logprobs": 20}
    body = orjson.dumps(wide)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, int(port)))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        async with session(server.url) as http:
            await asyncio.sleep(0.3)
            assert (await cache(http))["streams"] == 1
            figures = await until_idle(http, 10)
            assert figures["used"] == 0


async def test_an_upload_that_stalls_is_refused(server: Any) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    async with asyncio.timeout(5):
        assert b" 408 " in await reader.readline()
    writer.close()
    await writer.wait_closed()


async def test_a_killed_step_process_ends_streams_in_band_and_the_front(start_replica: Any) -> None:
    with start_replica("--fake", "--fake-decode-ms", "5") as replica:
        async with session(replica.url) as http:
            async with http.get("/engine/info") as response:
                step_pid = (await response.json())["step_pid"]
            whole = asyncio.create_task(post_whole(http))
            async with http.post("/v1/chat/completions", json={**LONG, "stream": True}) as response:
                await response.content.readline()
                os.kill(step_pid, signal.SIGKILL)
                rest = await response.read()
            last = rest.strip().split(b"\n\n")[-1]
            assert orjson.loads(last.removeprefix(b"data: "))["error"]["code"] == "engine_stopped"
            assert b"[DONE]" not in rest
            status, body = await whole
            assert (status, body["error"]["code"]) == (500, "engine_stopped")
        assert await asyncio.to_thread(replica.process.wait, 10) == 1


async def post_whole(http: aiohttp.ClientSession) -> tuple[int, dict[str, Any]]:
    async with http.post("/v1/chat/completions", json=LONG) as response:
        return response.status, await response.json()


async def test_sigterm_lets_streams_end(start_replica: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with start_replica("--fake", "--fake-decode-ms", "5", "--runtime-dir", str(folder)) as replica:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
        async with session(replica.url) as http:
            async with http.post(
                "/v1/chat/completions", json={**LONG, "stream": True, "max_tokens": 60}
            ) as response:
                await response.content.readline()
                replica.process.send_signal(signal.SIGTERM)
                rest = await response.read()
            assert rest.endswith(b"data: [DONE]\n\n")
        assert await asyncio.to_thread(replica.process.wait, 10) == 0
        assert not any(folder.iterdir())


async def test_sigterm_cuts_streams_after_the_grace_period(start_replica: Any) -> None:
    with start_replica("--fake", "--fake-decode-ms", "5", "--grace-s", "0.3") as replica:
        body = {**LONG, "stream": True}
        async with session(replica.url) as http, http.post("/v1/chat/completions", json=body) as response:
            await response.content.readline()
            replica.process.send_signal(signal.SIGTERM)
            rest = await response.read()
            assert await asyncio.to_thread(replica.process.wait, 5) == 0
        last = rest.strip().split(b"\n\n")[-1]
        assert orjson.loads(last.removeprefix(b"data: "))["error"]["code"] == "engine_stopping"


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_the_front_ends_with_its_parent_and_the_step_process_with_it(start_replica: Any) -> None:
    parent = await asyncio.create_subprocess_exec("sleep", "60")
    with start_replica("--fake", "--parent-pid", str(parent.pid)) as replica:
        async with session(replica.url) as http, http.get("/engine/info") as response:
            step_pid = (await response.json())["step_pid"]
        parent.kill()
        await parent.wait()
        assert await asyncio.to_thread(replica.process.wait, 10) == 0
        assert not alive(step_pid)


async def test_a_killed_front_takes_the_step_process_with_it(start_replica: Any) -> None:
    with start_replica("--fake") as replica:
        async with session(replica.url) as http, http.get("/engine/info") as response:
            step_pid = (await response.json())["step_pid"]
        replica.process.kill()
        for _ in range(100):
            if not alive(step_pid):
                return
            await asyncio.sleep(0.05)
        raise AssertionError("the step process lives on")


async def test_while_loading_and_when_loading_fails(start_replica: Any, tmp_path: Path) -> None:
    with start_replica("--model", str(tmp_path / "nothing"), wait=False) as replica:
        assert await asyncio.to_thread(replica.process.wait, 10) == 1


@pytest.mark.parametrize("options", [[], ["--fake", "--max-seqs", "0"], ["--fake", "--dtype", "fp8"]])
def test_a_wrong_command_line_exits_2(options: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "engine", "serve", *options], capture_output=True, timeout=20
    )
    assert done.returncode == 2
    assert b"error" in done.stderr


def test_help_is_quick_and_loads_no_torch() -> None:
    code = "import sys, engine.__main__ as m; m.build_parser(); assert 'aiohttp' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=20)
    done = subprocess.run([sys.executable, "-m", "engine", "--help"], capture_output=True, timeout=20)
    assert b"example" in done.stdout


def test_the_front_imports_no_torch() -> None:
    code = "import sys, engine.worker.front.serve; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=20)
