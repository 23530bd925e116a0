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
_MAX_SYSTEM_CHARS = 64 * 1024
"""Longer system texts are not learned from: reading them takes long, and holds up the event loop."""


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
        if _system_chars(messages) > _MAX_SYSTEM_CHARS:
            self.dropped += 1
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


def _system_chars(messages: list[dict[str, Any]]) -> int:
    total = 0
    for message in messages:
        if message.get("role") not in ("system", "developer"):
            break
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"text": content}]
        total += sum(len(p["text"]) for p in parts if isinstance(p, dict) and isinstance(p.get("text"), str))
    return total
