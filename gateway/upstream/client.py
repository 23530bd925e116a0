"""HTTP client of the data plane: pooled connections to replicas, no cap of its own.

Owns the idle connections per origin and the sockets in use. Always holds: a connection idle for longer than
`pool_idle_s` is never used again; one that dies under a request before any byte came back is replaced once
by a fresh connection (nothing was answered, so nothing can be answered twice); every `Call` ends in
`release()` or `abort()`, and an unfinished one is aborted, which is how an upstream learns that its client
is gone. Redirects are not followed; targets come from configuration alone.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from dataclasses import dataclass
from urllib.parse import urlsplit

from gateway.upstream.connection import Connection, UpstreamBroken

__all__ = ["Call", "Origin", "UpstreamBroken", "UpstreamClient"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a replica listens: scheme, host, port and the path prefix of its base URL."""

    host: str
    port: int
    tls: bool
    prefix: str
    host_header: str

    @classmethod
    def from_url(cls, url: str) -> Origin:
        """Parse a base URL; raises ValueError for anything but http(s)://host[:port][/prefix]."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"not an http(s) URL: {url!r}")
        tls = parts.scheme == "https"
        port = parts.port or (443 if tls else 80)
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        default = 443 if tls else 80
        header = host if port == default else f"{host}:{port}"
        return cls(parts.hostname, port, tls, parts.path.rstrip("/"), header)


class Call:
    """One request on its way and the answer to it. Times are `time.perf_counter()` seconds.

    `head` and `piece` may be given up and called again: silence loses nothing.
    """

    __slots__ = (
        "_body",
        "_broken",
        "_client",
        "_closed",
        "_connection",
        "_head",
        "_reused",
        "origin",
        "sent_at",
    )

    def __init__(self, client: UpstreamClient, origin: Origin, head: bytes, body: bytes) -> None:
        self._client = client
        self.origin = origin
        self._head = head
        self._body = body
        self._connection: Connection | None = None
        self._reused = False
        self._closed = False
        self._broken: UpstreamBroken | None = None
        self.sent_at = 0.0

    @property
    def status(self) -> int:
        """HTTP status, 0 before the head arrived."""
        return self._connection.status if self._connection is not None else 0

    @property
    def headers(self) -> dict[str, str]:
        """Answer headers, names in lower case."""
        return self._connection.headers if self._connection is not None else {}

    @property
    def bytes_in(self) -> int:
        """Bytes of the answer that came so far."""
        return self._connection.bytes_in if self._connection is not None else 0

    @property
    def backed_up(self) -> bool:
        """So much of the answer waits unread that no more of it is taken from the socket."""
        return self._connection is not None and self._connection.paused

    async def start(self) -> None:
        """Get a connection and hand the request to it; raises `UpstreamBroken`."""
        while True:
            connection = self._client.take_idle(self.origin)
            self._reused = connection is not None
            self._connection = connection or await self._connect()
            self.sent_at = time.perf_counter()
            try:
                self._connection.write_request(self._head, self._body)
                return
            except UpstreamBroken:
                self._connection.abort()
                if not self._reused:
                    raise

    async def head(self, timeout: float) -> bool:
        """Wait for the answer's head; False after `timeout` seconds without it. Raises `UpstreamBroken`."""
        while True:
            connection = self._connection
            assert connection is not None
            try:
                return await connection.wait_head(timeout)
            except UpstreamBroken as broken:
                # A kept-alive connection that dies before any byte was closed by the other side's idle timer.
                if not self._reused or broken.any_byte or self._broken is not None:
                    raise
                self._reused = False
                self._connection = await self._connect()
                self._connection.write_request(self._head, self._body)

    async def _connect(self) -> Connection:
        connection = await self._client.connect(self.origin)
        if self._broken is not None:
            connection.abort()
            raise self._broken
        return connection

    def fail(self, reason: str) -> None:
        """Break it off from outside: whoever waits on it gets `UpstreamBroken`, nothing is tried again."""
        if self._broken is None and not self._closed:
            self._broken = UpstreamBroken(reason)
            if self._connection is not None:
                self._connection.fail(reason)

    async def piece(self, timeout: float) -> bytes | None:
        """Next piece of the body, `b""` at its end, None after `timeout` s of silence; raises
        `UpstreamBroken`.
        """
        assert self._connection is not None
        return await self._connection.piece(timeout)

    async def read(self, limit: int, timeout: float) -> bytes:
        """The whole body; raises `UpstreamBroken` when it is cut short, silent, or longer than `limit`
        bytes.
        """
        pieces: list[bytes] = []
        total = 0
        while True:
            data = await self.piece(timeout)
            if data is None:
                raise UpstreamBroken(f"the upstream was silent for {timeout:g} s", any_byte=True)
            if not data:
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)
            pieces.append(data)
            total += len(data)
            if total > limit:
                raise UpstreamBroken(f"the answer is longer than {limit} bytes", any_byte=True)

    def release(self) -> None:
        """Give the connection back; aborts it when the body has not ended. Idempotent."""
        if not self._closed:
            self._closed = True
            if self._connection is not None:
                self._client.put_back(self.origin, self._connection)

    def abort(self) -> None:
        """Drop the connection at once, which tells the upstream to stop. Idempotent."""
        if not self._closed:
            self._closed = True
            if self._connection is not None:
                self._connection.abort()


