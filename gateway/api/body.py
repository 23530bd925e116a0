"""The request body as the gateway reads it.

Owns the check of exactly those fields that the gateway itself uses; everything else is the engine's to
judge and passes through untouched. Always holds: `raw` are the bytes the client sent; a field that is
absent and one that is null mean the same; a wrong type is a 400 that names the field, streaming or not; 0
is a value, never "absent".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from gateway import errors

Kind = Literal["chat", "completion"]

_ROLES = frozenset(("system", "developer", "user", "assistant", "tool", "function"))
MAX_MODEL_CHARS = 512
MAX_SALT_CHARS = 256
MAX_DEPTH = 128
"""Lists and objects inside each other in one field; within what every renderer and encoder can follow."""


@dataclass(frozen=True, slots=True)
class ParsedBody:
    """One request body. `messages` is empty for a completion."""

    kind: Kind
    raw: bytes
    body: dict[str, Any]
    model: str
    messages: list[dict[str, Any]]
    stream: bool
    include_usage: bool
    max_tokens: int | None
    choices: int
    cache_salt: str | None = None
    """The client's own part of what its cached blocks are kept apart by."""


def parse_body(kind: Kind, raw: bytes) -> ParsedBody:
    """Check the body of a chat or text completion request; raises ApiError 400."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise errors.malformed_json(f"{error.msg} at line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise errors.malformed_json("nested too deeply") from None
    if type(body) is not dict:
        raise errors.invalid("The request body must be a JSON object.")
    _check_depth(raw, body)
    get = body.get
    model = get("model")
    if type(model) is not str or not model:
        problem = "is required" if model is None else "must be a non-empty string"
        raise errors.invalid(f"'model' {problem}.", "model")
    stream = get("stream")
    if stream is not None and type(stream) is not bool:
        raise errors.invalid("'stream' must be true or false.", "stream")
    messages: list[dict[str, Any]] = []
    if kind == "chat":
        messages = _messages(get("messages"))
        _tools(get("tools"))
    else:
        _prompt(get("prompt"))
    include_usage = _stream_options(get("stream_options"), streaming=bool(stream))
    return ParsedBody(
        kind=kind,
        raw=raw,
        body=body,
        model=model,
        messages=messages,
        stream=bool(stream),
        include_usage=include_usage,
        max_tokens=_max_tokens(get),
        choices=_integer(get("n"), "n", least=1) or 1,
        cache_salt=_cache_salt(get("cache_salt")),
    )


def _check_depth(raw: bytes, body: dict[str, Any]) -> None:
    if raw.count(b"[") + raw.count(b"{") <= MAX_DEPTH:
        return
    for name, value in body.items():
        level = [value] if type(value) in (dict, list) else []
        for _ in range(MAX_DEPTH):
            if not level:
                break
            level = [
                child
                for item in level
                for child in (item.values() if type(item) is dict else item)
                if type(child) is dict or type(child) is list
            ]
        if level:
            shown = name if len(name) <= 80 else name[:80] + "..."
            raise errors.invalid(f"'{shown}' is nested deeper than {MAX_DEPTH} levels.", shown)


def _cache_salt(salt: Any) -> str | None:
    if salt is not None and (type(salt) is not str or len(salt) > MAX_SALT_CHARS):
        problem = f"must be a string of at most {MAX_SALT_CHARS} characters"
        raise errors.invalid(f"'cache_salt' {problem}.", "cache_salt")
    return salt


def _messages(messages: Any) -> list[dict[str, Any]]:
    if type(messages) is not list:
        problem = "is required" if messages is None else "must be a list of messages"
        raise errors.invalid(f"'messages' {problem}.", "messages")
    if not messages:
        raise errors.invalid("'messages' must hold at least one message.", "messages")
    for i, message in enumerate(messages):
        if type(message) is not dict:
            raise errors.invalid(f"'messages[{i}]' must be an object.", f"messages[{i}]")
        role = message.get("role")
        if type(role) is not str:
            raise errors.invalid(f"'messages[{i}].role' must be a string.", f"messages[{i}].role")
        if role not in _ROLES:
            known = ", ".join(sorted(_ROLES))
            raise errors.invalid(f"'messages[{i}].role' must be one of {known}.", f"messages[{i}].role")
        _message_fields(message, i)
        content = message.get("content")
        if content is None or type(content) is str:
            continue
        where = f"messages[{i}].content"
        if type(content) is not list:
            raise errors.invalid(f"'{where}' must be a string, a list of parts or null.", where)
        for j, part in enumerate(content):
            if type(part) is not dict or type(part.get("type")) is not str:
                raise errors.invalid(f"'{where}[{j}]' must be an object with a type.", f"{where}[{j}]")
            if part["type"] == "text" and type(part.get("text")) is not str:
                raise errors.invalid(f"'{where}[{j}].text' must be a string.", f"{where}[{j}].text")
    return messages


def _message_fields(message: dict[str, Any], i: int) -> None:
    calls = message.get("tool_calls")
    if calls is not None and (type(calls) is not list or any(type(call) is not dict for call in calls)):
        where = f"messages[{i}].tool_calls"
        raise errors.invalid(f"'{where}' must be a list of objects.", where)
    for name in ("tool_call_id", "name"):
        value = message.get(name)
        if value is not None and type(value) is not str:
            where = f"messages[{i}].{name}"
            raise errors.invalid(f"'{where}' must be a string.", where)


def _tools(tools: Any) -> None:
    if tools is None:
        return
    if type(tools) is not list or any(type(tool) is not dict for tool in tools):
        raise errors.invalid("'tools' must be a list of objects.", "tools")


def _prompt(prompt: Any) -> None:
    if type(prompt) is str:
        return
    if type(prompt) is list and prompt:
        first = type(prompt[0])
        if first in (str, int, list) and all(type(item) is first for item in prompt):
            return
    problem = "is required" if prompt is None else "must be a string, a list of strings or token ids"
    raise errors.invalid(f"'prompt' {problem}.", "prompt")


def _stream_options(options: Any, *, streaming: bool) -> bool:
    if options is None:
        return False
    if type(options) is not dict:
        raise errors.invalid("'stream_options' must be an object.", "stream_options")
    if not streaming:
        raise errors.invalid("'stream_options' is only allowed when 'stream' is true.", "stream_options")
    asked = options.get("include_usage")
    if asked is not None and type(asked) is not bool:
        where = "stream_options.include_usage"
        raise errors.invalid(f"'{where}' must be true or false.", where)
    return bool(asked)


def _max_tokens(get: Callable[[str], Any]) -> int | None:
    # `max_completion_tokens` wins where both are given.
    legacy = _integer(get("max_tokens"), "max_tokens", least=0)
    current = _integer(get("max_completion_tokens"), "max_completion_tokens", least=0)
    return legacy if current is None else current


def _integer(value: Any, name: str, *, least: int) -> int | None:
    if value is None:
        return None
    if type(value) is float and value.is_integer():  # JSON has one kind of number: 16.0 is 16
        value = int(value)
    if type(value) is not int or value < least:
        raise errors.invalid(f"'{name}' must be an integer of at least {least}.", name)
    return value
