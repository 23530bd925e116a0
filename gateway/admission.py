"""Admission: who is dispatched next when a pool has fewer free slots than requests.

Owns, per pool, the slots in use and one queue per priority class. Always holds: `in_use` is the number of
tickets out and never passes the pool's limit except when the limit shrinks; nobody waits while a slot is
free; a ticket gives its slot back exactly once, on every exit path; a queue never holds more than its class
allows. Dispatch is just in time: the engines' own queues stay short, so that a class's rank means
something.

Order when a slot frees: first the highest-ranked class that waits and has fewer slots in use than its share
of the limit, else the highest-ranked class that waits. So each class gets its share, and what is left goes
by rank.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Protocol

from gateway import errors


class ClassRules(Protocol):
    """The part of `policies.PriorityClass` used here."""

    @property
    def name(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def share(self) -> float: ...
    @property
    def queue_limit(self) -> int: ...
    @property
    def queue_timeout_s(self) -> float: ...


class Ticket:
    """An admitted request's slot; release it in a `finally`."""

    __slots__ = ("_gate", "_lane", "_released")

    def __init__(self, gate: PoolGate, lane: _Lane) -> None:
        self._gate = gate
        self._lane = lane
        self._released = False

    def release(self) -> None:
        """Give the slot back. Idempotent."""
        if not self._released:
            self._released = True
            self._gate._give_back(self._lane)


class _Lane:
    __slots__ = ("in_use", "rules", "waiting")

    def __init__(self, rules: ClassRules) -> None:
        self.rules = rules
        self.in_use = 0
        self.waiting: deque[asyncio.Future[Ticket]] = deque()


class PoolGate:
    """The slots and queues of one pool; `limit()` is asked each time, so it follows replicas that come
    and go.
    """

    def __init__(self, classes: Iterable[ClassRules], limit: Callable[[], int]) -> None:
        self._limit = limit
        self._lanes = {rules.name: _Lane(rules) for rules in classes}
        self._ordered = sorted(self._lanes.values(), key=lambda lane: lane.rules.rank)
        self._total_share = 1.0
        self.in_use = 0
        self._weigh()

    @property
    def waiting(self) -> dict[str, int]:
        """Requests waiting, per class."""
        return {name: len(lane.waiting) for name, lane in self._lanes.items()}

    async def admit(self, class_name: str) -> Ticket:
        """Wait for a slot; raises ApiError 503 when the class's queue is full or its patience ends."""
        lane = self._lanes[class_name]
        if self.in_use < self._limit() and not any(other.waiting for other in self._ordered):
            return self._issue(lane)
        if len(lane.waiting) >= lane.rules.queue_limit:
            raise errors.queue_full(class_name, self._retry_after(lane))
        future: asyncio.Future[Ticket] = asyncio.get_running_loop().create_future()
        lane.waiting.append(future)
        self.dispatch()
        try:
            async with asyncio.timeout(lane.rules.queue_timeout_s):
                return await future
        except BaseException as error:
            if future.done() and not future.cancelled():
                future.result().release()
            else:
                with suppress(ValueError):
                    lane.waiting.remove(future)
            if isinstance(error, TimeoutError):
                waited = lane.rules.queue_timeout_s
                raise errors.queue_timeout(class_name, waited, self._retry_after(lane)) from None
            raise

    def dispatch(self) -> None:
        """Hand free slots to waiting requests; call it also when the limit has grown."""
        if not any(lane.waiting for lane in self._ordered):
            return
        limit = self._limit()
        while self.in_use < limit:
            lane = self._next_lane(limit)
            if lane is None:
                return
            future = lane.waiting.popleft()
            if not future.done():
                future.set_result(self._issue(lane))

    def replace_classes(self, classes: Iterable[ClassRules]) -> None:
        """Take over a new policy's classes; requests that wait or run keep their place."""
        for rules in classes:
            lane = self._lanes.get(rules.name)
            if lane is None:
                self._lanes[rules.name] = _Lane(rules)
            else:
                lane.rules = rules
        self._ordered = sorted(self._lanes.values(), key=lambda lane: lane.rules.rank)
        self._weigh()
        self.dispatch()

    def check(self) -> None:
        """Assert the invariants of the file's head; for tests and idle time."""
        assert self.in_use == sum(lane.in_use for lane in self._ordered)
        assert all(lane.in_use >= 0 for lane in self._ordered)
        assert self.in_use >= self._limit() or not any(
            not future.done() for lane in self._ordered for future in lane.waiting
        )

    def _weigh(self) -> None:
        self._total_share = max(1.0, sum(max(0.0, lane.rules.share) for lane in self._ordered))

    def _next_lane(self, limit: int) -> _Lane | None:
        first: _Lane | None = None
        for lane in self._ordered:
            if not lane.waiting:
                continue
            if lane.in_use < math.ceil(limit * lane.rules.share / self._total_share):
                return lane
            first = first or lane
        return first

    def _issue(self, lane: _Lane) -> Ticket:
        self.in_use += 1
        lane.in_use += 1
        return Ticket(self, lane)

    def _give_back(self, lane: _Lane) -> None:
        self.in_use -= 1
        lane.in_use -= 1
        self.dispatch()

    def _retry_after(self, lane: _Lane) -> int:
        return max(1, min(30, math.ceil(len(lane.waiting) / max(1, self._limit()))))
