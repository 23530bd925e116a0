"""The replica's own Prometheus metrics.

Owns one registry per front. Always holds: labels are bounded (endpoint and status code), counters count
tokens as the step process reported them, and gauges are set from one set of figures per scrape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.worker.front.generate import Usage

_TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_GAUGES = {
    "running": ("running", "Sequences that hold a slot."),
    "waiting": ("waiting", "Sequences that wait for a slot or blocks."),
    "free_slots": ("free_slots", "Sequences that could start now."),
    "total": ("blocks", "KV blocks in all."),
    "free": ("blocks_free", "KV blocks that hold nothing."),
    "cached": ("blocks_cached", "KV blocks that hold reusable prefixes and serve no sequence."),
    "used": ("blocks_used", "KV blocks that a sequence or a pin holds."),
    "pinned": ("blocks_pinned", "KV blocks that pins keep resident."),
    "prefill_tokens_pending": ("prefill_tokens_pending", "Prompt tokens admitted and not computed yet."),
    "step_age_s": ("step_age_seconds", "Since the step process last said anything."),
    "prefill_tokens_per_s": ("prefill_tokens_per_second", "Measured prefill speed."),
}
_COUNTERS = {
    "query_tokens_total": "Prompt tokens of admitted requests.",
    "hit_tokens_total": "Prompt tokens of admitted requests that the prefix cache held.",
    "computed_tokens_total": "Tokens computed: prefill, decode and pins.",
    "recomputed_tokens_total": "Tokens computed again after a preemption.",
    "preemptions_total": "Sequences that lost their slot to a more urgent one.",
    "evicted_blocks_total": "Cached blocks given up for new ones.",
    "refused_total": "Requests that the step process refused.",
}


class _StepStats(Collector):
    """The step process's figures, as they were when `values` was last set."""

    def __init__(self) -> None:
        self.values: Mapping[str, Any] = {}

    def collect(self) -> Iterator[Metric]:
        for name, (shown, text) in _GAUGES.items():
            yield GaugeMetricFamily(f"warmfront_engine_{shown}", text, float(self.values.get(name, 0)))
        for name, text in _COUNTERS.items():
            shown = f"warmfront_engine_{name.removesuffix('_total')}"
            yield CounterMetricFamily(shown, text, float(self.values.get(name, 0)))


class Metrics:
    """Collectors of one replica and their text exposition."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "warmfront_engine_requests", "HTTP requests.", ["endpoint", "code"], registry=self._registry
        )
        self._prompt = self._counter("prompt_tokens", "Prompt tokens of finished requests.")
        self._cached = self._counter("cached_tokens", "Prompt tokens found in the prefix cache.")
        self._output = self._counter("output_tokens", "Tokens generated.")
        self._ttft = Histogram(
            "warmfront_engine_ttft_seconds",
            "From the request's arrival at the front to its first token.",
            buckets=_TTFT_BUCKETS,
            registry=self._registry,
        )
        self._stats = _StepStats()
        self._registry.register(self._stats)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"warmfront_engine_{name}", text, registry=self._registry)

    def request_done(self, endpoint: str, status: int) -> None:
        """Count one answered HTTP request."""
        self._requests.labels(endpoint, str(status)).inc()

    def first_token(self, seconds: float) -> None:
        """Record one request's time to first token."""
        self._ttft.observe(seconds)

    def tokens_done(self, usage: Usage) -> None:
        """Count the tokens of one request, however it ended."""
        self._prompt.inc(usage.prompt_tokens)
        self._cached.inc(usage.cached_tokens)
        self._output.inc(usage.completion_tokens)

    def exposition(self, stats: Mapping[str, Any]) -> bytes:
        """Text for a scrape; `stats` are the step process's latest, with their age."""
        self._stats.values = stats
        return generate_latest(self._registry)
