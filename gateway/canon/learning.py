"""Learning, off the hot path.

Owns one `Learner` per route that wants one, and the queue in front of them. Always holds: offering a
request costs a queue insertion and never waits; when the queue is full the request is not learned from;
what is learned is a proposal, and only a policy makes it a rule.
"""

from __future__ import annotations

import asyncio
from typing import Any

from canonicalizer import Learner, Proposal
from policies import Route

_QUEUE = 8


class Learning:
    """Feeds learners from live traffic. `run` is a background task."""

    def __init__(self, per_s: float = 4.0) -> None:
        self._pause_s = 1.0 / per_s
        self._learners: dict[str, Learner] = {}
        self._queue: asyncio.Queue[tuple[str, str, list[dict[str, Any]]]] = asyncio.Queue(_QUEUE)
        self.dropped = 0

    def offer(self, route: Route, tenant: str, messages: list[dict[str, Any]]) -> None:
        """Hand over one request's original messages; they must not be changed afterwards."""
        if route.canon.learn.accept == "off" or route.canon.mode == "off":
            return
        try:
            self._queue.put_nowait((route.name, tenant, messages))
        except asyncio.QueueFull:
            self.dropped += 1

    def proposals(self, route: str) -> list[Proposal]:
        """Rules that the traffic of this route speaks for, none when nothing was learned."""
        learner = self._learners.get(route)
        return list(learner.proposals()) if learner is not None else []

    def forget(self, route: str) -> None:
        """Start anew for a route (its rules changed)."""
        self._learners.pop(route, None)

    async def run(self) -> None:
        """Observe what was offered, one request at a time, with a pause after each."""
        while True:
            route, tenant, messages = await self._queue.get()
            learner = self._learners.get(route)
            if learner is None:
                learner = self._learners[route] = Learner()
            await asyncio.to_thread(learner.observe, tenant, messages)
            await asyncio.sleep(self._pause_s)
