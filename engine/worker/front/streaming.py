"""Server-sent events to one client.

Owns the response's headers, keep-alive comments and the write timeout. Always holds: no byte is sent before
the first content, an error or the first keep-alive interval, so that early failures keep their HTTP status;
a write waits for a slow reader, and a reader that takes nothing for `write_timeout_s` is cut.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import TypeVar

from aiohttp import web

from engine.worker.front.responses import PING

WRITE_BUFFER_BYTES = 65_536
_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
T = TypeVar("T")


class EventStream:
    """One response of server-sent events, opened at its first write."""

    def __init__(self, request: web.Request, headers: Mapping[str, str], *, write_timeout_s: float) -> None:
        self._request = request
        self._write_timeout_s = write_timeout_s
        self.response = web.StreamResponse(headers={**_HEADERS, **headers})

    @property
    def is_open(self) -> bool:
        """True once the status line and headers have gone out."""
        return self.response.prepared

    async def send(self, data: bytes) -> None:
        """Write whole events; raises ConnectionResetError when the client is gone or is cut for slowness."""
        transport = self._request.transport
        if transport is None:
            raise ConnectionResetError("client closed the connection")
        if not self.response.prepared:
            transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
            await self.response.prepare(self._request)
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await self.response.write(data)
        except TimeoutError as error:
            transport.abort()
            raise ConnectionResetError("client reads too slowly") from error

    async def send_all(self, parts: Iterable[bytes]) -> None:
        """Write whole events, joined up to the write buffer's size; other requests run in between."""
        joined: list[bytes] = []
        size = 0
        for part in parts:
            joined.append(part)
            size += len(part)
            if size > WRITE_BUFFER_BYTES:
                await self.send(b"".join(joined))
                await asyncio.sleep(0)
                joined.clear()
                size = 0
        if joined:
            await self.send(b"".join(joined))

    async def finish(self) -> web.StreamResponse:
        """End the body."""
        await self.response.write_eof()
        return self.response


async def with_pings(batches: AsyncIterator[T], events: EventStream, ping_s: float) -> AsyncIterator[T]:
    """The items of `batches`; until the first one, a comment every `ping_s` seconds (0: none)."""
    first = asyncio.ensure_future(anext(batches))
    try:
        while not (await asyncio.wait((first,), timeout=ping_s or None))[0]:
            await events.send(PING)
        yield first.result()
    finally:
        first.cancel()
    async for batch in batches:
        yield batch
