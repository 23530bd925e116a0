"""Where the values of a JSON text stand, in bytes.

Owns the walk over a body's original bytes: only the branches that lead to an asked path are entered, all
else is skipped, without recursion however deeply it is nested. Must always hold: a span is exactly one JSON
value, without the blanks around it; of repeated keys the last one counts; bytes that are no JSON raise
`NotJson` and never read past the end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

Path = tuple[str | int, ...]
Spans = dict[Path, tuple[int, int]]

_STRUCTURE = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[{}\[\]]', re.S)
_SCALAR = re.compile(rb"[^\s,\]}]+")
_BLANK = re.compile(rb"[ \t\r\n]*")


class NotJson(ValueError):
    """The bytes are not a JSON text."""

    def __init__(self) -> None:
        super().__init__("the body is not a JSON text")


def value_spans(raw: bytes, paths: Iterable[Path]) -> Spans:
    """Byte span of the JSON value at each path that exists. Raises NotJson."""
    tree: dict[Any, Any] = {}
    for path in paths:
        node = tree
        for step in path:
            node = node.setdefault(step, {})
    found: Spans = {}
    try:
        _walk(raw, _after_blank(raw, 0), tree, (), found)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise NotJson from error
    return found


def element_spans(raw: bytes, start: int) -> list[tuple[int, int]]:
    """Byte spans of the elements of the array that opens at `start`. Raises NotJson."""
    elements: list[tuple[int, int]] = []
    at = _after_blank(raw, start + 1)
    while raw[at : at + 1] != b"]":
        end = _skip(raw, at)
        elements.append((at, end))
        at = _after_blank(raw, end)
        if raw[at : at + 1] == b",":
            at = _after_blank(raw, at + 1)
    return elements


def _walk(raw: bytes, at: int, tree: Mapping[Any, Any], path: Path, found: Spans) -> int:
    """Follow `tree` through the value at `at`, note the spans of its leaves, return the value's end.

    Of repeated keys the last one counts, as JSON readers have it.
    """
    start = at
    opening = raw[at : at + 1]
    if not tree or opening not in (b"{", b"["):
        end = _skip(raw, at)
        if not tree:
            found[path] = (start, end)
        return end
    closing = b"}" if opening == b"{" else b"]"
    at = _after_blank(raw, at + 1)
    index = 0
    while raw[at : at + 1] != closing:
        step: str | int = index
        if opening == b"{":
            if raw[at : at + 1] != b'"':
                raise NotJson
            key_end = _string_end(raw, at)
            name = raw[at:key_end]
            step = json.loads(name) if b"\\" in name else name[1:-1].decode()
            colon = _after_blank(raw, key_end)
            if raw[colon : colon + 1] != b":":
                raise NotJson
            at = _after_blank(raw, colon + 1)
        branch = tree.get(step)
        if branch is None:
            at = _skip(raw, at)
        else:
            inner = (*path, step)
            for stale in [known for known in found if known[: len(inner)] == inner]:
                del found[stale]
            at = _walk(raw, at, branch, inner, found)
        at = _after_blank(raw, at)
        if raw[at : at + 1] == b",":
            at = _after_blank(raw, at + 1)
        elif raw[at : at + 1] != closing:
            raise NotJson
        index += 1
    return at + 1


def _skip(raw: bytes, at: int) -> int:
    opening = raw[at : at + 1]
    if opening == b'"':
        return _string_end(raw, at)
    if opening in (b"{", b"["):
        depth = 0
        for token in _STRUCTURE.finditer(raw, at):
            mark = token.group()
            if mark in (b"{", b"["):
                depth += 1
            elif mark in (b"}", b"]"):
                depth -= 1
                if depth == 0:
                    return token.end()
        raise NotJson
    scalar = _SCALAR.match(raw, at)
    if scalar is None:
        raise NotJson
    return scalar.end()


def _string_end(raw: bytes, at: int) -> int:
    """End of the string that opens at `at`: its first quote behind an even number of backslashes."""
    end = at
    while (end := raw.find(b'"', end + 1)) > 0:
        before = end
        while raw[before - 1] == 0x5C:
            before -= 1
        if (end - before) % 2 == 0:
            return end + 1
    raise NotJson


def _after_blank(raw: bytes, at: int) -> int:
    if at < len(raw) and raw[at] > 0x20:
        return at
    blank = _BLANK.match(raw, at)
    return blank.end() if blank else at
