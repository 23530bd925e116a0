"""`warmfront pins`: what it prints, and what it does when nothing answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from gateway.cli.main import main

PIN = {
    "name": "greeting",
    "tenant": "",
    "replica": "p-r0",
    "state": "resident",
    "tokens": 73,
    "computed_tokens": 64,
}
STATE = {"pins": [{**PIN, "reason": ""}], "warmup_tokens": 1064, "warmup_s": 2.0, "pending": 0}
NOWHERE = "http://127.0.0.1:1"


class Admin(ThreadingHTTPServer):
    """An admin plane that gives one answer."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer: tuple[int, bytes] = (200, json.dumps(STATE).encode())
        self.asked: list[tuple[str, str, Any]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Admin

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.asked.append((self.command, self.path, json.loads(body) if body else None))
        self.send_response(self.server.answer[0])
        self.end_headers()
        self.wfile.write(self.server.answer[1])

    do_GET = do_POST = _answer

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def admin() -> Iterator[Admin]:
    with Admin() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_pins_are_a_table_with_the_warm_up_below(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    waiting = {**PIN, "name": "a-much-longer-name", "state": "pending", "tokens": None, "replica": ""}
    admin.answer = (
        200,
        json.dumps({**STATE, "pins": [*STATE["pins"], {**waiting, "reason": "waits"}]}).encode(),
    )
    assert main(["pins", "--admin", admin.url]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "pin                 tenant  replica  state     tokens  computed",
        "greeting            -       p-r0     resident      73        64",
        "a-much-longer-name  -       -        pending        -        64  waits",
        "warm-up: 1,064 tokens in 2.0 s",
    ]


def test_pins_as_json_and_none_at_all(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pins", "--json", "--admin", admin.url]) == 0
    assert json.loads(capsys.readouterr().out) == STATE
    admin.answer = (200, json.dumps({**STATE, "pins": []}).encode())
    assert main(["pins", "--admin", admin.url]) == 0
    assert capsys.readouterr().out == "no pins in the policy\n"


@pytest.mark.parametrize("answer", [b"<html>", b"[]", b"{}", b'{"pins": [{}]}', b'{"pins": 3}'])
def test_an_answer_of_something_else_is_an_error(
    admin: Admin, answer: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    admin.answer = (200, answer)
    assert main(["pins", "--admin", admin.url]) == 2
    assert admin.url in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "said"), [(NOWHERE, "Connection refused"), ("ftp://x", "wants a URL"), ("http://[", "no answer")]
)
def test_silence_is_an_error_with_the_address(
    url: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pins", "--admin", url]) == 2
    error = capsys.readouterr().err
    assert url in error
    assert said in error


def test_the_gateways_own_words_are_passed_on(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    admin.answer = (500, b"oh")
    assert main(["pins", "--admin", admin.url]) == 2
    assert "HTTP 500" in capsys.readouterr().err
