"""Canonicalization as the gateway runs it: modes, memories, proof, budget and kill switch.

Owns what the pure pipeline may not hold: each tenant's replay memory, each route's mode at this moment, and
the record of bypasses. Always holds: bytes change only in `enforce`; bytes that were changed were proved
first (`undo(edits, sent) == received`); an exception, a failed proof, a budget overrun or a body that is
escaped unusually sends the original; a request that would be served without the pipeline is never refused
because of it. A client may narrow its route's mode, never widen it; what five bypasses within a minute do is
demotion.py's.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import xxhash
from prometheus_client import Counter

from canonicalizer import (
    Canonical,
    Context,
    Edit,
    EditError,
    ReplayMemory,
    Ruleset,
    UnusualEscapes,
    apply_proved,
    canonicalize,
    fence_key,
)
from gateway.canon.demotion import Demotions
from gateway.canon.kill_switch import KillSwitch
from gateway.telemetry.metrics import Metrics
from policies import Route

Mode = Literal["off", "observe", "enforce"]

_STRENGTH: dict[str, int] = {"off": 0, "observe": 1, "enforce": 2}
_BUDGET_BASE_S = 0.005
_BUDGET_PER_CHAR_S = 0.0001 / 4000  # 0.1 ms per 1,000 tokens of about four characters
_MAX_TENANTS = 4096


@dataclass(frozen=True, slots=True)
class CanonOutcome:
    """What canonicalization did to one request.

    `raw` and `messages` are what to send. `other` holds the messages of the form that is not sent, where it
    differs: the original under `enforce`, the canonical one under `observe`.
    """

    mode: Mode
    ruleset: str
    raw: bytes
    messages: list[dict[str, Any]]
    body: Mapping[str, Any]
    edits: tuple[Edit, ...] = ()
    other: list[dict[str, Any]] | None = None
    bypass: str | None = None
    elapsed_s: float = 0.0

    @property
    def header(self) -> str:
        """The value of `x-warmfront-canon`: mode, ruleset version, number of edits made."""
        made = len(self.edits) if self.mode == "enforce" and self.bypass is None else 0
        return f"{self.mode}; ruleset={self.ruleset or '-'}; edits={made}"


class CanonService:
    """One per gateway. `canonicalize` is synchronous and does no I/O."""

    def __init__(
        self,
        metrics: Metrics,
        secret: bytes,
        switch: KillSwitch,
        *,
        bypass_limit: int = 5,
        memory_ttl_s: int = 86_400,
    ) -> None:
        self._metrics = metrics
        self._secret = secret
        self._switch = switch
        self._demotions = Demotions(bypass_limit, _MAX_TENANTS)
        self._memory_ttl_s = memory_ttl_s
        self._memories: OrderedDict[str, ReplayMemory] = OrderedDict()
        self._contexts: dict[str, Context] = {}
        self._edit_counters: dict[tuple[str, str], Counter] = {}

    def mode_of(self, route: Route, tenant: str = "") -> Mode:
        """The mode in force for a tenant ("": in general): the policy's, unless the kill switch or the bypass
        budget lowers it.
        """
        mode: Mode = route.canon.mode
        if self._switch.engaged(route.name):
            return "off"
        if mode == "enforce" and self._demotions.holds(route.name, tenant):
            return "observe"
        return mode

    @property
    def demoted(self) -> frozenset[str]:
        """Routes that the bypass budget put in `observe` for everybody."""
        return self._demotions.routes

    def restore(self, route: str) -> None:
        """Let a demoted route enforce again (a person, or a new policy, decided so)."""
        self._demotions.lift(route)

    def state(self, routes: tuple[Route, ...]) -> list[dict[str, Any]]:
        """Per route: configured and effective mode, ruleset version, bypasses in the last minute; for
        the dashboard.
        """
        return [
            {
                "route": route.name,
                "configured": route.canon.mode,
                "mode": self.mode_of(route),
                "ruleset": route.canon.ruleset.version,
                "rules": len(route.canon.ruleset.rules),
                "killed": self._switch.engaged(route.name),
                "demoted": route.name in self.demoted,
                "demoted_tenants": self._demotions.tenants(route.name),
                "bypasses_last_minute": self._demotions.recent(route.name),
            }
            for route in routes
        ]

    def canonicalize(
        self,
        route: Route,
        tenant: str,
        raw: bytes,
        body: Mapping[str, Any],
        messages: list[dict[str, Any]],
        asked: str | None = None,
    ) -> CanonOutcome:
        """Canonicalize one chat request; `asked` is the client's `x-warmfront-canon` header."""
        mode = self.mode_of(route, tenant)
        asked = asked.strip().lower() if asked else None
        if asked in _STRENGTH and _STRENGTH[asked] < _STRENGTH[mode]:
            mode = "off" if asked == "off" else "observe"
        ruleset = route.canon.ruleset
        if (
            mode == "enforce"
            and route.canon.share < 1.0
            and not _in_share(tenant, messages, route.canon.share)
        ):
            mode = "observe"
        if mode == "off" or not (ruleset.rules or ruleset.stages):
            return CanonOutcome(mode, ruleset.version, raw, messages, body)
        started = time.perf_counter()
        try:
            memory = self._memory(tenant)
            canonical = self._pipeline(body, ruleset, memory, tenant, mode)
            if mode == "observe" or not canonical.edits:
                memory.store(canonical.remember, int(time.time()))
                other = list(canonical.messages) if canonical.edits else None
                elapsed = time.perf_counter() - started
                return CanonOutcome(
                    mode, ruleset.version, raw, messages, body, canonical.edits, other, elapsed_s=elapsed
                )
            sent, reason = apply_proved(raw, canonical.edits), None
            budget = _BUDGET_BASE_S + len(raw) * _BUDGET_PER_CHAR_S
            if time.perf_counter() - started > budget:
                # Once more: a busy machine or a garbage collection is no fault of the rules.
                again = time.perf_counter()
                apply_proved(raw, self._pipeline(body, ruleset, memory, tenant, mode).edits)
                reason = "budget" if time.perf_counter() - again > budget else None
        except UnusualEscapes:
            canonical, sent, reason = None, raw, "escapes"
        except EditError:
            canonical, sent, reason = None, raw, "mismatch"
        except Exception:  # the pipeline must never fail a request, whatever broke in it
            canonical, sent, reason = None, raw, "exception"
        elapsed = time.perf_counter() - started
        if reason is not None or canonical is None:
            self.count_bypass(route.name, reason or "exception", tenant)
            return CanonOutcome(mode, ruleset.version, raw, messages, body, bypass=reason, elapsed_s=elapsed)
        memory.store(canonical.remember, int(time.time()))
        for edit in canonical.edits:
            self._count_edit(route.name, edit.rule)
        return CanonOutcome(
            mode,
            ruleset.version,
            sent,
            list(canonical.messages),
            canonical.body,
            canonical.edits,
            messages,
            elapsed_s=elapsed,
        )

    def _pipeline(
        self, body: Mapping[str, Any], ruleset: Ruleset, memory: ReplayMemory, tenant: str, mode: Mode
    ) -> Canonical:
        return canonicalize(body, ruleset, memory, self.context(tenant), include_observed=mode == "observe")

    def count_bypass(self, route: str, reason: str, tenant: str = "") -> None:
        """An enforced request goes out as it came."""
        self._metrics.canon_bypass.labels(reason).inc()
        self._demotions.note(route, tenant, reason)

    def _count_edit(self, route: str, rule: str) -> None:
        counter = self._edit_counters.get((route, rule))
        if counter is None:
            counter = self._metrics.canon_edits.labels(route, rule)
            self._edit_counters[(route, rule)] = counter
        counter.inc()

    def forget(self, tenant: str) -> bool:
        """Drop a tenant's replay memory; True when there was one."""
        return self._memories.pop(tenant, None) is not None

    def _memory(self, tenant: str) -> ReplayMemory:
        memory = self._memories.get(tenant)
        if memory is None:
            memory = ReplayMemory(ttl_s=self._memory_ttl_s)
            if len(self._memories) >= _MAX_TENANTS:
                self._memories.popitem(last=False)
            self._memories[tenant] = memory
        else:
            self._memories.move_to_end(tenant)
        return memory

    def context(self, tenant: str) -> Context:
        """The pipeline's context for a tenant: its fence words and the secret."""
        context = self._contexts.get(tenant)
        if context is None:
            if len(self._contexts) >= _MAX_TENANTS:
                self._contexts.clear()
            context = Context(tenant=tenant, fence_key=fence_key(self._secret, tenant), secret=self._secret)
            self._contexts[tenant] = context
        return context


def _in_share(tenant: str, messages: list[dict[str, Any]], share: float) -> bool:
    # The arm follows the conversation: its root is the first user message, which does not change between
    # turns.
    root = next((m.get("content") for m in messages if m.get("role") == "user"), None)
    return xxhash.xxh3_64_intdigest(f"{tenant}\0{root}".encode("utf-8", "surrogatepass")) < share * 2**64
