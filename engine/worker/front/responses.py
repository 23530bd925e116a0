"""Bodies and stream chunks of chat completions and completions.

Owns the bytes that a client sees. Always holds: constant parts of a chunk are encoded once per request; the
role travels with a choice's first content; `finish_reason` is in its own last chunk; a chunk has a `usage`
key only when the client asked for usage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import orjson

from engine.worker.front.generate import Usage
from engine.worker.front.logprobs import TokenTable, chat_entry, completion_logprobs
from engine.worker.front.output import Entry, Piece

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
_END = b"\n\n"


def private_part(usage: Usage) -> dict[str, Any]:
    """The `warmfront` object of a response: seconds per phase and prompt tokens that were computed."""
    return {
        "timings": {
            "queue_s": usage.queue_s,
            "prefill_s": usage.prefill_s,
            "first_sample_s": usage.first_sample_s,
        },
        "prefill_tokens": usage.prefill_tokens,
    }


class Shape:
    """How one request's answer is written; `kind` picks the endpoint's shape.

    `echoed[i]` is the text that choice i begins with (completions with `echo`), "" otherwise.
    """

    def __init__(
        self,
        kind: Literal["chat", "completions"],
        *,
        response_id: str,
        created: int,
        model: str,
        fingerprint: str,
        table: TokenTable,
        wants_logprobs: bool,
        include_usage: bool,
        continuous_usage: bool,
        private: bool,
        echoed: Sequence[str],
    ) -> None:
        self._chat = kind == "chat"
        self._table = table
        self._wants_logprobs = wants_logprobs
        self.continuous_usage = include_usage and continuous_usage
        self._include_usage = include_usage
        self._private = private
        self._echoed = list(echoed)
        self._begun = [False] * len(echoed)
        name = "chat.completion" if self._chat else "text_completion"
        self._head = {
            "id": response_id,
            "object": name,
            "created": created,
            "model": model,
            "system_fingerprint": fingerprint,
        }
        head = {**self._head, "object": "chat.completion.chunk" if self._chat else name}
        self._prefix = b"data: " + orjson.dumps(head)[:-1] + b',"choices":['
        self._suffix = b'],"usage":null}' + _END if include_usage and not continuous_usage else b"]}" + _END

    def events(
        self, index: int, piece: Piece, prompt_entries: Sequence[Entry] | None, usage: Usage | None
    ) -> bytes:
        """The one or two chunks that carry a piece: content, then finish."""
        text, entries = self._with_echo(index, piece, prompt_entries)
        suffix = self._suffix
        if self.continuous_usage and usage is not None:
            suffix = b'],"usage":' + orjson.dumps(usage.as_dict()) + b"}" + _END
        first = not self._begun[index]
        self._begun[index] = True
        events = b""
        if text or entries or first:
            events = self._prefix + self._content(index, text, entries, first=first) + suffix
        if piece.finish_reason is not None:
            events += self._prefix + self._finish(index, piece.finish_reason) + suffix
        return events

    def closing(self, usage: Usage) -> bytes:
        """What follows the last choice: the usage chunk where asked for, then [DONE]."""
        if not self._include_usage:
            return DONE
        extra: dict[str, Any] = {"usage": usage.as_dict()}
        if self._private:
            extra["warmfront"] = private_part(usage)
        return self._prefix + b"]," + orjson.dumps(extra)[1:] + _END + DONE

    def body(
        self, pieces: Sequence[Sequence[Piece]], prompts: Sequence[Sequence[Entry] | None], usage: Usage
    ) -> bytes:
        """The whole answer; `pieces[i]` are choice i's, `prompts[i]` its prompt's log probabilities."""
        choices = []
        for index, parts in enumerate(pieces):
            joined = Piece(
                "".join(part.text for part in parts),
                tuple(entry for part in parts for entry in part.entries),
                parts[-1].finish_reason,
            )
            text, entries = self._with_echo(index, joined, prompts[index])
            logprobs = self._logprobs(entries)
            choice: dict[str, Any] = {"index": index}
            if self._chat:
                choice["message"] = {"role": "assistant", "content": text, "refusal": None}
            else:
                choice["text"] = text
            choices.append({**choice, "logprobs": logprobs, "finish_reason": joined.finish_reason})
        answer = {**self._head, "choices": choices, "usage": usage.as_dict()}
        if self._private:
            answer["warmfront"] = private_part(usage)
        return orjson.dumps(answer)

    def _with_echo(
        self, index: int, piece: Piece, prompt_entries: Sequence[Entry] | None
    ) -> tuple[str, tuple[Entry, ...]]:
        if self._begun[index] or self._chat:
            base = len(self._echoed[index])
            return piece.text, _shifted(piece.entries, base)
        base = len(self._echoed[index])
        return self._echoed[index] + piece.text, (*(prompt_entries or ()), *_shifted(piece.entries, base))

    def _content(self, index: int, text: str, entries: Sequence[Entry], *, first: bool) -> bytes:
        start = b'{"index":%d,' % index
        logprobs = orjson.dumps(self._logprobs(entries)) if self._wants_logprobs else b"null"
        if not self._chat:
            part = b'"text":' + orjson.dumps(text)
        elif first:
            part = b'"delta":{"role":"assistant","content":' + orjson.dumps(text) + b"}"
        else:
            part = b'"delta":{"content":' + orjson.dumps(text) + b"}"
        return start + part + b',"logprobs":' + logprobs + b',"finish_reason":null}'

    def _finish(self, index: int, reason: str) -> bytes:
        part = b'"delta":{}' if self._chat else b'"text":""'
        return b'{"index":%d,%b,"logprobs":null,"finish_reason":"%b"}' % (index, part, reason.encode())

    def _logprobs(self, entries: Sequence[Entry]) -> dict[str, Any] | None:
        if not self._wants_logprobs:
            return None
        if self._chat:
            return {"content": [chat_entry(self._table, entry) for entry in entries], "refusal": None}
        return completion_logprobs(self._table, entries)


def _shifted(entries: tuple[Entry, ...], base: int) -> tuple[Entry, ...]:
    if not base:
        return entries
    return tuple(Entry(e.token_id, e.logprob, e.top, e.offset + base) for e in entries)
