"""One `warmfront serve` with the real model and two replicas for all end-to-end tests."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

MODEL = "smollm2-135m-instruct"
POLICY = """\
version: 1
limits: {default_max_tokens: 24}
tenants:
  acme: {keys: [{plain: key-acme}]}
  nova: {keys: [{plain: key-nova}]}
pools:
  default: {model: smollm2-135m-instruct, bundled: {replicas: 2, model: smollm2-135m-instruct, max_seqs: 8}}
routes:
  # Comments in this file must survive `warmfront policy enforce`.
  - name: watched
    match: {tenants: [nova]}
    class: interactive
    pool: default
    canon: {mode: observe}
  - name: chat
    class: interactive
    pool: default
    canon:
      mode: enforce
      rules:
        - {label: "Current time", shape: clock, precision: minute}
        - {label: "Request id", shape: uuid}
        - {label: "User", shape: name}
"""


@dataclass(frozen=True, slots=True)
class Stack:
    """Addresses of the running server, and its policy file and log."""

    base_url: str
    admin_url: str
    policy: Path
    log: Path

    def log_text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    from gateway.bench.server import Server, start_server

    folder = tmp_path_factory.mktemp("stack")
    policy, log = folder / "warmfront.yaml", folder / "server.log"
    policy.write_text(POLICY, encoding="utf-8")
    pull = [sys.executable, "-m", "engine", "model", "pull", MODEL]
    subprocess.run(pull, check=True, stdout=subprocess.DEVNULL)
    loop = asyncio.new_event_loop()
    server: Server = loop.run_until_complete(start_server(policy, free_port(), free_port(), log))
    try:
        loop.run_until_complete(server.wait_for_replicas(2))
        yield Stack(server.base_url, server.admin_url, policy, log)
    finally:
        loop.run_until_complete(server.stop())
        loop.close()
