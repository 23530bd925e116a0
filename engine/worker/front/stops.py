"""Stop strings over a stream of text pieces.

Owns the text that is held back. Always holds: no character of a matched stop string is ever released; what
is released plus what is held equals what was pushed, in order; the result does not depend on how the text was
cut into pieces, because the match that *ends* first wins (ties: the one that starts first).
Streaming and whole responses use this one matcher.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds the first of `stops` (non-empty strings) in text that arrives in pieces."""

    __slots__ = ("_held", "_longest", "_stops", "matched")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max((len(stop) for stop in self._stops), default=0)
        self._held = ""
        self.matched: str | None = None

    def push(self, piece: str) -> str:
        """Take a piece, return the text that may now be sent. After a match nothing more is released."""
        if self.matched is not None:
            return ""
        text = self._held + piece
        found: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (found is None or (start + len(stop), start) < found[:2]):
                found = (start + len(stop), start, stop)
        if found is not None:
            self.matched = found[2]
            self._held = ""
            return text[: found[1]]
        keep = self._undecided(text)
        self._held = text[keep:]
        return text[:keep]

    def flush(self) -> str:
        """Release what is held: the text has ended without a match."""
        held, self._held = self._held, ""
        return held

    def _undecided(self, text: str) -> int:
        """Index of the earliest position from which a stop string could still grow."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            tail = text[start:]
            if any(stop.startswith(tail) for stop in self._stops):
                return start
        return len(text)
