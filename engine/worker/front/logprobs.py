"""Log probabilities in both of OpenAI's shapes.

Owns how a token is shown: its text where its bytes are valid UTF-8, else its bytes escaped, never the
stand-in characters of a byte-level vocabulary. A special token has no bytes, because it is no part of the
text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from engine.worker.front.output import Entry

FLOOR = -9999.0
"""What OpenAI reports for a log probability of minus infinity, which JSON can't hold."""


class TokenTable(Protocol):
    """What is needed of `canonicalizer.TextModel`."""

    @property
    def special_ids(self) -> frozenset[int]: ...

    def token_bytes(self, token_id: int, /) -> bytes: ...


def token_text(table: TokenTable, token_id: int) -> str:
    """A token for people: text, or `\\xe6\\xbc` where the bytes are only part of a character."""
    raw = table.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "".join(f"\\x{byte:02x}" for byte in raw)


def _bounded(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, FLOOR)


def chat_entry(table: TokenTable, entry: Entry) -> dict[str, Any]:
    """One item of `choices[].logprobs.content`."""
    shown = _chat_token(table, entry.token_id, entry.logprob)
    shown["top_logprobs"] = [_chat_token(table, token, logprob) for token, logprob in entry.top]
    return shown


def _chat_token(table: TokenTable, token_id: int, logprob: float | None) -> dict[str, Any]:
    raw = b"" if token_id in table.special_ids else table.token_bytes(token_id)
    return {"token": token_text(table, token_id), "logprob": _bounded(logprob), "bytes": list(raw)}


def completion_logprobs(table: TokenTable, entries: Sequence[Entry]) -> dict[str, Any]:
    """The legacy object of four parallel lists; text offsets are in characters."""
    tokens, values, offsets = [], [], []
    tops: list[dict[str, float | None] | None] = []
    for entry in entries:
        name = token_text(table, entry.token_id)
        tokens.append(name)
        values.append(_bounded(entry.logprob))
        offsets.append(entry.offset)
        if entry.logprob is None:
            tops.append(None)
        else:
            top = {token_text(table, token): _bounded(logprob) for token, logprob in entry.top}
            tops.append({**top, name: _bounded(entry.logprob)})
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}
