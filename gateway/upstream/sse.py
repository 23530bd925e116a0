"""Server-sent events on bytes.

Owns the framing of an upstream's stream: `EventSplitter` cuts a byte stream into whole events and gives
each back with its exact bytes, terminator included, so that joining what it returned gives what it was fed.
Lines end at `\n` or `\r\n` alone (a lone `\r`, U+2028, U+0085 and form feeds are data); nothing is decoded
before an event is whole. The unfinished tail is bounded.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"

_END = re.compile(rb"\n\r?\n")


class EventTooLarge(ValueError):
    """One event passed the splitter's byte bound."""


class EventSplitter:
    """Cuts a byte stream into events; `limit` bounds one event in bytes."""

    __slots__ = ("_limit", "_tail")

    def __init__(self, limit: int = 16 * 1024 * 1024) -> None:
        self._tail = b""
        self._limit = limit

    def feed(self, data: bytes) -> list[bytes]:
        """The events completed by `data`, in order, byte for byte; raises `EventTooLarge`."""
        tail = self._tail
        if not tail and data.endswith(b"\n\n") and data.find(b"\n\n") == len(data) - 2 and b"\r" not in data:
            return [data]
        scan_from = max(0, len(tail) - 2)
        buffer = tail + data if tail else data
        events: list[bytes] = []
        start = 0
        for match in _END.finditer(buffer, scan_from):
            end = match.end()
            if match.start() >= start:
                events.append(buffer[start:end])
                start = end
        rest = buffer[start:]
        if len(rest) > self._limit:
            raise EventTooLarge(f"an event is larger than {self._limit} bytes")
        self._tail = rest
        return events

    @property
    def tail(self) -> bytes:
        """Bytes of the event that is not complete yet."""
        return self._tail


def event_data(event: bytes) -> bytes | None:
    """The event's data lines joined by newlines, or None when it has none (a comment or a bare field)."""
    if event.startswith(b"data:") and event.find(b"\n", 0, len(event) - 2) < 0 and b"\r" not in event:
        return event[6:-2] if event[5:6] == b" " else event[5:-2]
    parts: list[bytes] = []
    for raw in event.split(b"\n"):
        line = raw[:-1] if raw.endswith(b"\r") else raw
        if line.startswith(b"data:"):
            parts.append(line[6:] if line[5:6] == b" " else line[5:])
        elif line == b"data":
            parts.append(b"")
    return b"\n".join(parts) if parts else None


def is_done(data: bytes) -> bool:
    """True for the end-of-stream mark."""
    return data.strip() == b"[DONE]"


def parse_object(data: bytes) -> dict[str, Any] | None:
    """The JSON object in `data`, or None when it is something else."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def encode_event(value: object) -> bytes:
    """One event whose data is `value` as JSON."""
    return b"data: " + orjson.dumps(value) + b"\n\n"
