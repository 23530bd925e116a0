r"""Edits: what changed in a request, and the splicing of only those strings into the original JSON bytes.

An `Edit` replaces the characters `[start, end)` of the *original* string value at `path`, or, where the
value at `path` is an array, reorders it (`before` and `after` then list the original positions, "0 1 2" ->
"2 0 1"). Invariants: every byte outside the edited spans is kept (key order, number forms, escapes, blanks,
unknown fields); `undo(edits, apply_edits(raw, edits)) == raw`, or `apply_edits` raises `EditError` and
nothing was changed. New text is escaped as the body does it: pure ASCII stays pure ASCII, `\/` stays `\/`,
`\u00E9` stays in capitals. Text that the body spells in yet another way could not be restored from the edits
alone: that is `UnusualEscapes`, which any client can cause; every other `EditError` is a fault of this side.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring, encode_basestring_ascii
from typing import Any, NamedTuple

from canonicalizer.json_spans import NotJson, Path, Spans, element_spans, value_spans

_ESCAPE_RUN = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|\\u[0-9a-fA-F]{4}|\\.|[^\\]+",
    re.S,
)
_SMALL_DIGIT = re.compile(rb"(?<!\\)(?:\\\\)*+\\u[0-9a-fA-F]{0,3}[a-f]")
_CAPITAL_DIGIT = re.compile(rb"(?<!\\)(?:\\\\)*+\\u[0-9a-fA-F]{0,3}[A-F]")
_ESCAPE = re.compile(rb"\\(?:u([0-9a-f]{4})|.)", re.S)
_TELLING = re.compile(rb"\\[/u]")
_PLAIN_SLASH = re.compile(rb"(?<!\\)/")
_BACKSLASH = 0x5C
_NOT_JSON = "the body is not a JSON text"
_STYLE_LOST = "the edits take away what shows how the body escapes text, so undo would not be exact"


class EditError(ValueError):
    """The edits do not fit the body: a path is missing, a span differs, or it could not be undone exactly."""


class UnusualEscapes(EditError):
    """The body escapes its text in a way that `undo` would not restore; the edits themselves are right."""


class Edit(NamedTuple):
    """One replaced span. `start == end` is an insertion; offsets are characters of the original value."""

    rule: str
    path: Path
    start: int
    end: int
    before: str
    after: str


def apply_edits(raw: bytes, edits: Sequence[Edit]) -> bytes:
    """`raw` (a JSON text in UTF-8) with the edits spliced in. Raises EditError; never returns a partial
    result."""
    if not edits:
        return raw
    style = _style_of(raw)
    result = _splice(raw, edits, style)
    if _style_of(result) != style:
        raise UnusualEscapes(_STYLE_LOST)
    return result


def apply_proved(raw: bytes, edits: Sequence[Edit]) -> bytes:
    """`apply_edits`, and the proof that `undo` gives `raw` back, in one pass over the body.

    The values are not looked for a second time: they stand where they stood, moved by what was replaced
    before them. Raises EditError where the proof fails.
    """
    if not edits:
        return raw
    style = _style_of(raw)
    groups = _by_path(edits)
    spans = _found(raw, groups)
    replacements = _all_replacements(raw, groups, spans, style)
    result = _joined(raw, replacements)
    if _style_of(result) != style:
        raise UnusualEscapes(_STYLE_LOST)
    back = _all_replacements(result, _inverted(groups), _moved(spans, replacements), style)
    if _joined(result, back) != raw:
        raise EditError("the edits could not be undone exactly")
    return result


def undo(edits: Sequence[Edit], raw: bytes) -> bytes:
    """The body as it was before `apply_edits`. Raises EditError where `raw` does not hold what the edits
    wrote."""
    if not edits:
        return raw
    return _splice(raw, inverted(edits), _style_of(raw))


def inverted(edits: Iterable[Edit]) -> list[Edit]:
    """Edits that take the given ones back; their spans count in the edited values."""
    return [edit for group in _inverted(_by_path(edits)).values() for edit in group]


def _inverted(groups: Mapping[Path, Sequence[Edit]]) -> dict[Path, list[Edit]]:
    inverses: dict[Path, list[Edit]] = {}
    for path, group in groups.items():
        inverse = inverses[path] = []
        shift = 0
        for edit in group:
            start = edit.start + shift
            if _is_order(edit):
                order = [int(i) for i in edit.after.split()]
                back = " ".join(str(order.index(i)) for i in range(len(order)))
                inverse.append(Edit(edit.rule, path, edit.start, edit.end, edit.before, back))
                continue
            inverse.append(Edit(edit.rule, path, start, start + len(edit.after), edit.after, edit.before))
            shift += len(edit.after) - len(edit.before)
    return inverses


def edited_body(body: Mapping[str, Any], edits: Sequence[Edit]) -> Mapping[str, Any]:
    """A copy of the decoded body with the edits applied; containers off the edited paths are shared, not
    copied."""
    if not edits:
        return body
    result: dict[str, Any] = dict(body)
    owned: set[Path] = {()}
    for path, group in _by_path(edits).items():
        node: Any = result
        for depth, step in enumerate(path[:-1], start=1):
            child = node[step]
            if path[:depth] not in owned:
                child = dict(child) if isinstance(child, Mapping) else list(child)
                node[step] = child
                owned.add(path[:depth])
            node = child
        value = node[path[-1]]
        if isinstance(value, str):
            node[path[-1]] = edited_text(value, group)
        else:
            node[path[-1]] = [value[int(i)] for i in group[0].after.split()]
    return result


def edited_text(text: str, edits: Sequence[Edit]) -> str:
    """One string value with its edits (ordered, not overlapping) applied."""
    parts: list[str] = []
    at = 0
    for edit in edits:
        parts += (text[at : edit.start], edit.after)
        at = edit.end
    parts.append(text[at:])
    return "".join(parts)


def order_edit(rule: str, path: Path, order: Sequence[int]) -> Edit:
    """An edit that reorders the array at `path`: element `order[i]` of the original comes to place i."""
    count = len(order)
    return Edit(rule, path, 0, count, " ".join(map(str, range(count))), " ".join(map(str, order)))


def _is_order(edit: Edit) -> bool:
    return bool(edit.path) and edit.path[-1] == "tools"


def _by_path(edits: Iterable[Edit]) -> dict[Path, list[Edit]]:
    groups: dict[Path, list[Edit]] = {}
    for edit in edits:
        groups.setdefault(edit.path, []).append(edit)
    for group in groups.values():
        group.sort(key=lambda edit: (edit.start, edit.end))
    return groups


_Replacement = tuple[int, int, bytes]


def _splice(raw: bytes, edits: Sequence[Edit], style: _Style) -> bytes:
    groups = _by_path(edits)
    return _joined(raw, _all_replacements(raw, groups, _found(raw, groups), style))


def _all_replacements(
    raw: bytes, groups: Mapping[Path, Sequence[Edit]], spans: Spans, style: _Style
) -> list[_Replacement]:
    """Byte spans of `raw` and what comes there, in order."""
    replacements: list[_Replacement] = []
    try:
        for path, group in groups.items():
            replacements += _replacements(raw, path, spans.get(path), group, style)
    except NotJson as error:
        raise EditError(str(error)) from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise EditError(_NOT_JSON) from error
    replacements.sort(key=_start_of)
    return replacements


def _joined(raw: bytes, replacements: Iterable[_Replacement]) -> bytes:
    parts: list[bytes] = []
    at = 0
    for start, end, new in replacements:
        parts += (raw[at:start], new)
        at = end
    parts.append(raw[at:])
    return b"".join(parts)


def _moved(spans: Spans, replacements: Sequence[_Replacement]) -> Spans:
    """Where the spans stand after the replacements, each of which lies within one of them."""
    moved: Spans = {}
    shift = at = 0
    for path, (start, end) in sorted(spans.items(), key=lambda item: item[1]):
        new_start = start + shift
        while at < len(replacements) and replacements[at][0] < end:
            first, last, new = replacements[at]
            shift += len(new) - (last - first)
            at += 1
        moved[path] = (new_start, end + shift)
    return moved


def _start_of(replacement: _Replacement) -> int:
    return replacement[0]


def _found(raw: bytes, groups: Mapping[Path, object]) -> Spans:
    try:
        return value_spans(raw, groups)
    except NotJson as error:
        raise EditError(str(error)) from error


def _replacements(
    raw: bytes, path: Path, span: tuple[int, int] | None, group: Sequence[Edit], style: _Style
) -> list[tuple[int, int, bytes]]:
    if span is None:
        raise EditError(f"no value at {_show(path)}")
    first = raw[span[0] : span[0] + 1]
    if first == b'"':
        return _text_replacements(raw, span, group, style)
    if first == b"[" and _is_order(group[0]):
        return [_reordered(raw, span, group[0])]
    raise EditError(f"the value at {_show(path)} is not a string")


def _text_replacements(
    raw: bytes, span: tuple[int, int], group: Sequence[Edit], style: _Style
) -> list[tuple[int, int, bytes]]:
    inner = raw[span[0] + 1 : span[1] - 1]
    marks = [mark for edit in group for mark in (edit.start, edit.end)]
    offsets = _byte_offsets(inner, marks)
    if marks != sorted(marks):
        raise EditError(f"edits overlap at {_show(group[0].path)}")
    replacements = []
    for edit in group:
        start, end = offsets[edit.start], offsets[edit.end]
        spelled = inner[start:end]
        if spelled != _escaped(edit.before, style):
            if json.loads(b'"%b"' % spelled) == edit.before:
                raise UnusualEscapes(f"the text at {_show(edit.path)} is escaped unusually")
            raise EditError(f"the text at {_show(edit.path)} is not as the edit expects")
        replacements.append((span[0] + 1 + start, span[0] + 1 + end, _escaped(edit.after, style)))
    return replacements


def _byte_offsets(inner: bytes, marks: Iterable[int]) -> dict[int, int]:
    """Byte offset in the raw (escaped) string for each character offset in `marks`."""
    plain = inner.isascii()
    pending = sorted(set(marks), reverse=True)
    if plain and b"\\" not in inner and pending[0] <= len(inner):
        return {mark: mark for mark in pending}
    offsets: dict[int, int] = {}
    if len(pending) == 1 and _length(inner) == pending[0]:  # an insertion at the end: nothing to look for
        return {pending[0]: len(inner)}
    chars = 0
    for run in _ESCAPE_RUN.finditer(inner):
        start, end = run.span()
        escape = inner[start] == _BACKSLASH
        text = "" if escape or plain else inner[start:end].decode()
        count = 1 if escape else len(text) or end - start
        while pending and pending[-1] < chars + count:
            mark = pending.pop()
            offsets[mark] = start + (len(text[: mark - chars].encode()) if text else mark - chars)
        if not pending:
            return offsets
        chars += count
    if pending != [chars]:
        raise EditError(f"an edit ends past the value's {chars} characters")
    offsets[chars] = len(inner)
    return offsets


def _length(inner: bytes) -> int:
    """Characters of a JSON string, given without its quotes."""
    return len(json.loads(b'"' + inner + b'"')) if b"\\" in inner else len(inner.decode())


def _reordered(raw: bytes, span: tuple[int, int], edit: Edit) -> tuple[int, int, bytes]:
    elements = element_spans(raw, span[0])
    order = [int(i) for i in edit.after.split()]
    if sorted(order) != list(range(len(elements))):
        raise EditError(
            f"the order at {_show(edit.path)} does not name each of its {len(elements)} elements once"
        )
    parts: list[bytes] = []
    at = span[0]
    for (start, end), source in zip(elements, order, strict=True):
        parts += (raw[at:start], raw[slice(*elements[source])])
        at = end
    parts.append(raw[at : span[1]])
    return span[0], span[1], b"".join(parts)


@dataclass(frozen=True, slots=True)
class _Style:
    """How a body writes its strings: non-ASCII characters and slashes escaped or plain, the digits of
    escapes in capitals or not."""

    ascii_only: bool
    escaped_slash: bool
    capitals: bool


def _style_of(raw: bytes) -> _Style:
    if _TELLING.search(raw) is None:  # most bodies: one look instead of two
        return _Style(raw.isascii(), False, False)
    return _Style(
        raw.isascii(),
        b"\\/" in raw and _PLAIN_SLASH.search(raw) is None,
        b"\\u" in raw and _SMALL_DIGIT.search(raw) is None and _CAPITAL_DIGIT.search(raw) is not None,
    )


def _escaped(text: str, style: _Style) -> bytes:
    try:
        escaped = (encode_basestring_ascii if style.ascii_only else encode_basestring)(text)[1:-1].encode()
    except UnicodeEncodeError as error:
        raise UnusualEscapes("the text holds half of a surrogate pair") from error
    if style.capitals and b"\\u" in escaped:
        escaped = _ESCAPE.sub(_in_capitals, escaped)
    return escaped.replace(b"/", b"\\/") if style.escaped_slash else escaped


def _in_capitals(escape: re.Match[bytes]) -> bytes:
    return b"\\u" + escape[1].upper() if escape[1] else escape[0]


def _show(path: Path) -> str:
    return "$" + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
