"""A `warmfront serve` process under test, and the few admin calls a benchmark needs.

Always holds: the process is gone when `stop` returns; admin failures raise with what the server said.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from canonicalizer.tokens import TextModel
from gateway.bench.progress import ProgressBar


@dataclass(slots=True)
class Server:
    """A running server: its process, data-plane and admin URLs."""

    process: asyncio.subprocess.Process
    base_url: str
    admin_url: str

    async def apply_policy(self, session: aiohttp.ClientSession, text: str) -> None:
        """Hot-reload the policy `text`."""
        await self._post(session, "/admin/policy", {"text": text, "source": "benchmark"})

    async def clear_caches(self, session: aiohttp.ClientSession) -> None:
        """Empty every replica's prefix cache; pins go back to warming."""
        await self._post(session, "/admin/cache/clear", {})

    async def pins(self, session: aiohttp.ClientSession) -> dict[str, Any]:
        """The pins, how many of them are not settled yet, and the warm-up so far (tokens, seconds)."""
        async with session.get(f"{self.admin_url}/admin/pins") as response:
            value: dict[str, Any] = await response.json()
            return value

    async def wait_for_pins(
        self, session: aiohttp.ClientSession, count: int, bar: ProgressBar, timeout_s: float = 300.0
    ) -> None:
        """Wait until `count` pins are resident and none is on its way. RuntimeError when time is over."""
        deadline = time.monotonic() + timeout_s
        while True:
            state = await self.pins(session)
            resident = sum(pin["state"] == "resident" for pin in state["pins"])
            bar(min(resident, count), count)
            if resident >= count and not state["pending"]:
                return
            if time.monotonic() > deadline:
                raise RuntimeError(f"pins not resident after {timeout_s:.0f} s: {state['pins']}")
            await asyncio.sleep(0.1)

    async def wait_for_replicas(self, count: int, timeout_s: float = 120.0) -> None:
        """Wait until `count` replicas are ready."""
        async with aiohttp.ClientSession() as session, asyncio.timeout(timeout_s):
            while True:
                async with session.get(f"{self.admin_url}/admin/state") as response:
                    replicas = (await response.json())["replicas"]
                if sum(replica["state"] == "ready" for replica in replicas) >= count:
                    return
                await asyncio.sleep(0.1)

    async def text_model(self, session: aiohttp.ClientSession) -> TextModel:
        """Return the served model's template and tokenizer, loaded from the folder its replicas report."""
        async with session.get(f"{self.admin_url}/admin/state") as response:
            state = await response.json()
        folder = Path(next(r["model_dir"] for r in state["replicas"] if r.get("model_dir")))
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        return TextModel.from_files((folder / "tokenizer.json").read_bytes(), config)

    async def _post(self, session: aiohttp.ClientSession, path: str, body: Mapping[str, Any]) -> None:
        async with session.post(f"{self.admin_url}{path}", json=body) as response:
            if response.status != 200:
                raise RuntimeError(f"{path}: HTTP {response.status}: {await response.text()}")

    async def wait(self) -> None:
        """Wait until the process ends by itself or the caller is cancelled."""
        await self.process.wait()

    async def stop(self) -> None:
        """End the process: SIGTERM, then SIGKILL after 15 seconds."""
        if self.process.returncode is not None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(15):
                await self.process.wait()
        except TimeoutError:
            self.process.kill()
            await self.process.wait()


async def start_server(
    policy: Path, port: int, admin_port: int, log: Path, timeout_s: float = 300.0
) -> Server:
    """Start `warmfront serve` on loopback and return when it is ready; its output goes to `log`."""
    command = [sys.executable, "-m", "gateway", "serve", "--policy", str(policy)]
    command += ["--port", str(port), "--admin-port", str(admin_port)]
    print(f"starting the server (log: {log})", file=sys.stderr, flush=True)
    with open(log, "wb") as output:
        process = await asyncio.create_subprocess_exec(*command, stdout=output, stderr=output)
    server = Server(process, f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}")
    deadline = time.monotonic() + timeout_s
    async with aiohttp.ClientSession() as session:
        while True:
            if process.returncode is not None:
                tail = log.read_text(encoding="utf-8", errors="replace")[-2000:]
                raise RuntimeError(f"the server ended with code {process.returncode}:\n{tail}")
            try:
                async with session.get(f"{server.base_url}/readyz") as response:
                    if response.status == 200:
                        return server
            except aiohttp.ClientError:
                pass
            if time.monotonic() > deadline:
                await server.stop()
                raise RuntimeError(f"the server was not ready after {timeout_s:.0f} s (log: {log})")
            await asyncio.sleep(0.2)
