"""Edits on a JSON object's own bytes.

Owns the two changes that a dialect may make to a request body: set a top-level member to a value, or take
one out. Every byte outside that member stays as the client wrote it: key order, number forms, spaces,
unknown fields. The input must be a JSON object that was already parsed once; where a key occurs twice, the
last one counts, as in every parser.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import orjson

_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\],]', re.DOTALL)
_SPACE = b" \t\r\n"


class _Member(NamedTuple):
    """Where a member's name and value begin, and the comma or brace after it."""

    name: int
    value: int
    end: int


def member_span(raw: bytes, key: str) -> tuple[int, int] | None:
    """Byte span of the value of the top-level member `key` (its last occurrence), or None."""
    members = _members(raw, key)
    return _trimmed(raw, members[-1].value, members[-1].end) if members else None


def _members(raw: bytes, key: str) -> list[_Member]:
    """Every occurrence of the top-level member `key`, in order."""
    wanted = orjson.dumps(key)
    depth = 0
    name = start = -1
    expects_key = False
    found: list[_Member] = []
    for match in _TOKEN.finditer(raw):
        first = raw[match.start()]
        if first == 0x22:
            if depth == 1 and expects_key:
                expects_key = False
                text = match.group()
                if text == wanted or (b"\\" in text and orjson.loads(text) == key):
                    name, start = match.start(), raw.index(b":", match.end()) + 1
            continue
        if first in b"{[":
            depth += 1
            expects_key = depth == 1
        elif first in b"}]":
            depth -= 1
            if depth == 0 and start >= 0:
                found.append(_Member(name, start, match.start()))
        elif depth == 1:
            expects_key = True
            if start >= 0:
                found.append(_Member(name, start, match.start()))
                start = -1
    return found


def set_member(raw: bytes, key: str, value: bytes, *, present: bool) -> bytes:
    """The object with `key` set to the JSON text `value`; `present` says whether it already has that key."""
    if present:
        span = member_span(raw, key)
        if span is not None:
            return raw[: span[0]] + value + raw[span[1] :]
    end = raw.rindex(b"}")
    comma = b"" if raw[:end].rstrip(_SPACE).endswith(b"{") else b","
    return b"".join((raw[:end], comma, orjson.dumps(key), b":", value, raw[end:]))


def remove_member(raw: bytes, key: str) -> bytes:
    """The object without `key`, however often it occurs; the same bytes where it does not."""
    for member in reversed(_members(raw, key)):
        if raw[member.end] == 0x2C:
            raw = raw[: member.name] + raw[member.end + 1 :]
        else:
            raw = raw[: member.name].rstrip(_SPACE).removesuffix(b",") + raw[member.end :]
    return raw


def _trimmed(raw: bytes, start: int, end: int) -> tuple[int, int]:
    while start < end and raw[start] in _SPACE:
        start += 1
    while end > start and raw[end - 1] in _SPACE:
        end -= 1
    return start, end
