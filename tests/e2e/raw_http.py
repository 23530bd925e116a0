"""HTTP without an SDK: a body goes out as it is, and what comes back is looked at event by event.

Owns nothing but the parsing of answers. Always holds: the framing is checked on the way, so that a test which
reads `Reply.events` has also asserted that every event is a comment or JSON data and that `[DONE]` is last.
"""

from __future__ import annotations

import http.client
import json
import urllib.request
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from tests.e2e.conftest import MODEL, Stack

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "Say hello to Ada."}]
PING = ": ping"
WEATHER = {
    "type": "function",
    "function": {
        "name": "wind_speed",
        "description": "Wind speed at a place",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}


def chat(**fields: Any) -> dict[str, Any]:
    """A greedy chat body of a few tokens, with `fields` on top."""
    return {"model": MODEL, "messages": HELLO, "max_tokens": 3, "temperature": 0, **fields}


def completion(**fields: Any) -> dict[str, Any]:
    """A greedy completion body of a few tokens, with `fields` on top."""
    return {"model": MODEL, "prompt": "One, two, three,", "max_tokens": 3, "temperature": 0, **fields}


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer, read to its end."""

    status: int
    content_type: str
    body: bytes

    @property
    def json(self) -> Any:
        """The body of a JSON answer."""
        assert self.content_type.startswith("application/json"), self.body[:300]
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object of a refusal; its shape is checked."""
        value: dict[str, Any] = self.json["error"]
        assert set(value) >= {"message", "type", "param", "code"} and value["message"], value
        return value

    @property
    def events(self) -> list[dict[str, Any]]:
        """The chunks of a good stream, `[DONE]` taken off."""
        assert self.status == 200, self.body[:300]
        assert self.content_type == "text/event-stream; charset=utf-8"
        assert self.body.endswith(b"\n\n")
        blocks = [block for block in self.body.decode().split("\n\n")[:-1] if block != PING]
        assert all(block.startswith("data: ") and "\n" not in block for block in blocks), blocks
        assert blocks[-1] == "data: [DONE]" and blocks.count("data: [DONE]") == 1
        return [json.loads(block[6:]) for block in blocks[:-1]]

    def pieces(self, index: int = 0) -> list[str]:
        """Every piece of text that a stream sent for one choice, in order, empty ones left out."""
        chosen = [c for event in self.events for c in event["choices"] if c["index"] == index]
        found = [c["delta"].get("content") if "delta" in c else c["text"] for c in chosen]
        return [piece for piece in found if piece]

    def text(self, index: int = 0) -> str:
        """One choice's whole text, of a stream or not."""
        if self.content_type.startswith("text/event-stream"):
            return "".join(self.pieces(index))
        choice = self.json["choices"][index]
        text: str = choice["message"]["content"] if "message" in choice else choice["text"]
        return text

    @property
    def finishes(self) -> list[str]:
        """Every finish reason, by choice index."""
        if not self.content_type.startswith("text/event-stream"):
            return [choice["finish_reason"] for choice in self.json["choices"]]
        choices = [choice for event in self.events for choice in event["choices"]]
        ends = [(choice["index"], choice["finish_reason"]) for choice in choices if choice["finish_reason"]]
        return [reason for _, reason in sorted(ends)]


def post(base_url: str, path: str, body: Any, key: str = "key-acme") -> Reply:
    """POST `body` (bytes as they are, else as JSON) on a connection of its own."""
    connection = connect(base_url)
    try:
        return exchange(connection, path, body, key)
    finally:
        connection.close()


def connect(base_url: str) -> http.client.HTTPConnection:
    """A connection that may carry several requests, one after another."""
    return http.client.HTTPConnection(urlsplit(base_url).netloc, timeout=60)


def exchange(connection: http.client.HTTPConnection, path: str, body: Any, key: str = "key-acme") -> Reply:
    """One request on `connection`, its answer read to the end."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    connection.request("POST", path, raw, headers)
    response = connection.getresponse()
    return Reply(response.status, response.getheader("Content-Type", ""), response.read())


def get_json(url: str) -> Any:
    """GET a JSON document."""
    with urllib.request.urlopen(url, timeout=10) as response:
        return json.load(response)


def replicas(stack: Stack) -> list[dict[str, Any]]:
    """The rows of the stack's replicas."""
    rows: list[dict[str, Any]] = get_json(stack.admin_url + "/admin/state")["replicas"]
    return rows


def rendered(stack: Stack, **fields: Any) -> tuple[str, int]:
    """A chat prompt as text with its control tokens, and its length in tokens, from the replica itself."""
    url = replicas(stack)[0]["base_url"]
    tokens = post(url, "/tokenize", {"model": MODEL, **fields}).json["tokens"]
    pieces = post(url, COMPLETIONS, completion(prompt=tokens, echo=True, max_tokens=0, logprobs=0)).json
    return "".join(pieces["choices"][0]["logprobs"]["tokens"]), len(tokens)


def assert_serving(stack: Stack) -> None:
    """Both replicas are ready and a request is answered."""
    assert [row["state"] for row in replicas(stack)] == ["ready", "ready"]
    reply = post(stack.base_url, COMPLETIONS, completion(max_tokens=1))
    assert reply.status == 200 and reply.json["usage"]["completion_tokens"] == 1
