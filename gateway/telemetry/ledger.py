"""The ledger: one entry per request, and the time series that the dashboard draws.

Owns a ring of the latest entries and one bucket per second. Always holds: an entry is recorded exactly
once, however its request ended; the parts of TTFT add up to TTFT; counters in `/metrics`, buckets and
entries are written in the same call from the same entry, so that they can never disagree; no prompt text is
kept. Token counts are prompt tokens unless named otherwise; times are seconds.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from gateway.telemetry.metrics import PARTS, Metrics

_SAMPLES_PER_BUCKET = 512


@dataclass(slots=True)
class LedgerEntry:
    """One request. Filled in while the request runs, fixed once recorded (shadow figures excepted)."""

    request_id: str
    at: float
    """Unix time of arrival."""
    path: str = ""
    tenant: str | None = None
    route: str = ""
    class_: str = ""
    pool: str = ""
    model: str = ""
    stream: bool = False
    replica: str = ""
    attempts: int = 0
    policy: str = ""
    canon: str = "off"
    ruleset: str = ""
    edits: int = 0
    bypass: str | None = None
    chain: str = ""
    """How the prompt was hashed: `tokens-in`, `parity-proved` or `text-chunks`."""
    prefix: str = ""
    """Hash (hex) of the last full block of the system prompt; empty where there is none."""
    prefix_tokens: int = 0
    """Tokens up to the end of that block."""
    prompt_tokens: int = 0
    available_tokens: int = 0
    captured_tokens: int = 0
    delivered_tokens: int = 0
    completion_tokens: int = 0
    recovered_tokens: int = 0
    recoverable_tokens: int = 0
    counted: bool = False
    """An engine answered: the token counts are real and enter the sums."""
    parts: list[float] = field(default_factory=lambda: [0.0] * len(PARTS))
    ttft_s: float | None = None
    total_s: float = 0.0
    status: int = 0
    outcome: str = ""
    """ok, refused, client_gone, truncated, upstream_error, stalled_client or internal."""
    error: str | None = None
    candidates: tuple[tuple[str, float, int, float], ...] = ()
    """(replica, cost in seconds, tokens it held, its queue in seconds) of every replica considered."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values, the parts of TTFT by name."""
        plain = asdict(self)
        plain["class"] = plain.pop("class_")
        plain["parts"] = dict(zip(PARTS, self.parts, strict=True))
        return plain


@dataclass(slots=True)
class Bucket:
    """Sums over the requests that ended in one second."""

    second: int
    requests: int = 0
    errors: int = 0
    prompt: int = 0
    available: int = 0
    captured: int = 0
    delivered: int = 0
    recovered: int = 0
    recoverable: int = 0
    completion: int = 0
    timed: int = 0
    ttfts: list[float] = field(default_factory=list)
    parts: list[float] = field(default_factory=lambda: [0.0] * len(PARTS))


