"""Fixtures of the browser tests: two fake engine replicas, a gateway with its admin plane, and a browser."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
from playwright.async_api import Browser, async_playwright

from gateway.app import Gateway
from gateway.config import GatewayConfig
from gateway.policy_source import PolicySource
from gateway.serving import admin_plane
from gateway.supervise import free_port

# The tests' own modules; at the end, so that no other folder's conftest is hidden.
sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "gateway")]

from dashboard_scene import POLICY, SYSTEM, Scene
from tiny_model import write_tiny_model

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """URLs of two engine processes without weights; one pair for all tests."""
    model = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    ports = [free_port(), free_port()]
    processes = []
    for port in ports:
        command = [sys.executable, "-m", "engine", "serve", "--fake", "--private", "--model", str(model)]
        command += ["--served-model-name", "tiny", "--port", str(port), "--threads", "1"]
        command += ["--fake-prefill-tokens-per-s", "6000", "--parent-pid", str(os.getpid())]
        processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    yield [f"http://127.0.0.1:{port}" for port in ports]
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait(timeout=20)


@pytest.fixture
async def scene(replicas: list[str], tmp_path: Path) -> AsyncIterator[Scene]:
    """A gateway over the replicas, pins resident."""
    upstreams = ", ".join(f'{{url: "{url}", dialect: bundled}}' for url in replicas)
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY.format(upstreams=upstreams, system=SYSTEM))
    source = PolicySource.from_file(path)
    config = GatewayConfig(
        port=0, admin_port=0, runtime_dir=tmp_path / "run", secret=b"s" * 32, poll_interval_s=0.2
    )
    gateway = Gateway(config, source.policy)
    await gateway.start()
    try:
        assert await gateway.pools["default"].wait_ready(2, 30)
        async with admin_plane(gateway, source, config) as admin, aiohttp.ClientSession() as session:
            for _ in range(300):
                rows = gateway.pins.states()
                if len(rows) == 2 and all(row.state == "resident" for row in rows):
                    break
                await asyncio.sleep(0.05)
            yield Scene(admin, f"http://127.0.0.1:{gateway.port}", gateway, session)
    finally:
        await gateway.stop()


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    """Chromium as the system installed it."""
    program = next((found for name in CHROMIUM if (found := shutil.which(name))), None)
    assert program is not None, "the browser tests need Chromium: apt-get install chromium"
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=program, args=list(ARGUMENTS))
        yield browser
        await browser.close()
