"""A scripted upstream: an HTTP server on a free port that answers as it is told and records what it was
asked.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Step = bytes | float
"""Bytes to write, or seconds to wait."""


@dataclass(slots=True)
class Asked:
    """One request as it arrived; `gone` is set when the connection closes before the answer was written."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    connection: int = 0
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True, slots=True)
class Answer:
    """Raw steps to write; `close` ends the connection afterwards."""

    steps: Sequence[Step]
    close: bool = False


def whole(value: Any, status: int = 200, **headers: str) -> Answer:
    """A JSON answer with Content-Length."""
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    extra = "".join(f"{name}: {text}\r\n" for name, text in headers.items())
    head = (
        f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{extra}\r\n"
    )
    return Answer([head.encode() + body])


SSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def sse(events: Sequence[Step], *, end: bool = True) -> Answer:
    """A chunked event stream, one chunk per event; without `end` the connection is cut after the last."""
    steps: list[Step] = [SSE_HEAD]
    steps += [step if isinstance(step, float) else chunk(step) for step in events]
    if end:
        steps.append(b"0\r\n\r\n")
    return Answer(steps, close=not end)


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def delta(content: str | None = None, finish: str | None = None, **more: Any) -> bytes:
    """One chat chunk as an event."""
    fields = {} if content is None else {"content": content}
    choice = {"index": 0, "delta": fields, "finish_reason": finish}
    body = {"id": "c1", "object": "chat.completion.chunk", "choices": [choice], **more}
    return b"data: " + json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


def usage_event(prompt: int = 26, completion: int = 3, cached: int = 0, **more: Any) -> bytes:
    """The usage chunk."""
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    body = {"id": "c1", "choices": [], "usage": usage, **more}
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def completion(content: str = "Hello", **more: Any) -> dict[str, Any]:
    """A non-streaming chat body."""
    message = {"role": "assistant", "content": content}
    usage = {"prompt_tokens": 26, "completion_tokens": 3, "total_tokens": 29}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return {"id": "c1", "object": "chat.completion", "choices": [choice], "usage": usage, **more}


class StubUpstream:
    """Answers POSTs by `reply` (a function of the request); GETs by `gets`, else with a small 200."""

    def __init__(self, reply: Callable[[Asked], Answer] | None = None) -> None:
        self.reply = reply or (lambda asked: whole(completion()))
        self.gets: dict[str, Any] = {}
        self.posts: list[Asked] = []
        self.connections = 0
        self.closed_connections = 0
        self.written = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def start(self) -> StubUpstream:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=64 * 1024 * 1024)
        return self

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._connection(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        number = self.connections
        try:
            while True:
                asked = await _read(reader)
                if asked is None:
                    return
                asked.connection = number
                if asked.method == "GET":
                    answer = whole(self.gets.get(asked.path, {"object": "list", "data": []}))
                else:
                    self.posts.append(asked)
                    answer = self.reply(asked)
                if not await self._answer(asked, answer, reader, writer) or answer.close:
                    return
        except ConnectionError:
            return
        finally:
            self.closed_connections += 1
            writer.close()

    async def _answer(
        self, asked: Asked, answer: Answer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        gone = (
            asyncio.create_task(reader.read(1)) if any(isinstance(s, float) for s in answer.steps) else None
        )
        try:
            for step in answer.steps:
                if isinstance(step, float):
                    assert gone is not None
                    await asyncio.wait([gone], timeout=step)
                    if gone.done():
                        asked.gone.set()
                        return False
                else:
                    writer.write(step)
                    await writer.drain()
                    self.written += len(step)
        except ConnectionError:
            asked.gone.set()
            raise
        finally:
            if gone is not None and not gone.done():
                gone.cancel()
                await asyncio.gather(gone, return_exceptions=True)
        return True


async def _read(reader: asyncio.StreamReader) -> Asked | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    lines = head.decode("latin-1").split("\r\n")
    method, path, _ = lines[0].split(" ", 2)
    pairs = (line.partition(":") for line in lines[1:] if line)
    headers = {name.lower(): value.strip() for name, _, value in pairs}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Asked(method, path, headers, body)
