"""A gateway in front of a scripted upstream on a real socket, for cases that no healthy engine shows."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from gateway.app import Gateway
from gateway.config import GatewayConfig
from policies import load_policy
from tests.gateway.stub_upstream import Answer, Asked, StubUpstream

POLICY = """\
version: 1
pools: {{p: {{model: m, upstreams: [{upstreams}]}}}}
routes:
  - name: chat
    class: interactive
    pool: p
    canon: {{mode: {mode}, rules: [{{label: "Current time", shape: clock, precision: minute}}]}}
"""
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}


def policy_text(*urls: str, mode: str = "enforce") -> str:
    """A policy with one pool `p` of external upstreams that serve `m`."""
    upstreams = ", ".join(f'{{url: "{url}", dialect: openai}}' for url in urls)
    return POLICY.format(upstreams=upstreams, mode=mode)


@contextlib.asynccontextmanager
async def upstreams(*replies: Callable[[Asked], Answer]) -> AsyncIterator[list[StubUpstream]]:
    """One scripted upstream per reply function."""
    started = [await StubUpstream(reply).start() for reply in replies]
    try:
        yield started
    finally:
        for stub in started:
            await stub.stop()


@contextlib.asynccontextmanager
async def gateway_before(folder: Path, stubs: list[StubUpstream], **config: Any) -> AsyncIterator[Gateway]:
    """A gateway in this process, ready, in front of `stubs`."""
    settings = {"port": 0, "runtime_dir": folder / "run", "secret": b"s" * 32, "drain_timeout_s": 0.5}
    policy = load_policy(policy_text(*(stub.url for stub in stubs)))
    gateway = Gateway(GatewayConfig(**{**settings, **config}), policy)
    await gateway.start()
    try:
        assert await gateway.pools["p"].wait_ready(len(stubs), 10)
        yield gateway
    finally:
        await gateway.stop()


def url_of(gateway: Gateway) -> str:
    """The gateway's base URL."""
    return f"http://127.0.0.1:{gateway.port}"


def shy_socket(port: int) -> socket.socket:
    """A blocking socket to a local port that takes little before it is read."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(10)
    client.connect(("127.0.0.1", port))
    return client
