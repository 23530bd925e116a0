"""What one event of an upstream's stream means, and what of it goes to the client.

Owns the reading of a completion stream event by event. Always holds: an event that needs no change is
handed on as the very bytes that came; the only changes are the ones named in `StreamReader.take`; `[DONE]`
goes out at most once and nothing after it; nothing is invented.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from gateway.upstream.dialects import Usage
from gateway.upstream.sse import encode_event, event_data, is_done, parse_object

End = Literal["done", "finished", "cut"]

_FINISH = re.compile(rb'"finish_reason"\s*:\s*"')
_NULL_USAGE = re.compile(rb',\s*"usage"\s*:\s*null')


class StreamReader:
    """Reads the events of one answer. `choices` is the number of choices that were asked for."""

    __slots__ = ("_choices", "_show_usage", "content", "data", "done", "error", "finishes", "usage")

    def __init__(self, *, show_usage: bool, choices: int) -> None:
        self._show_usage = show_usage
        self._choices = choices
        self.data = False
        """A data event has come."""
        self.content = False
        """An event with text, a tool call or a finish has come: the first token."""
        self.done = False
        self.finishes = 0
        self.usage: Usage | None = None
        self.error: dict[str, Any] | None = None
        """The upstream's own error event."""

    @property
    def end(self) -> End:
        """How the stream stands, should it end now."""
        if self.done:
            return "done"
        return "finished" if self.finishes >= self._choices else "cut"

    def take(self, event: bytes) -> bytes:
        """The bytes to hand on for one whole event, `b""` for none.

        Changed or left out: usage the client did not ask for (the gateway did), be it a chunk of its own or
        a null in every chunk, the `warmfront` member of a bundled engine's chunks, and whatever follows
        `[DONE]` or an error.
        """
        if self.done or self.error is not None:
            return b""
        if not self._show_usage and b'"usage"' in event:
            event = _NULL_USAGE.sub(b"", event, count=1)
        if (
            self.content
            and b'"usage"' not in event
            and b"[DONE]" not in event
            and b'"error"' not in event
            and b'"warmfront"' not in event
        ):
            self.finishes += len(_FINISH.findall(event))
            return event
        return self._read(event)

    def _read(self, event: bytes) -> bytes:
        data = event_data(event)
        if data is None:
            return event
        if is_done(data):
            self.done = self.data = True
            return event
        self.data = True
        chunk = parse_object(data)
        if chunk is None:
            self.content = True
            return event
        error = chunk.get("error") or (chunk if chunk.get("object") == "error" else None)
        if error:
            self.error = error if isinstance(error, dict) else {"message": str(error)}
            return event
        choices = chunk.get("choices")
        choices = choices if isinstance(choices, list) else []
        if not self.content and any(isinstance(choice, dict) and _has_content(choice) for choice in choices):
            self.content = True
        if _FINISH.search(event):
            self.finishes += sum(
                1 for choice in choices if isinstance(choice, dict) and choice.get("finish_reason")
            )
        if isinstance(chunk.get("usage"), dict):
            self.usage = Usage.read(chunk) or self.usage
            if not self._show_usage:
                if not choices:
                    return b""
                del chunk["usage"]
                chunk.pop("warmfront", None)
                return encode_event(chunk)
        if chunk.pop("warmfront", None) is not None:
            return encode_event(chunk)
        return event


def _has_content(choice: dict[str, Any]) -> bool:
    if choice.get("finish_reason") or choice.get("text"):
        return True
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return False
    return any(value for key, value in delta.items() if key != "role")


def error_status(error: dict[str, Any]) -> int:
    """HTTP status for an error object of an upstream: its own numeric code, else by its type, else 502."""
    code = error.get("code")
    if isinstance(code, str) and code.isdigit():
        code = int(code)
    if isinstance(code, int) and 400 <= code <= 599:
        return code
    if error.get("type") == "invalid_request_error":
        return 400
    return 502
