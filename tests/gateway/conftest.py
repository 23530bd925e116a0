"""Fixtures of the gateway's tests: scripted upstreams, and a gateway in front of them."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from gateway.app import Gateway
from gateway.config import GatewayConfig
from policies import load_policy

if TYPE_CHECKING:
    from stub_upstream import StubUpstream

sys.path.insert(0, str(Path(__file__).parent))  # the tests' own modules: stub_upstream, tiny_model

RULES = """
        - {label: "Current time", shape: clock, precision: minute}
        - {label: "Request id", shape: uuid}
        - {label: "User", shape: name}
"""


def policy_text(urls: list[str], *, mode: str = "off", dialect: str = "openai", extra: str = "") -> str:
    """One pool `p` serving model `m` (alias `alias`), one route `chat`."""
    upstreams = ", ".join(f'{{url: "{url}", dialect: {dialect}}}' for url in urls)
    return f"""
version: 1
{extra}
pools:
  p:
    model: m
    upstreams: [{upstreams}]
models:
  alias: m
routes:
  - name: chat
    class: interactive
    pool: p
    canon:
      mode: {mode}
      rules:{RULES}
"""


@dataclass
class Running:
    """A gateway that listens, and a client for it."""

    gateway: Gateway
    session: aiohttp.ClientSession
    base: str

    async def post(
        self, body: Any, path: str = "/v1/chat/completions", **kwargs: Any
    ) -> tuple[int, Any, Any]:
        """(status, headers, parsed body or text)."""
        data = {"data": body} if isinstance(body, bytes) else {"json": body}
        headers = {"Content-Type": "application/json", **kwargs.pop("headers", {})}
        async with self.session.post(self.base + path, headers=headers, **data, **kwargs) as response:
            raw = await response.read()
            kind = response.headers.get("Content-Type", "")
            parsed = await response.json() if kind.startswith("application/json") else raw
            return response.status, response.headers, parsed

    async def get(self, path: str, **headers: str) -> tuple[int, Any]:
        async with self.session.get(self.base + path, headers=headers) as response:
            return response.status, await response.json()


StartStub = Callable[..., Awaitable["StubUpstream"]]
StartGateway = Callable[..., Awaitable[Running]]


@pytest.fixture
async def stub() -> AsyncIterator[StartStub]:
    """Start scripted upstreams: `await stub(reply)`."""
    from stub_upstream import StubUpstream

    started: list[StubUpstream] = []

    async def start(*args: Any) -> StubUpstream:
        started.append(await StubUpstream(*args).start())
        return started[-1]

    yield start
    for upstream in started:
        await upstream.stop()


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[StartGateway]:
    """Start a gateway: `await serve([url, ...], mode=..., dialect=..., extra=..., text=..., **config)`."""
    running: list[Running] = []

    async def start(
        urls: list[str],
        *,
        mode: str = "off",
        dialect: str = "openai",
        extra: str = "",
        text: str | None = None,
        ready: int | None = None,
        **config: Any,
    ) -> Running:
        policy = load_policy(text or policy_text(urls, mode=mode, dialect=dialect, extra=extra))
        settings = {"port": 0, "runtime_dir": tmp_path / "run", "secret": b"s" * 32, "drain_timeout_s": 0.5}
        gateway = Gateway(GatewayConfig(**{**settings, **config}), policy)
        await gateway.start()
        session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20))
        running.append(Running(gateway, session, f"http://127.0.0.1:{gateway.port}"))
        for pool in gateway.pools.values():
            assert await pool.wait_ready(len(pool.replicas) if ready is None else ready, 10)
        return running[-1]

    yield start
    for each in running:
        await each.session.close()
        await each.gateway.stop()
