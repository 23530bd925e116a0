"""ReplicaMonitor: watches one replica over HTTP and keeps its record and its index entries true.

Ready means that `/health` answered 200 (weights are loaded) and, where there are KV events, that they are
being followed. Whoever finds a replica gone (this monitor, the supervisor) calls `Replica.mark_down`; the
monitor listens, and from that moment nothing in the index points at it. The exception is a stalled replica
(it answers, but its model computes nothing): it gets no requests, but its process keeps the cache, so its
entries and its event stream stay, and hold again when it goes on. Probes never touch the accounting of
requests.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import zmq.asyncio

from gateway.routing.approximate import ApproximateBlocks
from gateway.routing.chain_map import HashMapping
from gateway.routing.events import KvEventSubscriber
from gateway.routing.index import PrefixIndex
from gateway.routing.replica import Replica

_log = logging.getLogger(__name__)
_HEALTH_PATH = {"bundled": "/health", "vllm": "/health", "openai": "/v1/models"}
_PROBE_ERRORS = (aiohttp.ClientError, TimeoutError, OSError, ValueError)


@dataclass(frozen=True, slots=True)
class Probing:
    """How often and how patiently a replica is asked.

    interval_s: between load reports of a ready replica. waiting_s: between health probes of one that is
    not ready. failures: consecutive failed probes after which a ready replica is down.
    """

    interval_s: float = 1.0
    waiting_s: float = 0.2
    timeout_s: float = 5.0
    failures: int = 3


@dataclass(frozen=True, slots=True)
class EventSource:
    """Where an engine publishes KV events, when it does not say so itself (`/engine/info`)."""

    events: str
    replay: str | None = None
    mapping: HashMapping | None = None


class ReplicaMonitor:
    """Watches `replica` from `start` to `stop`. `session` and `context` are shared and owned by the
    caller.
    """

    def __init__(
        self,
        replica: Replica,
        session: aiohttp.ClientSession,
        index: PrefixIndex,
        *,
        context: zmq.asyncio.Context | None = None,
        probing: Probing | None = None,
        source: EventSource | None = None,
    ) -> None:
        self.replica = replica
        self.subscriber: KvEventSubscriber | None = None
        self._session = session
        self._index = index
        self._context = context
        self._probing = probing or Probing()
        self._source = source
        self._round_trips: deque[float] = deque(maxlen=16)
        self._failures = 0
        self._task: asyncio.Task[None] | None = None
        self._stopping: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begin to watch."""
        if self._task is None:
            self.replica.listen(self._on_change)
            self._task = asyncio.create_task(self._watch(), name=f"monitor {self.replica.id}")

    async def stop(self) -> None:
        """Stop watching and following events; the replica's record stays as it is."""
        task, self._task = self._task, None
        self.replica.unlisten(self._on_change)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if self.subscriber is not None:
            await self.subscriber.stop()
            self.subscriber = None
        await asyncio.gather(*self._stopping, return_exceptions=True)

    async def _watch(self) -> None:
        probing = self._probing
        while True:
            try:
                if self.replica.ready:
                    await self._refresh()
                else:
                    await self._try_ready()
                self._failures = 0
            except _PROBE_ERRORS as error:
                self._failed(error)
            await asyncio.sleep(probing.interval_s if self.replica.ready else probing.waiting_s)

    def _failed(self, error: BaseException) -> None:
        self._failures += 1
        reason = str(error) or type(error).__name__
        if not self.replica.ready:
            self.replica.reason = reason
        elif self._failures >= self._probing.failures:
            _log.warning("%s is down: %s", self.replica.id, reason)
            self.replica.mark_down(reason)

    async def _try_ready(self) -> None:
        """One health probe of a replica that is not ready; makes it ready when everything is in place."""
        replica, epoch = self.replica, self.replica.epoch
        await self._get(_HEALTH_PATH.get(replica.dialect, "/health"))
        info: dict[str, Any] = {}
        load: dict[str, Any] = {}
        if replica.dialect == "bundled":
            info = await self._get("/engine/info")
            load = await self._get("/engine/cache")
        if replica.epoch != epoch:
            return  # it went down meanwhile
        if replica.stalled and info.get("pid") != replica.info.get("pid"):
            replica.mark_down("restarted")
            return
        replica.info = info
        await self._follow_events(info)
        if replica.epoch == epoch:
            if load:
                replica.report_load(load)
            replica.mark_ready()

    async def _refresh(self) -> None:
        """One load report of a ready replica."""
        replica, epoch = self.replica, self.replica.epoch
        if replica.dialect != "bundled":
            await self._get(_HEALTH_PATH.get(replica.dialect, "/health"))
            if replica.approximate is not None:
                replica.approximate.expire(time.monotonic())
            return
        load = await self._get("/engine/cache")
        if self._failures or load.get("epoch") != replica.load.get("epoch"):  # cleared, or another process
            info = await self._get("/engine/info")
            if info.get("pid") != replica.info.get("pid"):
                replica.mark_down("restarted")
                return
        if replica.epoch != epoch:
            return
        if load.get("stalled") is True:
            _log.warning("%s is stalled: no word of its step process", replica.id)
            replica.mark_stalled()
        else:
            replica.report_load(load)

    async def _follow_events(self, info: Mapping[str, Any]) -> None:
        replica = self.replica
        source = self._source
        if info.get("events"):
            source = EventSource(str(info["events"]), info.get("events_replay"))
        if source is None:
            if replica.approximate is None:
                replica.approximate = ApproximateBlocks(replica.id, self._index)
            return
        if self.subscriber is None:
            self.subscriber = KvEventSubscriber(
                replica,
                source.events,
                source.replay,
                self._index,
                context=self._context,
                mapping=source.mapping,
                on_cleared=self._on_cleared,
            )
            self.subscriber.start()
        elif self.replica.stalled:
            await self.subscriber.catch_up()
        await self.subscriber.synced(self._probing.timeout_s)

    def _on_cleared(self) -> None:
        if self.replica.ready:
            self.replica.mark_cache_lost()

    def _on_change(self, replica: Replica) -> None:
        """Not ready and not merely stalled: whatever was known of its cache is void, at once."""
        if replica.ready or replica.stalled:
            return
        subscriber, self.subscriber = self.subscriber, None
        if subscriber is not None:
            subscriber.cancel()
            stopping = asyncio.create_task(subscriber.stop())
            self._stopping.add(stopping)
            stopping.add_done_callback(self._stopping.discard)
        self._index.clear(replica.id)
        if replica.approximate is not None:
            replica.approximate.clear()

    async def _get(self, path: str) -> dict[str, Any]:
        """GET a JSON object from the replica; raises one of `_PROBE_ERRORS` unless it answers 200."""
        headers = {"authorization": f"Bearer {self.replica.api_key}"} if self.replica.api_key else None
        timeout = aiohttp.ClientTimeout(total=self._probing.timeout_s)
        began = time.monotonic()
        async with self._session.get(
            self.replica.base_url + path, headers=headers, timeout=timeout
        ) as response:
            body = await response.read()
            if response.status != 200:
                raise ValueError(_refusal(path, response.status, body))
        self._round_trips.append(time.monotonic() - began)
        self.replica.round_trip_s = min(self._round_trips)
        if not body.strip():
            return {}
        parsed = await response.json(content_type=None)
        return parsed if isinstance(parsed, dict) else {}


def _refusal(path: str, status: int, body: bytes) -> str:
    """Why a probe failed: the engine's word for it where that is "stalled", else the answer's code."""
    try:
        answer = json.loads(body)
    except ValueError:
        answer = None
    if isinstance(answer, dict) and answer.get("status") == "stalled":
        return "stalled"
    return f"{path} answered {status}"
