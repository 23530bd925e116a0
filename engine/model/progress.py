"""Progress of long steps, for a person or a log.

On a terminal one line is rewritten in place; elsewhere a line is printed at every tenth part, so that a log
shows movement without filling up. The clock is read to limit how often a terminal is written to.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import TextIO


@dataclass(slots=True)
class ProgressLine:
    """Prints `what  done / total MB  percent` to `stream` (stderr when not given)."""

    stream: TextIO = field(default_factory=lambda: sys.stderr)
    _what: str = ""
    _tenth: int = -1
    _drawn: float = 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        """Report `done` of `total` bytes of the step `what`; `total` 0 means that it is not known."""
        if what != self._what:
            self._what, self._tenth, self._drawn = what, -1, 0.0
        finished = total > 0 and done >= total
        tenth = done * 10 // total if total else done // 10_000_000
        now = time.monotonic()
        if self.stream.isatty():
            if now - self._drawn < 0.1 and not finished:
                return
            self._drawn = now
            self.stream.write(f"\r\x1b[K{self._text(done, total)}" + ("\n" if finished else ""))
        elif tenth != self._tenth:
            self.stream.write(self._text(done, total) + "\n")
        else:
            return
        self._tenth = tenth
        self.stream.flush()

    def note(self, text: str) -> None:
        """Print one line of its own."""
        self.stream.write(text + "\n")
        self.stream.flush()

    def _text(self, done: int, total: int) -> str:
        if not total:
            return f"{self._what}  {done / 1e6:.1f} MB"
        return f"{self._what}  {done / 1e6:.1f} / {total / 1e6:.1f} MB  {min(100, done * 100 // total)} %"
