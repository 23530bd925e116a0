"""A one-line progress bar on stderr: redrawn in place on a terminal, a line every ten per cent elsewhere."""

from __future__ import annotations

import sys
import time


class ProgressBar:
    """Shows `done/total`, failures and elapsed seconds; call it as progress(done, total, failed)."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._started = time.perf_counter()
        self._terminal = sys.stderr.isatty()
        self._printed = -1

    def __call__(self, done: int, total: int, failed: int = 0) -> None:
        """Draw the bar for `done` of `total`."""
        elapsed = time.perf_counter() - self._started
        share = done / total if total else 1.0
        text = f"{self._title}: {done}/{total}  {elapsed:5.1f} s" + (f"  {failed} failed" if failed else "")
        if self._terminal:
            filled = int(share * 30)
            sys.stderr.write(f"\r[{'#' * filled}{'.' * (30 - filled)}] {text} ")
            if done >= total:
                sys.stderr.write("\n")
            sys.stderr.flush()
        elif int(share * 10) > self._printed:
            self._printed = int(share * 10)
            print(text, file=sys.stderr, flush=True)
