"""Which routes may not enforce for the moment, and for whom: the bypass budget.

Owns the count of bypasses that speak against the rules. Always holds: what a client can cause at will is
never held against anyone else: faults of this side (a failed proof, an exception) count for the whole
route, an overrun of the time budget counts for its tenant, and only when several tenants have used up their
budget within the minute for the route. Where nobody has a name, everything counts for the route. Bounded:
at most `max_tenants` pairs of route and tenant are known.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque

WINDOW_S = 60.0
TENANTS_FOR_ALL = 3
_FAULTS = frozenset({"mismatch", "exception"})
_OVERRUN = "budget"


class Demotions:
    """Counts bypasses and demotes: `limit` of them within a minute."""

    def __init__(self, limit: int, max_tenants: int = 4096) -> None:
        self._limit = limit
        self._max_tenants = max_tenants
        self._recent: dict[str, deque[float]] = {}
        self._routes: set[str] = set()
        self._overruns: OrderedDict[tuple[str, str], deque[float]] = OrderedDict()
        self._tenants: OrderedDict[tuple[str, str], float] = OrderedDict()

    @property
    def routes(self) -> frozenset[str]:
        """Routes that are demoted for everybody."""
        return frozenset(self._routes)

    def tenants(self, route: str) -> list[str]:
        """Tenants for whom alone this route is demoted."""
        return [tenant for name, tenant in self._tenants if name == route]

    def holds(self, route: str, tenant: str = "") -> bool:
        """True when the route may not enforce for this tenant."""
        return route in self._routes or (route, tenant) in self._tenants

    def recent(self, route: str) -> int:
        """Bypasses of the last minute that count, at most the limit; overruns of named tenants included."""
        now = time.monotonic()
        kept = [self._recent.get(route, ())]
        kept += [times for (name, _), times in self._overruns.items() if name == route]
        return sum(now - at < WINDOW_S for times in kept for at in times)

    def note(self, route: str, tenant: str, reason: str) -> None:
        """Take in one bypass; reasons that a client can cause at will change nothing."""
        now = time.monotonic()
        if reason in _FAULTS or (reason == _OVERRUN and not tenant):
            times = self._recent.setdefault(route, deque(maxlen=self._limit))
            if self._is_full(times, now):
                self._routes.add(route)
        elif reason == _OVERRUN:
            key = (route, tenant)
            times = self._overruns.setdefault(key, deque(maxlen=self._limit))
            self._overruns.move_to_end(key)
            if self._is_full(times, now):
                self._tenants[key] = now
                self._tenants.move_to_end(key)
                hit = sum(name == route and now - at < WINDOW_S for (name, _), at in self._tenants.items())
                if hit >= TENANTS_FOR_ALL:
                    self._routes.add(route)
            for known in (self._overruns, self._tenants):
                while len(known) > self._max_tenants:
                    known.popitem(last=False)

    def lift(self, route: str) -> None:
        """Forget everything about a route: a person, or a new policy, decided so."""
        self._routes.discard(route)
        self._recent.pop(route, None)
        for key in [key for key in (*self._overruns, *self._tenants) if key[0] == route]:
            self._overruns.pop(key, None)
            self._tenants.pop(key, None)

    def _is_full(self, times: deque[float], now: float) -> bool:
        times.append(now)
        return len(times) == self._limit and now - times[0] < WINDOW_S
