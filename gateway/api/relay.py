"""Relays one upstream stream to one client.

Owns the moment at which a status is committed. The rule: the answer's first data event decides it. An error
there, or an end without any event, is a normal HTTP error (or a retry on another replica); anything else
commits 200. After `commit_after_s` of silence 200 is committed regardless and `: ping` is sent every
`ping_interval_s` until data comes; from then on failures are in-band error events. Always holds: nothing is
read from the upstream while the client's send buffer is full; a client that leaves it full for
`write_timeout_s` is cut; no finish and no `[DONE]` is made up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import orjson
from aiohttp import web

from gateway import errors
from gateway.api.chunks import StreamReader, error_status
from gateway.config import GatewayConfig
from gateway.errors import ApiError
from gateway.upstream.client import Call, UpstreamBroken
from gateway.upstream.sse import PING, EventSplitter, EventTooLarge, event_data, is_done, parse_object

_HELD_LIMIT = 64 * 1024
_TAIL_WAIT_S = 0.2
_SMALL_WRITE = 16 * 1024


class AttemptFailed(Exception):
    """One attempt failed and nothing of its answer reached the client. `error` is what to say if it was
    the last.
    """

    def __init__(
        self, reason: str, error: ApiError, *, retriable: bool = True, refused: bool = False
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.error = error
        self.retriable = retriable
        self.refused = refused


class StalledClient(Exception):
    """The client left its receive buffer full for too long."""


class Relay:
    """One client stream; `run` may be called once per attempt until one relays data."""

    def __init__(
        self,
        request: web.BaseRequest,
        config: GatewayConfig,
        headers: dict[str, str],
        *,
        request_id: str,
        show_usage: bool,
        choices: int,
    ) -> None:
        self._request = request
        self._config = config
        self.headers = headers
        """What the answer will carry; fixed once the status is committed."""
        self._request_id = request_id
        self._show_usage = show_usage
        self._choices = choices
        self._last_sent = time.perf_counter()
        self._data_sent = False
        self._held = b""
        self.response: web.StreamResponse | None = None
        self.reader = StreamReader(show_usage=show_usage, choices=choices)
        self.first_read_at = 0.0
        """When the first token was read from the upstream."""
        self.first_sent_at = 0.0
        """When the first token was handed to the client's socket."""

    async def run(self, call: Call, on_first_token: Callable[[], None]) -> str:
        """Relay one answer to its end and return the outcome: ok, truncated or upstream_error.

        `on_first_token` is called when the first token was handed to the client.

        Raises AttemptFailed while nothing of the answer was relayed, StalledClient, and what aiohttp raises
        when the client is gone.
        """
        self.reader = reader = StreamReader(show_usage=self._show_usage, choices=self._choices)
        self._held = b""
        splitter = EventSplitter()
        try:
            await self._head(call)
            while True:
                piece = await self._piece(call)
                if not piece:
                    break
                await self._pass(splitter.feed(piece), on_first_token)
                if reader.done or reader.error is not None:
                    break
        except UpstreamBroken as broken:
            if not self._data_sent:
                failure = errors.upstream_failed("The upstream failed before it answered.")
                raise AttemptFailed("broken", failure, refused=broken.refused) from None
        except EventTooLarge:
            if not self._data_sent:
                failure = errors.upstream_failed("The upstream sent an event that is too large.")
                raise AttemptFailed("malformed", failure) from None
            call.abort()
            splitter = EventSplitter()  # what it has is no event
        last = _last_event(splitter.tail)
        if last and not reader.done and reader.error is None:
            await self._pass([last], on_first_token)
        return await self._close(call)

    async def _pass(self, events: list[bytes], on_first_token: Callable[[], None]) -> None:
        """Hand on whole events; comments before the first data are held, so that a retry stays possible."""
        reader = self.reader
        out: list[bytes] = []
        for event in events:
            first_data = not reader.data
            kept = reader.take(event)
            if reader.error is not None and first_data:
                raise _first_event_failure(reader.error)
            if kept:
                out.append(kept)
        if not out:
            return
        data = b"".join(out) if len(out) > 1 else out[0]
        if not reader.data and self.response is None:
            self._held += data
            if len(self._held) > _HELD_LIMIT:
                raise AttemptFailed("no data", errors.upstream_failed("The upstream sent no data."))
            return
        first = reader.content and not self.first_sent_at
        if first:
            self.first_read_at = time.perf_counter()
        await self._write(self._held + data if self._held else data)
        self._held = b""
        if reader.data:
            self._data_sent = True
        if first:
            self.first_sent_at = time.perf_counter()
            on_first_token()

    async def fail(self, error: ApiError) -> None:
        """End a committed stream with an in-band error event."""
        await self._write(error.event(self._request_id))
        assert self.response is not None
        await self.response.write_eof()

    async def _close(self, call: Call) -> str:
        reader = self.reader
        if not self._data_sent:
            failure = errors.upstream_failed("The upstream ended the stream without any event.")
            raise AttemptFailed("empty", failure)
        if reader.error is not None:
            outcome = "upstream_error"
        elif reader.end == "cut":
            outcome = "truncated"
            error = errors.upstream_failed(
                "The upstream ended the stream before the answer was complete.", code="upstream_truncated"
            )
            await self._write(error.event(self._request_id))
        else:
            outcome = "ok"
        assert self.response is not None
        await self.response.write_eof()
        if outcome == "ok":
            await self._drain_tail(call)
        return outcome

    async def _drain_tail(self, call: Call) -> None:
        # The end of the chunked body, so that the connection can be used again.
        try:
            while await call.piece(_TAIL_WAIT_S):
                pass
        except UpstreamBroken:
            return

    async def _head(self, call: Call) -> None:
        """Wait for the upstream's head; refuse what is no stream."""
        waited_from = time.perf_counter()
        while not await call.head(self._patience(waited_from)):
            await self._on_silence(waited_from)
        if call.status != 200:
            await self._refused(call)
        if "text/event-stream" not in call.headers.get("content-type", ""):
            body = await call.read(self._config.max_response_bytes, self._config.upstream_idle_s)
            failure = errors.upstream_failed("The upstream did not answer with an event stream.")
            problem = _error_object(body)
            if problem is not None:
                raise _first_event_failure(problem)
            raise AttemptFailed("not a stream", failure)

    async def _refused(self, call: Call) -> None:
        body = await call.read(self._config.max_response_bytes, self._config.upstream_idle_s)
        raise refusal(call.status, body)

    async def _piece(self, call: Call) -> bytes:
        waited_from = time.perf_counter()
        while True:
            piece = await call.piece(self._patience(waited_from))
            if piece is not None:
                return piece
            await self._on_silence(waited_from)

    def _patience(self, waited_from: float) -> float:
        """Seconds until something must be done although the upstream is silent."""
        config = self._config
        now = time.perf_counter()
        left = config.upstream_idle_s - (now - waited_from)
        if config.ping_interval_s > 0 and not self._data_sent:
            interval = config.commit_after_s if self.response is None else config.ping_interval_s
            left = min(left, interval - (now - self._last_sent))
        return max(0.001, left)

    async def _on_silence(self, waited_from: float) -> None:
        if time.perf_counter() - waited_from >= self._config.upstream_idle_s:
            raise UpstreamBroken("the upstream was silent for too long", any_byte=True)
        if not self._data_sent:
            await self._write(PING)

    async def _write(self, data: bytes) -> None:
        response = self.response
        if response is None:
            self.headers["Content-Type"] = "text/event-stream; charset=utf-8"
            self.headers["Cache-Control"] = "no-cache"
            self.headers["X-Accel-Buffering"] = "no"
            response = self.response = web.StreamResponse(headers=self.headers)
            await response.prepare(self._request)
        transport = self._request.transport
        if transport is None:
            raise ConnectionResetError("the client is gone")
        if len(data) < _SMALL_WRITE and transport.get_write_buffer_size() == 0:
            await response.write(data)  # cannot have to wait
        else:
            await self._write_slowly(response, transport, data)
        self._last_sent = time.perf_counter()

    async def _write_slowly(
        self, response: web.StreamResponse, transport: asyncio.Transport, data: bytes
    ) -> None:
        try:
            async with asyncio.timeout(self._config.write_timeout_s):
                await response.write(data)
        except TimeoutError:
            transport.abort()
            raise StalledClient from None


