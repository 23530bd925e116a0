"""OpenAI chat messages in the one form that chat templates are given.

Owns the meaning of content that is absent, null or in parts, of tool-call arguments, and the rules for
message orders that a template refuses. What must hold: no text is dropped, no separator is invented inside a
message, an empty turn stays a turn, and the same messages always give the same result.

Folding, in the order tried, each only when the template refused everything before it:
  1. a system message after the leading ones becomes the start of the user message right after it (with a
     blank line between), else the end of the one right before it, else a user turn of its own;
  2. also, neighbouring messages of one role, none with tool calls, become one (a blank line between);
  3. also, the leading system message becomes the start of the first user message.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Message = dict[str, Any]
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_GAP = "\n\n"


class TemplateError(ValueError):
    """Messages can't be turned into a prompt; names the field or repeats the template's reason."""


def content_text(content: object, where: str) -> str:
    """The text of a message's content: null is empty, parts are joined in order with nothing between them."""
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if not isinstance(content, Sequence):
        raise TemplateError(f"{where}: expected a string or a list of parts, not {type(content).__name__}")
    texts = []
    for index, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type", "text") if isinstance(part, Mapping) else None
        text = part.get(_TEXT_PARTS[kind]) if kind in _TEXT_PARTS else None
        if not isinstance(text, str):
            raise TemplateError(f"{where}[{index}]: this model takes text parts only, not {kind!r}")
        texts.append(text)
    return "".join(texts)


def content_chars(messages: object) -> int:
    """Characters of all message texts, in strings and in parts; what is of another type counts nothing."""
    total = 0
    for message in messages if isinstance(messages, list | tuple) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, str):
            total += len(content)
            continue
        for part in content if isinstance(content, list | tuple) else ():
            text = part.get("text") if isinstance(part, Mapping) else part
            total += len(text) if isinstance(text, str) else 0
    return total


def _parsed_arguments(call: object) -> object:
    """The call with its arguments as an object where they are a JSON object, else as it is."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return call
    function = call["function"]
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": value}} if isinstance(value, dict) else call


def normalize(
    messages: Sequence[Mapping[str, Any]], *, developer_role: str, arguments_as_objects: bool
) -> list[Message]:
    """Messages whose content is a string; raises `TemplateError` that names the bad field.

    `developer_role` is the role a developer message gets; `arguments_as_objects` parses tool-call arguments.
    """
    result: list[Message] = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise TemplateError(f"messages[{index}]: expected an object, not {type(message).__name__}")
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise TemplateError(f"messages[{index}].role: expected a non-empty string")
        text = content_text(message.get("content"), f"messages[{index}].content")
        plain = {**message, "content": text}
        if role == "developer":
            plain["role"] = developer_role
        calls = message.get("tool_calls")
        if calls and arguments_as_objects and isinstance(calls, Sequence):
            plain["tool_calls"] = [_parsed_arguments(call) for call in calls]
        result.append(plain)
    return result


def foldings(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """What to try after the original was refused, as this file's head lists it; equal ones once."""
    seen = [list(messages)]
    folded = fold_later_system(messages)
    merged = merge_neighbours(folded)
    for attempt in (folded, merged, merge_neighbours(_system_as_user(merged))):
        if attempt not in seen:
            seen.append(attempt)
            yield attempt


def fold_later_system(messages: Sequence[Message]) -> list[Message]:
    """System messages after the leading ones folded into a user message next to them (rule 1)."""
    result: list[Message] = []
    waiting: list[str] = []

    def settle(following: Message | None) -> None:
        text = _GAP.join(waiting)
        waiting.clear()
        if following is not None and following["role"] == "user":
            result.append({**following, "content": _joined(text, following["content"])})
            return
        if result and result[-1]["role"] == "user":
            result[-1] = {**result[-1], "content": _joined(result[-1]["content"], text)}
        else:
            result.append({"role": "user", "content": text})
        if following is not None:
            result.append(following)

    leading = True
    for message in messages:
        leading = leading and message["role"] == "system"
        if message["role"] == "system" and not leading:
            waiting.append(message["content"])
        elif waiting:
            settle(message)
        else:
            result.append(message)
    if waiting:
        settle(None)
    return result


def merge_neighbours(messages: Sequence[Message]) -> list[Message]:
    """Neighbouring messages of one role made one (rule 2); tool results and tool calls stay apart."""
    result: list[Message] = []
    for message in messages:
        last = result[-1] if result else None
        if (
            last is not None
            and last["role"] == message["role"] != "tool"
            and not last.get("tool_calls")
            and not message.get("tool_calls")
        ):
            result[-1] = {**last, "content": _joined(last["content"], message["content"])}
        else:
            result.append(message)
    return result


def _system_as_user(messages: Sequence[Message]) -> list[Message]:
    """The leading system message as a user turn (rule 3)."""
    return [{**item, "role": "user"} if item["role"] == "system" else item for item in messages]


def _joined(first: str, second: str) -> str:
    return f"{first}{_GAP}{second}" if first and second else first or second
