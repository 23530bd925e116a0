"""The calls that are under way, by replica.

Owns what happens to them when their replica goes down. Always holds: a call to a replica that stopped being
ready never waits for it: one without an answer fails at once, one in the middle of an answer as soon as
nothing more of it came for `GRACE_S` (a server that drains closes its listener and finishes its streams).
The cost of a call is one set entry.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from weakref import WeakKeyDictionary

from gateway.routing.replica import Replica
from gateway.upstream.client import Call

GRACE_S = 2.0


class LiveCalls:
    """Of one event loop. `grace_s` is in seconds."""

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self._grace_s = grace_s
        self._calls: WeakKeyDictionary[Replica, set[Call]] = WeakKeyDictionary()

    def count(self, replica: Replica) -> int:
        """Calls under way to one replica."""
        return len(self._calls.get(replica, ()))

    @contextlib.contextmanager
    def watching(self, replica: Replica, call: Call) -> Iterator[None]:
        """While it lasts, `call` fails when `replica` goes down."""
        calls = self._calls.get(replica)
        if calls is None:
            calls = self._calls[replica] = set()
            replica.listen(self._on_change)
        calls.add(call)
        try:
            yield
        finally:
            calls.discard(call)

    def _on_change(self, replica: Replica) -> None:
        calls = self._calls.get(replica)
        if replica.ready or not calls:
            return
        for call in calls:
            if not call.bytes_in:
                call.fail("the replica went down")
        self._look_again(calls)

    def _look_again(self, calls: set[Call]) -> None:
        answering = {call: call.bytes_in for call in calls if call.bytes_in}
        if answering:
            loop = asyncio.get_running_loop()
            loop.call_later(self._grace_s, self._fail_silent, calls, answering)

    def _fail_silent(self, calls: set[Call], seen: dict[Call, int]) -> None:
        moving: set[Call] = set()
        for call, before in seen.items():
            if call not in calls:
                continue
            if call.bytes_in == before and not call.backed_up:
                call.fail("the replica went down")
            else:
                moving.add(call)
        self._look_again(moving & calls)
