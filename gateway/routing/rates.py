"""Prefill rates: how fast a replica computes prompt tokens, learned from its own reports.

The rate is a ratio of two decayed sums (tokens over seconds), and the decay counts tokens, not reports: a
hundred reports of ten tokens, which are mostly overhead, weigh as much as one of a thousand.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable

DEFAULT_TOKENS_PER_S = 1_000.0  # until any replica of the pool has reported; a small model on one core
_MEMORY_TOKENS = 8_192.0  # a report fades to 1/e after this many further tokens


class PrefillRate:
    """Decayed sums of reported prefill work. `tokens_per_s` is None before the first report."""

    __slots__ = ("_seconds", "_tokens", "tokens_per_s")

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self.tokens_per_s: float | None = None

    def learn(self, tokens: int, seconds: float) -> None:
        """One report: `tokens` computed in `seconds`. Reports that make no sense are ignored."""
        if tokens <= 0 or not (0.0 < seconds < 3_600.0):
            return
        keep = math.exp(-tokens / _MEMORY_TOKENS)
        self._tokens = self._tokens * keep + tokens
        self._seconds = self._seconds * keep + seconds
        self.tokens_per_s = self._tokens / self._seconds


def pool_median(rates: Iterable[float | None]) -> float:
    """Median of the known rates; `DEFAULT_TOKENS_PER_S` when none is known."""
    known = [rate for rate in rates if rate]
    return statistics.median(known) if known else DEFAULT_TOKENS_PER_S
