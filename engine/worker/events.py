"""KV-cache events on ZeroMQ, in the format that vLLM publishes: what a router's prefix index is fed from.

Owns a PUB socket (live batches) and a ROUTER socket (batches a subscriber missed). What must always hold:
batches are numbered from 0 without gaps, in the order the cache changed; a replay ends with number -1 and
no payload; the step loop never waits here, because a subscriber that is slow or gone only loses batches,
and sees it by the gap.

    PUB     topic "kv-events" | number, 8 bytes big endian | msgpack [time, [event, ..], nil]
    ROUTER  <- first number wanted, 8 bytes big endian       -> number | payload, .. , -1 | ""
    event   ["BlockStored", [hash, ..], parent hash | nil, [token id, ..], block size, nil, "cpu", nil]
            ["BlockRemoved", [hash, ..], "cpu"]    ["AllBlocksCleared"]
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgpack
import zmq

from engine.core.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent

TOPIC = b"kv-events"
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
REPLAY_BATCHES = 10_000
_MEDIUM = "cpu"


class EventPublisher(Protocol):
    """Where the step loop sends cache events."""

    @property
    def sockets(self) -> tuple[zmq.Socket[bytes], ...]:
        """Sockets to wake up for, besides the commands'."""

    def publish(self, events: Sequence[CacheEvent]) -> None:
        """Send one batch; never blocks."""

    def serve_replays(self) -> None:
        """Answer the replay requests that have arrived; never blocks."""

    def close(self) -> None:
        """Release the endpoints."""


class NoEvents:
    """Publishes nothing."""

    sockets: tuple[zmq.Socket[bytes], ...] = ()

    def publish(self, events: Sequence[CacheEvent]) -> None:
        """Drop the batch."""

    def serve_replays(self) -> None:
        """Nobody asks."""

    def close(self) -> None:
        """Nothing to release."""


class ZmqEvents:
    """Binds both endpoints; ipc sockets are made readable by their owner only."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        replay_endpoint: str,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._sent = 0
        self._recent: deque[tuple[bytes, bytes]] = deque(maxlen=REPLAY_BATCHES)
        self._pub = _bound(context, zmq.PUB, endpoint)
        try:
            self._replay = _bound(context, zmq.ROUTER, replay_endpoint)
        except BaseException:
            self._pub.close(0)
            raise

    @property
    def sockets(self) -> tuple[zmq.Socket[bytes], ...]:
        """The replay socket."""
        return (self._replay,)

    def publish(self, events: Sequence[CacheEvent]) -> None:
        """Send `events` as one numbered batch, and keep it for replays. An empty batch is not sent."""
        if not events:
            return
        payload: bytes = msgpack.packb([self._clock(), [_encoded(event) for event in events], None])
        number = self._sent.to_bytes(8, "big")
        self._sent += 1
        self._recent.append((number, payload))
        self._pub.send_multipart((TOPIC, number, payload))

    def serve_replays(self) -> None:
        """Answer waiting replay requests; a malformed one gets the end mark alone."""
        while True:
            try:
                sender, *envelope, wanted = self._replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            except ValueError:
                continue
            if len(wanted) == 8:
                for number, payload in self._recent:
                    if number >= wanted:
                        self._replay.send_multipart((sender, *envelope, number, payload))
            self._replay.send_multipart((sender, *envelope, END_OF_REPLAY, b""))

    def close(self) -> None:
        """Close both sockets at once."""
        self._pub.close(0)
        self._replay.close(0)


def _bound(context: zmq.Context[zmq.Socket[bytes]], kind: zmq.SocketType, endpoint: str) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, 100_000)
    socket.setsockopt(zmq.LINGER, 0)
    try:
        socket.bind(endpoint)
        if endpoint.startswith("ipc://"):
            os.chmod(endpoint.removeprefix("ipc://"), 0o600)
    except BaseException:
        socket.close(0)
        raise
    return socket


def _encoded(event: CacheEvent) -> list[Any]:
    match event:
        case BlockStored(hashes, parent, token_ids, block_size):
            return ["BlockStored", hashes, parent, token_ids, block_size, None, _MEDIUM, None]
        case BlockRemoved(hashes):
            return ["BlockRemoved", hashes, _MEDIUM]
        case AllBlocksCleared():
            return ["AllBlocksCleared"]
