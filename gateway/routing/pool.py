"""PoolState: the replicas of one pool, and the policy that chooses among them.

Holds no figures of its own: every question is answered from the replicas' records at the moment it is asked.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Sequence

from gateway.routing.choice import RoutingPolicy, make_policy
from gateway.routing.rates import DEFAULT_TOKENS_PER_S, pool_median
from gateway.routing.replica import Replica


class PoolState:
    """The live side of a policy's pool. `routing` is one of `choice.POLICY_NAMES`."""

    def __init__(
        self,
        name: str,
        replicas: Iterable[Replica] = (),
        *,
        routing: str = "cost",
        rng: random.Random | None = None,
    ) -> None:
        self.name = name
        self._rng = rng or random.Random()
        self.routing: RoutingPolicy = make_policy(routing, self._rng)
        self.replicas: dict[str, Replica] = {}
        self._changed = asyncio.Event()
        for replica in replicas:
            self.add(replica)

    def add(self, replica: Replica) -> None:
        """Take a replica in; ValueError when its id is taken."""
        if replica.id in self.replicas:
            raise ValueError(f"pool {self.name}: replica {replica.id} exists already")
        self.replicas[replica.id] = replica
        replica.listen(self._on_change)

    def discard(self, replica_id: str) -> None:
        """Let a replica go; unknown ids are ignored."""
        replica = self.replicas.pop(replica_id, None)
        if replica is not None:
            replica.unlisten(self._on_change)

    def use_policy(self, routing: str) -> None:
        """Switch the routing policy (policy reload, benchmark phases); ValueError for an unknown name."""
        if routing != self.routing.name:
            self.routing = make_policy(routing, self._rng)

    def ready(self, exclude: frozenset[str] = frozenset()) -> Sequence[Replica]:
        """Replicas that may be sent requests."""
        return [r for r in self.replicas.values() if r.state == "ready" and not (exclude and r.id in exclude)]

    def fallback_rate(self) -> float:
        """Prefill tokens per second for replicas that have not reported: the median of those that have."""
        rates = [replica.prefill_rate for replica in self.replicas.values()]
        return pool_median(rates) if None in rates else DEFAULT_TOKENS_PER_S  # the latter: nobody asks

    async def wait_ready(self, count: int = 1, timeout_s: float | None = None) -> bool:
        """Wait until `count` replicas are ready; False when the time is over before that."""
        try:
            async with asyncio.timeout(timeout_s):
                while len(self.ready()) < count:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def _on_change(self, replica: Replica) -> None:
        self._changed.set()