class UpstreamClient:
    """Sends requests; made and used on one event loop."""

    def __init__(
        self, *, connect_timeout_s: float, pool_idle_s: float, tls: ssl.SSLContext | None = None
    ) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._pool_idle_s = pool_idle_s
        self._tls = tls
        self._idle: dict[Origin, deque[Connection]] = {}
        self._open: set[Connection] = set()

    @property
    def open_connections(self) -> int:
        """Sockets held, idle ones included."""
        return len(self._open)

    def call(self, origin: Origin, method: str, path: str, headers: bytes, body: bytes) -> Call:
        """A request that is not sent yet.

        `headers` are whole header lines, each ending in CRLF, without Host and Content-Length.
        """
        head = b"%s %s HTTP/1.1\r\nHost: %s\r\nContent-Length: %d\r\n%s\r\n" % (
            method.encode(),
            (origin.prefix + path).encode(),
            origin.host_header.encode(),
            len(body),
            headers,
        )
        return Call(self, origin, head, body)

    async def get(
        self, origin: Origin, path: str, headers: bytes = b"", *, timeout: float
    ) -> tuple[int, bytes]:
        """GET a small document: its status and body. Raises `UpstreamBroken`, also when it takes too long."""
        call = self.call(origin, "GET", path, headers, b"")
        try:
            await call.start()
            if not await call.head(timeout):
                raise UpstreamBroken(f"no answer within {timeout:g} s")
            return call.status, await call.read(16 * 1024 * 1024, timeout)
        finally:
            call.release()

    def put_back(self, origin: Origin, connection: Connection) -> None:
        """Keep a finished connection for the next request, or drop it."""
        if connection.reusable:
            connection.served += 1
            connection.idle_since = time.monotonic()
            self._idle.setdefault(origin, deque()).append(connection)
        else:
            connection.abort()

    def sweep(self) -> None:
        """Close connections idle for too long; called about once a second."""
        oldest = time.monotonic() - self._pool_idle_s
        for idle in self._idle.values():
            while idle and idle[0].idle_since < oldest:
                idle.popleft().abort()

    async def close(self) -> None:
        """Drop every connection and wait until the sockets are gone."""
        for connection in list(self._open):
            connection.abort()
        self._idle.clear()
        for _ in range(100):
            if not self._open:
                return
            await asyncio.sleep(0)

    def take_idle(self, origin: Origin) -> Connection | None:
        """A connection that may be used again, or None."""
        idle = self._idle.get(origin)
        oldest = time.monotonic() - self._pool_idle_s
        while idle:
            connection = idle.pop()
            if connection.reusable and connection.idle_since >= oldest:
                return connection
            connection.abort()
        return None

    async def connect(self, origin: Origin) -> Connection:
        """A new connection; raises `UpstreamBroken`."""
        context: ssl.SSLContext | None = None
        if origin.tls:
            if self._tls is None:
                self._tls = ssl.create_default_context()
            context = self._tls
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: Connection(self._lost), origin.host, origin.port, ssl=context
                )
        except TimeoutError:
            raise UpstreamBroken(f"could not connect within {self._connect_timeout_s:g} s") from None
        except OSError as error:
            refused = isinstance(error, ConnectionRefusedError)
            raise UpstreamBroken(f"could not connect: {type(error).__name__}", refused=refused) from None
        self._open.add(connection)
        return connection

    def _lost(self, connection: Connection) -> None:
        self._open.discard(connection)
