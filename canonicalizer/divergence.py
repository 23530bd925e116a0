"""Miss attribution: where two prompts part, what kind of field did it, and which rule would fix it.

`kind` is a short name a person knows (clock, request id, user name, environment, tool order, trailing
whitespace ...); `content` means that nothing volatile was recognised: the prompts simply differ.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from canonicalizer.candidates import Candidate, candidates
from canonicalizer.json_spans import Path
from canonicalizer.prompt import SYSTEM_ROLES, Text
from canonicalizer.rules import Rule, make_rule
from canonicalizer.shapes import words
from canonicalizer.stages import tool_name

_BLOCK_TAG = re.compile(r"<(/?)([A-Za-z][\w-]*)[^>\n]*>")
_KIND_OF_SHAPE = {
    "billing": "billing header",
    "path": "environment",
    "os": "environment",
    "editor": "environment",
    "git": "git state",
    "name": "user name",
    "handle": "user name",
    "email": "user name",
    "locale": "locale",
    "timezone": "locale",
    "location": "location",
    "zone": "clock",
}


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference: message index (-1 for a top-level system text or the tools), the path of the
    value, the character offset in it, the kind of field, its label, and the rule or stage that would fix
    it."""

    message: int
    path: Path
    offset: int
    kind: str
    label: str | None = None
    rule: Rule | None = None
    stage: str | None = None


def first_divergence(
    old: Mapping[str, Any] | Sequence[Any], new: Mapping[str, Any] | Sequence[Any]
) -> Divergence | None:
    """Where `new` leaves the path of `old` (bodies, or lists of messages); None when `old` is a prefix of
    `new`."""
    before, after = _as_body(old), _as_body(new)
    tools = _tools_divergence(before.get("tools"), after.get("tools"))
    if tools is not None:
        return tools
    former, latter = list(_texts(before)), list(_texts(after))
    for (role, one), (other_role, other) in zip(former, latter, strict=False):
        if (role, one.path) != (other_role, other.path):
            return Divergence(_message_of(other.path), other.path, 0, "content")
        if one.value != other.value:
            return _attribute(role, one, other)
    if len(latter) < len(former):
        missing = former[len(latter)][1]
        return Divergence(_message_of(missing.path), missing.path, 0, "content")
    return None


def _as_body(request: Mapping[str, Any] | Sequence[Any]) -> Mapping[str, Any]:
    return request if isinstance(request, Mapping) else {"messages": request}


def _texts(body: Mapping[str, Any]) -> list[tuple[str, Text]]:
    found: list[tuple[str, Text]] = []
    _collect("system", body.get("system"), ("system",), found)
    messages = body.get("messages")
    for index, message in enumerate(messages if isinstance(messages, Sequence) else ()):
        if isinstance(message, Mapping):
            _collect(str(message.get("role")), message.get("content"), ("messages", index, "content"), found)
    return found


def _collect(role: str, value: Any, path: Path, found: list[tuple[str, Text]]) -> None:
    if isinstance(value, str):
        found.append((role, Text(path, value)))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if key not in ("type", "cache_control"):
                _collect(role, item, (*path, key), found)
    elif isinstance(value, Sequence):
        for index, item in enumerate(value):
            _collect(role, item, (*path, index), found)


def _tools_divergence(old: Any, new: Any) -> Divergence | None:
    if old == new or not isinstance(old, list) or not isinstance(new, list):
        return None if old == new else Divergence(-1, ("tools",), 0, "tools")
    if sorted(map(tool_name, old)) == sorted(map(tool_name, new)) and all(tool in new for tool in old):
        return Divergence(-1, ("tools",), 0, "tool order", stage="tool_order")
    return Divergence(-1, ("tools",), 0, "tools")


def _attribute(role: str, old: Text, new: Text) -> Divergence | None:
    offset = common_prefix(old.value, new.value)
    message = _message_of(new.path)
    for text in (new.value, old.value):
        for item in candidates(text):
            if item.start <= offset <= item.end:
                is_system = role in SYSTEM_ROLES
                rule = make_rule(item.label, item.shape) if is_system else None
                kind = _kind(item, text) if is_system or item.shape != "clock" else "date"
                return Divergence(message, new.path, offset, kind, item.label, rule)
    kind, stage = _plain_kind(old.value, new.value, offset)
    return Divergence(message, new.path, offset, kind, stage=stage)


def _kind(item: Candidate, text: str) -> str:
    if item.shape in ("uuid", "ulid", "nanoid", "hex", "nonce"):
        return words(item.label)
    if item.shape == "clock":
        enclosing = _enclosing_tag(text, item.start)
        if enclosing.startswith("env") or re.search(
            r"(?m)^[ \t]*(git\.|cwd|working dir)", text[item.start :][:200]
        ):
            return "environment"
    return _KIND_OF_SHAPE.get(item.shape, item.shape)


def _plain_kind(old: str, new: str, offset: int) -> tuple[str, str | None]:
    if old.rstrip() == new.rstrip():
        return "trailing whitespace", "trailing"
    if old.replace("\r\n", "\n") == new.replace("\r\n", "\n"):
        return "line endings", "crlf"
    if unicodedata.normalize("NFC", old) == unicodedata.normalize("NFC", new):
        return "unicode form", "nfc"
    if sorted(old.splitlines()) == sorted(new.splitlines()):
        return "document order", None
    tag = _enclosing_tag(new, offset) or _enclosing_tag(old, offset)
    for name in ("memory", "doc", "env"):
        if name in tag:
            return {"memory": "memory", "doc": "documents", "env": "environment"}[name], None
    return "content", None


def _enclosing_tag(text: str, at: int) -> str:
    """Lower-case name of the innermost XML-like element that is open at `at`, or nothing."""
    open_tags: list[str] = []
    for tag in _BLOCK_TAG.finditer(text, 0, at):
        name = tag[2].lower()
        if not tag[1]:
            open_tags.append(name)
        elif name in open_tags:
            del open_tags[len(open_tags) - 1 - open_tags[::-1].index(name) :]
    return open_tags[-1] if open_tags else ""


def common_prefix(old: str, new: str) -> int:
    """Length in characters of the longest common prefix; O(n), by halving."""
    low, high = 0, min(len(old), len(new))
    while low < high:
        middle = (low + high + 1) // 2
        if old[low:middle] == new[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _message_of(path: Path) -> int:
    return path[1] if len(path) > 1 and path[0] == "messages" and isinstance(path[1], int) else -1
