"""One HTTP/1.1 connection to an upstream, as an asyncio protocol.

Owns the bytes of one socket: it writes a request, parses the answer's head, and hands on the body in
pieces. Always holds: one request at a time; at most `HIGH_WATER` bytes of body wait unread (then the socket
is no longer read, so a slow reader slows the upstream); a connection is `reusable` only after a body that
ended where its head said it would. A body ends cleanly (`b""`) or raises `UpstreamBroken`; the difference
between the two is what "truncated" means.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import cast

HIGH_WATER = 256 * 1024
LOW_WATER = 64 * 1024
MAX_HEAD = 64 * 1024

_UNTIL_CLOSE = -1
_CHUNKED = -2


class UpstreamBroken(Exception):
    """The connection failed: refused, reset, cut short, not HTTP, or silent for too long."""

    def __init__(self, reason: str, *, any_byte: bool = False, refused: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.any_byte = any_byte
        self.refused = refused


class Connection(asyncio.Protocol):
    """The protocol object; `on_lost` is called once when the socket is gone."""

    __slots__ = (
        "_awaits_head",
        "_body_done",
        "_broken",
        "_buffer",
        "_buffered",
        "_close_after",
        "_mode",
        "_on_lost",
        "_paused",
        "_pieces",
        "_remaining",
        "_waiter",
        "bytes_in",
        "headers",
        "idle_since",
        "received",
        "served",
        "status",
        "transport",
    )

    def __init__(self, on_lost: Callable[[Connection], None]) -> None:
        self._on_lost = on_lost
        self.transport: asyncio.Transport | None = None
        self.served = 0
        self.idle_since = 0.0
        self._broken: UpstreamBroken | None = None
        self._reset()

    def _reset(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.received = False
        self.bytes_in = 0
        self._buffer = b""
        self._pieces: deque[bytes] = deque()
        self._buffered = 0
        self._mode = 0
        self._remaining = 0
        self._body_done = False
        self._close_after = False
        self._paused = False
        self._awaits_head = False
        self._waiter: asyncio.Future[bool] | None = None

    # --- what the client does -------------------------------------------------------------------------------

    def write_request(self, head: bytes, body: bytes) -> None:
        """Hand one request to the socket; raises `UpstreamBroken` when it is closed."""
        if self.transport is None or self._broken is not None:
            raise self._broken or UpstreamBroken("the connection is closed")
        self._reset()
        self._awaits_head = True
        if len(body) > HIGH_WATER:
            self.transport.write(head)
            self.transport.write(body)
        else:
            self.transport.write(head + body)

    async def wait_head(self, timeout: float) -> bool:
        """Wait for the head of the final answer; False after `timeout` seconds. May be called again."""
        while not self.status:
            if self._broken is not None:
                raise self._broken
            if not await self._wait(timeout):
                return False
        return True

    async def piece(self, timeout: float) -> bytes | None:
        """The next piece of the body; `b""` at its clean end; None after `timeout` seconds of silence.

        Raises `UpstreamBroken` when the body was cut short.
        """
        while not self._pieces:
            if self._body_done:
                return b""
            if self._broken is not None:
                raise self._broken
            if not await self._wait(timeout):
                return None
        if len(self._pieces) == 1:
            data = self._pieces.popleft()
        else:
            data = b"".join(self._pieces)
            self._pieces.clear()
        self._buffered = 0
        if self._paused and self.transport is not None and not self.transport.is_closing():
            self._paused = False
            self.transport.resume_reading()
        return data

    async def _wait(self, timeout: float) -> bool:
        """Wait until something happened on the socket; False when nothing did for `timeout` seconds."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        self._waiter = waiter
        timer = loop.call_later(timeout, _expire, waiter)
        try:
            return await waiter
        finally:
            timer.cancel()
            self._waiter = None

    @property
    def paused(self) -> bool:
        """True while `HIGH_WATER` bytes wait unread."""
        return self._paused

    @property
    def reusable(self) -> bool:
        """True when the next request may use this connection."""
        return (
            self._body_done
            and not self._pieces
            and not self._close_after
            and not self._buffer
            and self._broken is None
            and self.transport is not None
            and not self.transport.is_closing()
        )

    def abort(self) -> None:
        """Close the socket at once; the upstream sees a disconnect."""
        if self.transport is not None:
            self.transport.abort()

    # --- what the event loop calls --------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's transports are no subclass of it

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        if self._mode == _UNTIL_CLOSE and self.status and exc is None:
            self._body_done = True
        if self._broken is None:
            what = (
                "the upstream closed the connection"
                if exc is None
                else f"connection lost: {type(exc).__name__}"
            )
            self._broken = UpstreamBroken(what, any_byte=self.received)
        self._wake()
        self._on_lost(self)

    def eof_received(self) -> bool:
        return False

    def data_received(self, data: bytes) -> None:
        self.received = True
        self.bytes_in += len(data)
        try:
            if self._awaits_head and not self.status:
                data = self._feed_head(data)
                if not self.status:
                    return
            self._feed_body(data)
        except ValueError as error:
            self.fail(f"not a valid HTTP answer: {error}")

    # --- parsing --------------------------------------------------------------------------------------------

    def _feed_head(self, data: bytes) -> bytes:
        buffer = self._buffer + data if self._buffer else data
        while True:
            end = buffer.find(b"\r\n\r\n")
            if end < 0:
                if len(buffer) > MAX_HEAD:
                    raise ValueError("the head is too long")
                self._buffer = buffer
                return b""
            lines = buffer[:end].decode("latin-1").split("\r\n")
            buffer = buffer[end + 4 :]
            version, _, rest = lines[0].partition(" ")
            if not version.startswith("HTTP/1."):
                raise ValueError("no HTTP/1 status line")
            status = int(rest[:3])
            if status >= 200:
                break
        headers: dict[str, str] = {}
        for line in lines[1:]:
            name, colon, value = line.partition(":")
            if not colon:
                raise ValueError("a header line without a colon")
            headers[name.lower()] = value.strip()
        self._buffer = b""
        self._take_head(status, headers, http10=version == "HTTP/1.0")
        return buffer

    def _take_head(self, status: int, headers: dict[str, str], *, http10: bool) -> None:
        connection = headers.get("connection", "").lower()
        self._close_after = "close" in connection or (http10 and "keep-alive" not in connection)
        if status in (204, 304):
            self._body_done = True
        elif "chunked" in headers.get("transfer-encoding", "").lower():
            self._mode = _CHUNKED
        elif "content-length" in headers:
            self._remaining = int(headers["content-length"])
            if self._remaining < 0:
                raise ValueError("a negative content-length")
            self._body_done = self._remaining == 0
        else:
            self._mode = _UNTIL_CLOSE
            self._close_after = True
        self.status = status
        self.headers = headers
        self._wake()

    def _feed_body(self, data: bytes) -> None:
        if not data:
            return
        if self._body_done or not self.status:
            self.fail("bytes that belong to no answer")
            return
        if self._mode == _CHUNKED:
            self._feed_chunked(data)
        elif self._mode == _UNTIL_CLOSE:
            self._add(data)
        else:
            if len(data) > self._remaining:
                raise ValueError("more bytes than content-length")
            self._remaining -= len(data)
            self._body_done = self._remaining == 0
            self._add(data)
        self._wake()

    def _feed_chunked(self, data: bytes) -> None:
        # `_remaining` > 0: bytes of the current chunk still to come (its trailing \r\n included, as the
        # last two); 0: a size line is next; -1: the last chunk was seen, trailers end with an empty line.
        buffer = self._buffer + data if self._buffer else data
        pos, size = 0, len(buffer)
        while pos < size:
            if self._remaining > 0:
                take = min(self._remaining, size - pos)
                payload = min(take, max(0, self._remaining - 2))
                if payload:
                    self._add(buffer[pos : pos + payload])
                self._remaining -= take
                pos += take
                continue
            end = buffer.find(b"\r\n", pos)
            if end < 0:
                if size - pos > 4096:
                    raise ValueError("a chunk size line is too long")
                break
            line = buffer[pos:end]
            pos = end + 2
            if self._remaining < 0:
                if not line:
                    self._body_done = True
                    self._remaining = 0
                    break
                continue
            length = int(line.partition(b";")[0], 16)
            if length < 0:
                raise ValueError("a negative chunk size")
            self._remaining = length + 2 if length else -1
        self._buffer = buffer[pos:]

    def _add(self, data: bytes) -> None:
        self._pieces.append(data)
        self._buffered += len(data)
        if self._buffered > HIGH_WATER and not self._paused and self.transport is not None:
            self._paused = True
            self.transport.pause_reading()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(True)

    def fail(self, reason: str) -> None:
        """Break the connection; whoever waits on it gets `UpstreamBroken` once what came is read."""
        if self._broken is None:
            self._broken = UpstreamBroken(reason, any_byte=self.received)
        self._wake()
        self.abort()


def _expire(waiter: asyncio.Future[bool]) -> None:
    if not waiter.done():
        waiter.set_result(False)
