"""KvEventSubscriber: keeps the prefix index equal to what one replica holds, from its KV events.

Batches carry a sequence number. They are applied in order and once: a gap is filled from the publisher's
replay buffer; where that no longer reaches back, the replica's entries are cleared and what the buffer
holds is applied (entries may then be missing, never wrong). A sequence that goes back means a restarted
publisher: cleared as well. An idle stream is checked against the replay socket, because the last event
before a silence can be lost too.

Events carry prompt tokens in clear: endpoints are ipc or loopback only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import zmq
import zmq.asyncio

from gateway.routing.chain_map import HashMapping, OwnHashes
from gateway.routing.index import PrefixIndex
from gateway.routing.kv_events import Cleared, EventError, Removed, Stored, decode_batch

if TYPE_CHECKING:
    from gateway.routing.replica import Replica

_log = logging.getLogger(__name__)
_END = (-1).to_bytes(8, "big", signed=True)
PRIMARY_MEDIA: frozenset[str | None] = frozenset(
    {None, "GPU", "gpu", "cpu"}
)  # vLLM's "CPU" is its offload tier


class KvEventSubscriber:
    """Follows one replica's event stream from `start` to `stop`.

    `media`: storage media whose events count. `on_cleared` is called after the engine emptied its cache
    or its publisher restarted (never for a plain gap).
    """

    def __init__(
        self,
        replica: Replica,
        endpoint: str,
        replay_endpoint: str | None,
        index: PrefixIndex,
        *,
        context: zmq.asyncio.Context | None = None,
        mapping: HashMapping | None = None,
        media: frozenset[str | None] = PRIMARY_MEDIA,
        on_cleared: Callable[[], None] | None = None,
        idle_check_s: float = 5.0,
        replay_timeout_s: float = 2.0,
    ) -> None:
        for address in (endpoint, replay_endpoint):
            if address is not None and not _is_local(address):
                raise ValueError(f"KV events carry prompts: {address} is neither ipc nor loopback")
        self.replica = replica
        self.last_seq = -1
        self.batches = 0
        self.gaps = 0
        self.cleared = 0
        self.errors = 0
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._index = index
        self._context = context or zmq.asyncio.Context.instance()
        self._mapping = mapping or OwnHashes()
        self._media = media
        self._on_cleared = on_cleared
        self._idle_check_s = idle_check_s
        self._replay_timeout_s = replay_timeout_s
        self._last_live = -1
        self._cancelled = False
        self._task: asyncio.Task[None] | None = None
        self._synced = asyncio.Event()
        self._replaying = asyncio.Lock()

    def start(self) -> None:
        """Begin to follow. The sockets are connected when this returns."""
        if self._task is None:
            socket = self._connect(zmq.SUB, self._endpoint)
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            self._task = asyncio.create_task(self._follow(socket), name=f"kv-events {self.replica.id}")

    def cancel(self) -> None:
        """Apply nothing from now on, without waiting; `stop` waits until the sockets are closed."""
        self._cancelled = True
        if self._task is not None:
            self._task.cancel()

    async def stop(self) -> None:
        """Stop following; the index keeps its entries (the owner clears them if the replica is gone)."""
        self.cancel()
        task, self._task = self._task, None
        if task is not None:
            await asyncio.gather(task, return_exceptions=True)

    async def synced(self, timeout_s: float) -> bool:
        """Wait until the publisher's replay buffer was applied; False when that takes longer."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._synced.wait()
        except TimeoutError:
            return False
        return True

    async def catch_up(self) -> bool:
        """Apply everything published up to now, through the replay socket. False if it does not answer."""
        return await self._replay()

    # ---- the stream ----

    async def _follow(self, socket: zmq.asyncio.Socket) -> None:
        try:
            await self._replay()
            self._synced.set()
            while True:
                if not await socket.poll(int(self._idle_check_s * 1000)):
                    await self._replay()
                    continue
                frames = await socket.recv_multipart()
                if len(frames) < 3 or len(frames[-2]) != 8:
                    self.errors += 1
                    continue
                await self._receive(int.from_bytes(frames[-2], "big", signed=True), frames[-1])
        finally:
            socket.close(linger=0)

    async def _receive(self, seq: int, payload: bytes) -> None:
        """One batch from the live stream."""
        if seq <= self._last_live:
            self._restarted()
        self._last_live = seq
        if seq <= self.last_seq:
            return  # came through the replay already
        if seq > self.last_seq + 1 and not (await self._replay() and self.last_seq >= seq - 1):
            if self.last_seq >= 0:  # else: just joined a stream that has no replay, nothing was known
                self.gaps += 1
            self._forget()
        if seq > self.last_seq:
            self._apply(seq, payload)

    def _apply(self, seq: int, payload: bytes) -> None:
        if self._cancelled:
            return
        self.last_seq = seq
        self.batches += 1
        try:
            events = decode_batch(payload)
        except EventError as error:
            self.errors += 1
            _log.warning(
                "%s: KV event batch %d is malformed (%s); its blocks are forgotten",
                self.replica.id,
                seq,
                error,
            )
            self._forget()
            return
        index, replica_id = self._index, self.replica.id
        for event in events:
            match event:
                case Stored() if event.medium in self._media:
                    held, forgotten = self._mapping.stored(event)
                    index.store(replica_id, held)
                    if forgotten:
                        index.remove(replica_id, forgotten)
                case Removed() if event.medium in self._media:
                    index.remove(replica_id, self._mapping.removed(event.hashes))
                case Cleared():
                    self._forget()
                    self._notify()
                case _:
                    pass

    def _restarted(self) -> None:
        """The publisher began to count anew."""
        self.last_seq = self._last_live = -1
        self._forget()
        self._notify()

    def _forget(self) -> None:
        self.cleared += 1
        self._mapping.clear()
        self._index.clear(self.replica.id)

    def _notify(self) -> None:
        if self._on_cleared is not None:
            self._on_cleared()

    # ---- replay ----

    async def _replay(self) -> bool:
        """Ask for everything after `last_seq` and apply it. False when the replay socket gave no full
        answer.
        """
        if self._replay_endpoint is None:
            return False
        async with self._replaying:
            socket = self._connect(zmq.DEALER, self._replay_endpoint)
            try:
                async with asyncio.timeout(self._replay_timeout_s):
                    await socket.send_multipart([b"", (self.last_seq + 1).to_bytes(8, "big")])
                    while True:
                        frames = await socket.recv_multipart()
                        if len(frames) < 2 or len(frames[-2]) != 8:
                            self.errors += 1
                            return False
                        if frames[-2] == _END or not frames[-1]:
                            return True
                        self._replayed(int.from_bytes(frames[-2], "big", signed=True), frames[-1])
            except (TimeoutError, zmq.ZMQError):
                return False
            finally:
                socket.close(linger=0)

    def _replayed(self, seq: int, payload: bytes) -> None:
        if seq <= self.last_seq:
            return
        if (
            seq > self.last_seq + 1 and self.last_seq >= 0
        ):  # the buffer no longer reaches back to what we know
            self.gaps += 1
            self._forget()
        self._apply(seq, payload)

    def _connect(self, kind: int, endpoint: str) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 100_000)
        socket.connect(endpoint)
        return socket


def _is_local(endpoint: str) -> bool:
    scheme, _, rest = endpoint.partition("://")
    host = rest.rpartition(":")[0]
    return scheme in ("ipc", "inproc") or (scheme == "tcp" and host in ("127.0.0.1", "localhost", "[::1]"))
