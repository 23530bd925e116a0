"""The text of a request: where system text stands, and which messages may carry a context block.

Reads OpenAI chat bodies (`messages`, content as a string or as parts) and Anthropic bodies (`system` at the
top). System text is the *leading* run of system and developer messages; one that stands inside the history
is history. A turn is a user message that holds text of its own; a message of tool results alone is not one.
Anything of an unexpected type is left out, never an error: what can't be read can't be moved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from canonicalizer.json_spans import Path

SYSTEM_ROLES = frozenset({"system", "developer"})


class Text(NamedTuple):
    """One string value of the body."""

    path: Path
    value: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """System texts in order, all messages, and how many of these belong to the system text."""

    system: tuple[Text, ...]
    messages: Sequence[Any]
    head: int

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> Prompt:
        """The prompt of a decoded chat body."""
        found: list[Text] = []
        _texts_of(body.get("system"), ("system",), found)
        messages = body.get("messages")
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            return cls(tuple(found), (), 0)
        head = 0
        for message in messages:
            if not isinstance(message, Mapping) or message.get("role") not in SYSTEM_ROLES:
                break
            _texts_of(message.get("content"), ("messages", head, "content"), found)
            head += 1
        return cls(tuple(found), messages, head)

    def turn_text(self, index: int) -> Text | None:
        """The text that ends the user turn at `index`: its content, or its last text part; None where it is
        no turn."""
        message = self.messages[index]
        if not isinstance(message, Mapping) or message.get("role") != "user":
            return None
        return _last_text(message.get("content"), ("messages", index, "content"))

    def tool_text(self, index: int) -> Text | None:
        """The text of a plain tool result (role `tool`, string content), else None."""
        message = self.messages[index]
        if isinstance(message, Mapping) and message.get("role") == "tool":
            content = message.get("content")
            if isinstance(content, str):
                return Text(("messages", index, "content"), content)
        return None

    def last_turn(self) -> int | None:
        """Index of the last user turn after the system text."""
        for index in range(len(self.messages) - 1, self.head - 1, -1):
            if self.turn_text(index) is not None:
                return index
        return None

    def is_loop(self, turn: int) -> bool:
        """True when tool results follow the turn: the model is still working on it."""
        return any(is_tool_result(message) for message in self.messages[turn + 1 :])


def is_tool_result(message: Any) -> bool:
    """A message of role `tool`, or a user message whose parts are tool results without text."""
    if not isinstance(message, Mapping):
        return False
    if message.get("role") == "tool":
        return True
    content = message.get("content")
    if message.get("role") != "user" or isinstance(content, str) or not isinstance(content, Sequence):
        return False
    kinds = {part.get("type") for part in content if isinstance(part, Mapping)}
    return "tool_result" in kinds and "text" not in kinds


def _last_text(content: Any, path: Path) -> Text | None:
    if isinstance(content, str):
        return Text(path, content)
    found: list[Text] = []
    _texts_of(content, path, found)
    return found[-1] if found else None


def _texts_of(content: Any, path: Path, found: list[Text]) -> None:
    if isinstance(content, str):
        found.append(Text(path, content))
    elif isinstance(content, Sequence):
        for index, part in enumerate(content):
            if isinstance(part, Mapping) and part.get("type") in ("text", "input_text"):
                text = part.get("text")
                if isinstance(text, str):
                    found.append(Text((*path, index, "text"), text))