class Ledger:
    """Ring of entries and ring of buckets; both bounded. `clock` gives Unix seconds."""

    def __init__(self, metrics: Metrics, *, entries: int = 2000, seconds: int = 900) -> None:
        self._metrics = metrics
        self._entries: deque[LedgerEntry] = deque(maxlen=entries)
        self._buckets: deque[Bucket] = deque(maxlen=seconds)
        self._rows: dict[int, dict[tuple[int, int], list[Any]]] = {}
        """Rows of the latest series, by step, of groups of buckets that are written to no more."""
        metrics.hit_ratio.set_function(lambda: self.hit_ratio(60))

    def record(self, entry: LedgerEntry, *, now: float | None = None) -> None:
        """Close an entry: counters, bucket and ring, once per request."""
        self._entries.append(entry)
        bucket = self._bucket(now)
        bucket.requests += 1
        if entry.status >= 400 or entry.outcome != "ok":
            bucket.errors += 1
        self._metrics.count_request(entry.route, entry.class_, entry.pool, entry.status)
        if not entry.counted:
            return
        bound = self._metrics.for_route(entry.model, entry.route)
        bound.prompt.inc(entry.prompt_tokens)
        bound.available.inc(entry.available_tokens)
        bound.captured.inc(entry.captured_tokens)
        bound.delivered.inc(entry.delivered_tokens)
        bound.completion.inc(entry.completion_tokens)
        bucket.prompt += entry.prompt_tokens
        bucket.available += entry.available_tokens
        bucket.captured += entry.captured_tokens
        bucket.delivered += entry.delivered_tokens
        bucket.completion += entry.completion_tokens
        if entry.ttft_s is None:
            return
        bound.ttft.observe(entry.ttft_s)
        bucket.timed += 1
        if len(bucket.ttfts) < _SAMPLES_PER_BUCKET:
            bucket.ttfts.append(entry.ttft_s)
        sums = bucket.parts
        for i, seconds in enumerate(entry.parts):
            bound.parts[i].observe(seconds)
            sums[i] += seconds

    def credit_recovered(self, entry: LedgerEntry, tokens: int, *, now: float | None = None) -> None:
        """The shadow index found that the original prompt would have hit `tokens` fewer."""
        entry.recovered_tokens += tokens
        self._metrics.for_route(entry.model, entry.route).recovered.inc(tokens)
        self._bucket(now).recovered += tokens

    def credit_recoverable(self, entry: LedgerEntry, tokens: int, *, now: float | None = None) -> None:
        """The shadow index found that the canonical prompt would have hit `tokens` more."""
        entry.recoverable_tokens += tokens
        self._metrics.for_route(entry.model, entry.route).recoverable.inc(tokens)
        self._bucket(now).recoverable += tokens

    def recent(self, limit: int = 100) -> list[LedgerEntry]:
        """The latest entries, newest first."""
        newest = list(self._entries)[-limit:] if limit > 0 else []
        newest.reverse()
        return newest

    def find(self, request_id: str) -> LedgerEntry | None:
        """The entry of a request that is still in the ring."""
        for entry in reversed(self._entries):
            if entry.request_id == request_id:
                return entry
        return None

    def hit_ratio(self, seconds: int = 60, *, now: float | None = None) -> float:
        """Delivered over prompt tokens of the requests that ended in the last `seconds`; 0 when there
        were none.
        """
        oldest = math.floor(time.time() if now is None else now) - seconds
        prompt = delivered = 0
        for bucket in reversed(self._buckets):
            if bucket.second <= oldest:
                break
            prompt += bucket.prompt
            delivered += bucket.delivered
        return delivered / prompt if prompt else 0.0

    def series(self, seconds: int = 300, step: int = 1, *, now: float | None = None) -> dict[str, list[Any]]:
        """Columns for the dashboard, oldest first, one value per `step` seconds that held a request.

        `t` (Unix seconds), `requests`, `errors`, token sums, ratios `delivered`, `captured`, `available`,
        `recovered` and `recoverable` (of prompt tokens; None without any), `ttft_p50`, `ttft_p95`, and each
        TTFT part's mean.
        """
        current = math.floor(time.time() if now is None else now)
        groups: dict[int, list[Bucket]] = {}
        for bucket in self._buckets:
            if current - seconds < bucket.second <= current:
                groups.setdefault(bucket.second // step * step, []).append(bucket)
        newest = self._buckets[-1] if self._buckets else None
        before, rows = self._rows.get(step, {}), {}
        for second, group in sorted(groups.items()):
            key = (second, len(group))  # the window's edge may cut a group
            row = before.get(key) if group[-1] is not newest else None
            rows[key] = row if row is not None else _row(second, group)
        closed = {key: row for key, row in rows.items() if newest is None or key[0] + step <= newest.second}
        self._rows = {step: closed}
        return {name: [row[i] for row in rows.values()] for i, name in enumerate(_COLUMNS)}

    def _bucket(self, now: float | None) -> Bucket:
        second = math.floor(time.time() if now is None else now)
        if self._buckets and self._buckets[-1].second >= second:
            return self._buckets[-1]
        bucket = Bucket(second)
        self._buckets.append(bucket)
        return bucket


_RATIOS = ("delivered", "captured", "available", "recovered", "recoverable")
_SUMS = ("requests", "errors", "prompt", "completion")
_COLUMNS = (
    "t",
    *_SUMS,
    "delivered_tokens",
    *_RATIOS,
    "ttft_p50",
    "ttft_p95",
    *(f"part_{part}" for part in PARTS),
)


def _row(second: int, group: list[Bucket]) -> list[Any]:
    """One step's values, in the order of `_COLUMNS`."""
    prompt = sum(bucket.prompt for bucket in group)
    ratios = (sum(getattr(bucket, name) for bucket in group) for name in _RATIOS)
    ttfts = sorted(value for bucket in group for value in bucket.ttfts)
    timed = sum(bucket.timed for bucket in group)
    parts = (sum(bucket.parts[i] for bucket in group) for i in range(len(PARTS)))
    return [
        second,
        *(sum(getattr(bucket, name) for bucket in group) for name in _SUMS),
        sum(bucket.delivered for bucket in group),
        *(total / prompt if prompt else None for total in ratios),
        percentile(ttfts, 0.5),
        percentile(ttfts, 0.95),
        *(total_s / timed if timed else None for total_s in parts),
    ]


def percentile(ordered: Iterable[float], share: float) -> float | None:
    """Nearest-rank percentile of values in ascending order; None when there are none."""
    values = list(ordered)
    return values[max(0, math.ceil(share * len(values)) - 1)] if values else None
