"""What a request needs from the rest of the gateway.

Owns no state of its own: one record of the parts, made by `gateway.app` and read by the handlers. `policy` is
replaced as a whole on a reload; a request reads it once and keeps that version to its end.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from gateway.admission import PoolGate
from gateway.canon.learning import Learning
from gateway.canon.service import CanonService
from gateway.canon.text import PoolText, TextModels
from gateway.config import GatewayConfig
from gateway.routing.pool import PoolState
from gateway.routing.router import Router
from gateway.telemetry.ledger import Ledger
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.prefixes import SystemPrefixes
from gateway.telemetry.shadow import Shadow
from gateway.upstream.client import Origin, UpstreamClient
from gateway.upstream.live import LiveCalls
from policies import Policy


class RetryBudget:
    """Lets retries be at most `ratio` of the requests in the long run, with a burst; a retry storm ends
    by itself.
    """

    __slots__ = ("_burst", "_ratio", "_tokens")

    def __init__(self, ratio: float, burst: float) -> None:
        self._ratio = ratio
        self._burst = burst
        self._tokens = burst

    def request(self) -> None:
        """A first attempt was made."""
        self._tokens = min(self._burst, self._tokens + self._ratio)

    def take(self) -> bool:
        """True when one retry may be made now."""
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True


@dataclass(slots=True)
class Services:
    """The parts, all of one event loop."""

    config: GatewayConfig
    policy: Policy
    router: Router
    pools: dict[str, PoolState]
    gates: dict[str, PoolGate]
    texts: dict[str, PoolText]
    text_models: TextModels
    canon: CanonService
    learning: Learning
    shadow: Shadow
    client: UpstreamClient
    ledger: Ledger
    metrics: Metrics
    retries: RetryBudget
    live: LiveCalls = field(default_factory=LiveCalls)
    unordered: dict[str, int] = field(default_factory=dict)
    """Replicas (with the epoch of that answer) that refused a request's priority: it is not sent again."""
    prefixes: SystemPrefixes = field(default_factory=SystemPrefixes)
    draining: bool = False
    running: set[asyncio.Task[object]] = field(default_factory=set)
    origins: dict[str, Origin] = field(default_factory=dict)

    def origin(self, base_url: str) -> Origin:
        """The parsed base URL of a replica."""
        origin = self.origins.get(base_url)
        if origin is None:
            if len(self.origins) > 4096:
                self.origins.clear()
            origin = self.origins[base_url] = Origin.from_url(base_url)
        return origin