def _last_event(tail: bytes) -> bytes:
    """The event that a stream ended with, where only the blank line after it is missing; else `b""`."""
    event = tail + (b"\n" if tail.endswith(b"\n") else b"\n\n")
    data = event_data(event) if tail else None
    whole = data is not None and (is_done(data) or parse_object(data) is not None)
    return event if whole else b""


def refusal(status: int, body: bytes) -> AttemptFailed:
    """What an upstream's non-200 answer becomes: 4xx go to the client as they are, 5xx may be retried."""
    problem = _error_object(body) or {}
    message = problem.get("message")
    if not isinstance(message, str):
        message = f"The upstream answered with status {status}."
    type_ = problem.get("type")
    param, code = problem.get("param"), problem.get("code")
    if status < 400 or status in (401, 403, 407):
        # Nothing the client can put right: it did not choose the upstream, its URL or its key.
        failure = errors.upstream_failed("The upstream refused the gateway's own request.")
        return AttemptFailed(f"status_{status}", failure)
    error = ApiError(
        status,
        message,
        type_=type_ if isinstance(type_, str) else _type_for(status),
        param=param if isinstance(param, str) else None,
        code=code if isinstance(code, str) else None,
    )
    return AttemptFailed(f"status_{status}", error, retriable=status >= 500 or status in (408, 429))


def _first_event_failure(problem: dict[str, object]) -> AttemptFailed:
    status = error_status(problem)
    failure = refusal(status, orjson.dumps({"error": problem}))
    return AttemptFailed("error_event", failure.error, retriable=status >= 500)


def _error_object(body: bytes) -> dict[str, object] | None:
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(parsed, dict):
        return None
    error = parsed.get("error")
    if isinstance(error, dict):
        return error
    if isinstance(error, str):
        return {"message": error}
    detail = parsed.get("detail") or (parsed.get("message") if parsed.get("object") == "error" else None)
    return (
        {"message": detail if isinstance(detail, str) else orjson.dumps(detail).decode()} if detail else None
    )


def _type_for(status: int) -> str:
    return "invalid_request_error" if status < 500 else "server_error"
