"""An admin plane that gives scripted answers and keeps what it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

NOWHERE = "http://127.0.0.1:1"


class StubAdmin(ThreadingHTTPServer):
    """`answers` maps "METHOD /path" to (status, body); anything else gets `usual`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.usual: tuple[int, Any] = (404, {})
        self.answers: dict[str, tuple[int, Any]] = {}
        self.asked: list[tuple[str, Any]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def posted(self) -> list[tuple[str, Any]]:
        """What was sent with POST: (path, body)."""
        return [(what.split(" ")[1], body) for what, body in self.asked if what.startswith("POST")]


class _Handler(BaseHTTPRequestHandler):
    server: StubAdmin

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        what = f"{self.command} {self.path}"
        self.server.asked.append((what, json.loads(body) if body else None))
        status, answer = self.server.answers.get(what, self.server.usual)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(answer if isinstance(answer, bytes) else json.dumps(answer).encode())

    do_GET = do_POST = _answer

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def stub_admin() -> Iterator[StubAdmin]:
    """A running stub."""
    with StubAdmin() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()
