"""What the end of a request adds to its ledger entry: token counts, and TTFT split into its parts.

Pure functions over the entry. Always holds: the parts of an entry add up to its TTFT; what the engine
reports never exceeds what the gateway saw.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.routing.replica import Timings
from gateway.telemetry.ledger import LedgerEntry
from gateway.telemetry.metrics import PARTS
from gateway.upstream.dialects import Usage

_ENGINE, _PREFILL, _SAMPLE, _RETURN = (
    PARTS.index(name) for name in ("engine_queue", "prefill", "first_sample", "return")
)


@dataclass(frozen=True, slots=True)
class Seen:
    """Moments that the gateway saw, by time.perf_counter(); 0 for those that never came."""

    started: float
    sent_at: float
    first_read_at: float
    first_sent_at: float


def take_usage(entry: LedgerEntry, usage: Usage, expected: int | None) -> bool:
    """Copy the engine's token counts; True when it counted other prompt tokens than `expected`."""
    entry.prompt_tokens = usage.prompt_tokens
    entry.delivered_tokens = usage.cached_tokens
    entry.completion_tokens = usage.completion_tokens
    return expected is not None and usage.prompt_tokens != expected


def split_ttft(entry: LedgerEntry, usage: Usage | None, seen: Seen) -> None:
    """Fill in the parts that only the end of the request knows; they add up to `ttft_s`."""
    parts = entry.parts
    reported = usage is not None and usage.prefill_s is not None
    if usage is not None and reported:
        parts[_ENGINE] = usage.queue_s or 0.0
        parts[_PREFILL] = usage.prefill_s or 0.0
        parts[_SAMPLE] = usage.first_sample_s or 0.0
    if not seen.first_sent_at:  # not streamed: the first token is known by the engine's report alone
        entry.ttft_s = sum(parts) if reported else None
        return
    if not reported:
        parts[_PREFILL] = seen.first_read_at - seen.sent_at
    entry.ttft_s = seen.first_sent_at - seen.started
    rest = entry.ttft_s - sum(parts)
    if rest < 0.0:  # two clocks: what the engine reports cannot exceed what was seen here
        parts[_PREFILL] = max(0.0, parts[_PREFILL] + rest)
        rest = max(0.0, entry.ttft_s - sum(parts))
    parts[_RETURN] = rest


def reported_timings(usage: Usage | None) -> Timings | None:
    """What the engine reported of one request's prefill; None when it did not."""
    if usage is None or usage.prefill_s is None:
        return None
    return Timings(
        queue_s=usage.queue_s or 0.0,
        prefill_s=usage.prefill_s,
        first_sample_s=usage.first_sample_s or 0.0,
        prefill_tokens=usage.prefill_tokens or 0,
    )
