"""One choice's tokens to text: detokenizer, stop strings, logprob entries, finish.

Owns the text of a choice from its first token to its finish. Always holds: released pieces joined are the
choice's whole text; a stop token or stop string is in none of them; there is exactly one finish; a logprob
entry is released with the first character of its token and never for text that was cut away.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine.core.sequence import TokenOutput
from engine.worker.front.stops import StopMatcher


class TextDecoder(Protocol):
    """What is needed of `canonicalizer.Detokenizer`."""

    def push(self, token_id: int, /) -> str: ...

    def flush(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Entry:
    """A token with its log probability. `offset` counts characters from the start of the choice's text."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step adds to a choice."""

    text: str
    entries: tuple[Entry, ...]
    finish_reason: str | None


class ChoiceOutput:
    """Accumulates one choice. `stop_ids` end it without being text."""

    __slots__ = (
        "_decoder",
        "_entries",
        "_matcher",
        "_min_tokens",
        "_released",
        "_seen",
        "_stop_ids",
        "_wants_logprobs",
        "completion_tokens",
        "finish_reason",
    )

    def __init__(
        self,
        decoder: TextDecoder,
        stops: tuple[str, ...],
        stop_ids: frozenset[int],
        *,
        min_tokens: int,
        wants_logprobs: bool,
    ) -> None:
        self._decoder = decoder
        self._matcher = StopMatcher(stops) if stops else None
        self._stop_ids = stop_ids
        self._min_tokens = min_tokens
        self._wants_logprobs = wants_logprobs
        self._entries: list[Entry] = []
        self._seen = 0
        self._released = 0
        self.completion_tokens = 0
        self.finish_reason: str | None = None

    @property
    def stopped_by_text(self) -> bool:
        """True when a stop string ended the choice, so that the engine must be told."""
        return self._matcher is not None and self._matcher.matched is not None

    def push(self, output: TokenOutput) -> Piece:
        """Take the next token, or the end without one; after the finish nothing more may come."""
        finish: str | None = output.finish_reason
        token_id = output.token_id
        piece = ""
        if token_id is not None:
            self.completion_tokens += 1
            if finish != "stop" or token_id not in self._stop_ids:
                piece = self._decoder.push(token_id)
                if self._wants_logprobs:
                    logprob, top = output.logprob or (None, ())
                    self._entries.append(Entry(token_id, logprob, top, self._seen))
        if finish is not None:
            piece += self._decoder.flush()
        self._seen += len(piece)
        released = self._through_stops(piece, ended=finish is not None)
        if self.stopped_by_text:
            finish = "stop"
        self.finish_reason = finish
        self._released += len(released)
        return Piece(released, self._due_entries(ended=finish is not None), finish)

    def _through_stops(self, piece: str, *, ended: bool) -> str:
        matcher = self._matcher
        if matcher is None or self.completion_tokens < self._min_tokens:
            return piece
        released = matcher.push(piece)
        if ended and matcher.matched is None:
            released += matcher.flush()
        return released

    def _due_entries(self, *, ended: bool) -> tuple[Entry, ...]:
        if not self._entries:
            return ()
        if ended and not self.stopped_by_text:
            due = len(self._entries)
        else:
            due = 0
            while due < len(self._entries) and self._entries[due].offset < self._released:
                due += 1
        entries, self._entries = tuple(self._entries[:due]), self._entries[due:]
        return entries
