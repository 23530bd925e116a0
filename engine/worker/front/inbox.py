"""Where the step process's tokens wait for the handler of one HTTP request.

Owns the queue between the socket reader and one handler. Always holds: items keep their order; a failure is
delivered after the items that came before it; at most `max_tokens` items per choice can be waiting, because
the engine makes no more.
"""

from __future__ import annotations

import asyncio

from engine.core.sequence import TokenOutput
from engine.worker.front.errors import ApiError


class Inbox:
    """Tokens of all choices of one HTTP request: (choice index, token)."""

    __slots__ = ("_failure", "_items", "_waiter")

    def __init__(self) -> None:
        self._items: list[tuple[int, TokenOutput]] = []
        self._waiter: asyncio.Future[None] | None = None
        self._failure: ApiError | None = None

    def put(self, index: int, output: TokenOutput) -> None:
        """Add one token; called from the event loop."""
        self._items.append((index, output))
        self._wake()

    def fail(self, error: ApiError) -> None:
        """End the request with an error; the first one stays."""
        if self._failure is None:
            self._failure = error
        self._wake()

    async def take(self) -> list[tuple[int, TokenOutput]]:
        """Everything that has arrived, at least one item; raises the failure once nothing else is left."""
        while not self._items:
            if self._failure is not None:
                raise self._failure
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        items, self._items = self._items, []
        return items

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
