"""Prometheus metrics of the gateway.

Owns one registry and every `warmfront_*` collector. Always holds: labels come from policy (route, class,
pool, model names) or from closed sets (status codes, parts, reasons), never from a request's own strings;
the hot path touches label children that were bound once (`RouteMetrics`), not label look-ups; what the
dashboard shows is computed from the same `LedgerEntry` values in the same call (`ledger.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder

PARTS = (
    "accept",
    "canonicalize",
    "tokenize",
    "gateway_queue",
    "connect",
    "engine_queue",
    "prefill",
    "first_sample",
    "return",
)
"""TTFT in order; the parts of one request add up to its TTFT."""

_TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 30.0, 60.0)
_PART_BUCKETS = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)
_DELAY_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0)


@dataclass(slots=True)
class RouteMetrics:
    """Children bound for one (model, route); `record` is called once per finished request."""

    prompt: Counter
    available: Counter
    captured: Counter
    delivered: Counter
    recovered: Counter
    recoverable: Counter
    completion: Counter
    ttft: Histogram
    parts: tuple[Histogram, ...]


class Metrics:
    """All collectors of one gateway process."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry(auto_describe=True)
        by_route = ("model", "route")

        def tokens(name: str, text: str) -> Counter:
            return Counter(f"warmfront_{name}_tokens", text, by_route, registry=registry)

        self.requests = Counter(
            "warmfront_requests", "Requests answered.", ("route", "class", "pool", "code"), registry=registry
        )
        self.prompt_tokens = tokens("prompt", "Prompt tokens of requests that reached an engine.")
        self.available_tokens = tokens("available", "Prompt tokens that some live replica held at arrival.")
        self.captured_tokens = tokens("captured", "Prompt tokens that the chosen replica held at arrival.")
        self.delivered_tokens = tokens("delivered", "Prompt tokens the engine reported as cached.")
        self.recovered_tokens = tokens(
            "recovered", "Delivered tokens that the original prompt would have missed."
        )
        self.recoverable_tokens = tokens(
            "recoverable", "Tokens that enforcing the rules would have delivered."
        )
        self.completion_tokens = tokens("completion", "Output tokens.")
        self.hit_ratio = Gauge(
            "warmfront_prefix_hit_ratio", "Delivered over prompt tokens, last 60 s.", registry=registry
        )
        self.ttft = Histogram(
            "warmfront_ttft_seconds",
            "Time to first token.",
            by_route,
            buckets=_TTFT_BUCKETS,
            registry=registry,
        )
        self.ttft_part = Histogram(
            "warmfront_ttft_part_seconds",
            "Parts of the time to first token; they add up to it.",
            ("part",),
            buckets=_PART_BUCKETS,
            registry=registry,
        )
        self._parts = tuple(self.ttft_part.labels(part) for part in PARTS)
        self.canon_bypass = Counter(
            "warmfront_canon_bypass", "Enforced requests sent as they came.", ("reason",), registry=registry
        )
        self.canon_edits = Counter(
            "warmfront_canon_edits", "Edits made.", ("route", "rule"), registry=registry
        )
        self.canon_mode = Gauge(
            "warmfront_canon_enforcing",
            "1 where a route edits prompts right now.",
            ("route",),
            registry=registry,
        )
        self.replica_up = Gauge(
            "warmfront_replica_up", "1 when a replica is ready.", ("pool", "replica"), registry=registry
        )
        self.replica_inflight = Gauge(
            "warmfront_replica_inflight", "Requests on a replica.", ("pool", "replica"), registry=registry
        )
        self.replica_blocks = Gauge(
            "warmfront_replica_resident_blocks",
            "Blocks of prompt prefixes a replica holds, by the prefix index.",
            ("pool", "replica"),
            registry=registry,
        )
        self.pin_state = Gauge(
            "warmfront_pin_state",
            "1 for the state a pin is in.",
            ("pin", "replica", "state"),
            registry=registry,
        )
        self.queue_waiting = Gauge(
            "warmfront_queue_waiting", "Requests waiting for a slot.", ("pool", "class"), registry=registry
        )
        self.loop_delay = Histogram(
            "warmfront_loop_delay_seconds",
            "How late the event loop ran a timer.",
            buckets=_DELAY_BUCKETS,
            registry=registry,
        )
        self.template_mismatch = Counter(
            "warmfront_template_mismatch",
            "Answers whose prompt_tokens differ from the gateway's own count.",
            ("pool",),
            registry=registry,
        )
        self.retries = Counter(
            "warmfront_upstream_retries",
            "Attempts repeated on another replica.",
            ("reason",),
            registry=registry,
        )
        self.shadow_dropped = Counter(
            "warmfront_shadow_dropped",
            "Requests the shadow index did not follow.",
            ("reason",),
            registry=registry,
        )
        self._by_route: dict[tuple[str, str], RouteMetrics] = {}
        self._codes: dict[tuple[str, str, str, int], Counter] = {}

    def for_route(self, model: str, route: str) -> RouteMetrics:
        """The children of one (model, route), bound at first use."""
        key = (model, route)
        bound = self._by_route.get(key)
        if bound is None:
            bound = self._by_route[key] = RouteMetrics(
                prompt=self.prompt_tokens.labels(*key),
                available=self.available_tokens.labels(*key),
                captured=self.captured_tokens.labels(*key),
                delivered=self.delivered_tokens.labels(*key),
                recovered=self.recovered_tokens.labels(*key),
                recoverable=self.recoverable_tokens.labels(*key),
                completion=self.completion_tokens.labels(*key),
                ttft=self.ttft.labels(*key),
                parts=self._parts,
            )
        return bound

    def count_request(self, route: str, class_: str, pool: str, code: int) -> None:
        """One answered request."""
        key = (route, class_, pool, code)
        counter = self._codes.get(key)
        if counter is None:
            counter = self._codes[key] = self.requests.labels(route, class_, pool, str(code))
        counter.inc()

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """The registry as text and its content type, OpenMetrics where the scraper asks for it."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type
