"""PinKeeper: keeps the pinned prefixes resident on the replicas that they were placed on.

Desired pins come from policy, already canonicalized and tokenized. Each is placed on as many replicas as
it asks for: the replica with the fewest pinned tokens, ties by rendezvous order, and it stays there (a
pinned prefix is found by requests through the index, so moving it would cool it down). A holder that
stays down for longer than `grace_s` loses its pins to others.

Must always hold: a (pin, replica) pair is `resident` only if the replica said so after its cache was last
lost; a pin that is no longer desired is released wherever it was posted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import quote

import aiohttp

from gateway.pin_placement import DesiredPin, place
from gateway.routing.index import PrefixIndex
from gateway.routing.pool import PoolState
from gateway.routing.replica import Replica

_log = logging.getLogger(__name__)
PinState = Literal["pending", "warming", "resident", "over_budget", "error"]
_SETTLED: frozenset[str] = frozenset({"resident", "over_budget"})
_ERRORS = (aiohttp.ClientError, TimeoutError, OSError, ValueError)


@dataclass(slots=True)
class PinStatus:
    """One pin on one replica, as the dashboard shows it."""

    pin: str
    tenant: str
    pool: str
    replica: str
    state: PinState
    tokens: int
    computed_tokens: int = 0
    reason: str = ""


@dataclass(slots=True)
class _Held:
    """What is known of one pin on one replica."""

    state: PinState = "pending"
    computed_tokens: int = 0
    reason: str = ""
    posted_at: float = 0.0


@dataclass(slots=True)
class _Holder:
    """One replica and the pins that were posted to it, valid for one epoch of its cache."""

    replica: Replica
    epoch: int = -1
    held: dict[str, _Held] = field(default_factory=dict)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    down_since: float | None = None


class PinKeeper:
    """Keeps desired pins resident on the bundled replicas of `pools`. One task per replica, from `start` to
    `stop`.
    """

    def __init__(
        self,
        pools: Mapping[str, PoolState],
        session: aiohttp.ClientSession,
        index: PrefixIndex,
        *,
        interval_s: float = 5.0,
        poll_s: float = 0.05,
        grace_s: float = 15.0,
        timeout_s: float = 10.0,
    ) -> None:
        self.warmup_tokens = 0
        self._pools = pools
        self._session = session
        self._index = index
        self._interval_s = interval_s
        self._poll_s = poll_s
        self._grace_s = grace_s
        self._timeout_s = timeout_s
        self._desired: dict[str, DesiredPin] = {}
        self._placed: dict[str, list[str]] = {}
        self._holders: dict[str, _Holder] = {}
        self._running = False
        self._warming = 0
        self._warming_since = 0.0
        self._warmed_s = 0.0

    # ---- what is wanted ----

    def set_desired(self, pins: Iterable[DesiredPin]) -> None:
        """Replace the wanted pins; those that left are released. ValueError for an unknown pool."""
        desired = {pin.id: pin for pin in pins}
        for pin in desired.values():
            if pin.pool not in self._pools:
                raise ValueError(f"pin {pin.name}: pool {pin.pool!r} does not exist")
        self._desired = desired
        self.reconcile()

    def start(self) -> None:
        """Begin to tend the pins."""
        self._running = True
        self.reconcile()

    async def stop(self) -> None:
        """Stop tending; what is pinned stays pinned."""
        self._running = False
        holders, self._holders = self._holders, {}
        for holder in holders.values():
            holder.replica.unlisten(self._on_change)
            if holder.task is not None:
                holder.task.cancel()
        await asyncio.gather(
            *(h.task for h in holders.values() if h.task is not None), return_exceptions=True
        )

    # ---- what is ----

    @property
    def warmup_s(self) -> float:
        """Wall-clock seconds during which at least one pin was being computed."""
        running = time.monotonic() - self._warming_since if self._warming else 0.0
        return self._warmed_s + running

    def states(self) -> list[PinStatus]:
        """Every (pin, replica) pair, by pin name; a pin without any replica has one row with an empty
        replica.
        """
        rows: list[PinStatus] = []
        for pin in sorted(self._desired.values(), key=lambda pin: pin.name):
            for replica_id in self._placed.get(pin.id) or [""]:
                held = self._current(replica_id, pin.id)
                rows.append(
                    PinStatus(
                        pin=pin.name,
                        tenant=pin.tenant,
                        pool=pin.pool,
                        replica=replica_id,
                        state=held.state,
                        tokens=len(pin.token_ids),
                        computed_tokens=held.computed_tokens,
                        reason=held.reason,
                    )
                )
        return rows

    def holders_of(self, name: str) -> list[str]:
        """Ids of the replicas that the pin of this name was placed on."""
        return [
            id for pin in self._desired.values() if pin.name == name for id in self._placed.get(pin.id, ())
        ]

    async def wait_resident(self, timeout_s: float) -> bool:
        """Wait until every pin is resident where it was placed and the index knows its blocks.

        False when the time is over, or when nothing is left to wait for but pins over budget.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            pairs = [(pin, id) for pin in self._desired.values() for id in self._placed.get(pin.id) or [""]]
            states = [self._current(id, pin.id).state for pin, id in pairs]
            unsettled = [state for state in states if state not in _SETTLED]
            if not unsettled and all(
                self._index.holds(id, pin.hashes)
                for (pin, id), state in zip(pairs, states, strict=True)
                if state == "resident"
            ):
                return all(state == "resident" for state in states)
            await asyncio.sleep(self._poll_s)
        return False

    # ---- placement ----

    def _on_change(self, replica: Replica) -> None:
        holder = self._holders.get(replica.id)
        if holder is None:
            return
        lost = self._is_lost(holder)
        if replica.state == "ready":
            holder.down_since = None
        elif replica.state == "down":
            holder.down_since = holder.down_since or time.monotonic()
        if lost and replica.ready:
            self.reconcile()
        holder.wake.set()

    def _is_lost(self, holder: _Holder) -> bool:
        """Not back within the time of grace: others should hold its pins."""
        return holder.down_since is not None and time.monotonic() - holder.down_since > self._grace_s

    def reconcile(self) -> None:
        """Choose replicas for every pin and tend each replica; call it when a pool's replicas changed."""
        for holder in [h for h in self._holders.values() if h.replica.id not in self._bundled()]:
            self._drop(holder)
        for replica in self._bundled().values():
            if replica.id not in self._holders and self._running:
                self._tend(replica)
        placed: dict[str, list[str]] = {}
        for name, pool in self._pools.items():
            pins = [pin for pin in self._desired.values() if pin.pool == name]
            lost = {id for id, holder in self._holders.items() if self._is_lost(holder)}
            usable = [
                id for id, replica in pool.replicas.items() if replica.dialect == "bundled" and id not in lost
            ]
            placed.update(place(pins, usable, self._placed))
        self._placed = placed
        for holder in self._holders.values():
            holder.wake.set()

    def _bundled(self) -> dict[str, Replica]:
        return {
            replica.id: replica
            for pool in self._pools.values()
            for replica in pool.replicas.values()
            if replica.dialect == "bundled"
        }

    def _tend(self, replica: Replica) -> None:
        holder = _Holder(replica, down_since=time.monotonic() if replica.state == "down" else None)
        self._holders[replica.id] = holder
        replica.listen(self._on_change)
        holder.task = asyncio.create_task(self._tending(holder), name=f"pins {replica.id}")

    def _drop(self, holder: _Holder) -> None:
        del self._holders[holder.replica.id]
        holder.replica.unlisten(self._on_change)
        if holder.task is not None:
            holder.task.cancel()

    def _current(self, replica_id: str, pin_id: str) -> _Held:
        """What is known of the pair now; pending whenever the replica lost its cache since."""
        holder = self._holders.get(replica_id)
        if holder is None or not holder.replica.ready or holder.epoch != holder.replica.epoch:
            return _Held(reason="no replica" if holder is None else holder.replica.reason)
        return holder.held.get(pin_id) or _Held()

    # ---- one replica ----

    async def _tending(self, holder: _Holder) -> None:
        while True:
            holder.wake.clear()
            if holder.replica.ready:
                try:
                    await self._bring_up(holder)
                except _ERRORS as error:
                    _log.warning("pins on %s: %s", holder.replica.id, error)
                    self._failed(holder, error)
            elif self._is_lost(holder) and any(holder.replica.id in ids for ids in self._placed.values()):
                self.reconcile()
                holder.wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(self._interval_s, self._grace_s)):
                    await holder.wake.wait()

    def _failed(self, holder: _Holder, error: BaseException) -> None:
        """The replica did not say what it holds: show it until it does."""
        reason = str(error) or type(error).__name__
        for id in [id for id, ids in self._placed.items() if holder.replica.id in ids]:
            held = holder.held.setdefault(id, _Held())
            held.state, held.reason = "error", reason

    async def _bring_up(self, holder: _Holder) -> None:
        """Release, check and warm, one pin after the other, until this replica holds what was placed on
        it.
        """
        replica = holder.replica
        if holder.epoch != replica.epoch:
            holder.epoch, holder.held = replica.epoch, {}
        epoch = replica.epoch
        wanted = [self._desired[id] for id, ids in self._placed.items() if replica.id in ids]
        there = await self._fetch(replica)
        for id in [id for id in holder.held.keys() | there.keys() if self._released(id, wanted, holder)]:
            await self._call(replica, "DELETE", f"/engine/pins/{quote(id, safe='')}")
            holder.held.pop(id, None)
        for pin in wanted:
            if replica.epoch != epoch:
                return
            await self._keep(holder, pin, there.get(pin.id))

    def _released(self, id: str, wanted: Sequence[DesiredPin], holder: _Holder) -> bool:
        """Ours (posted by this keeper to this replica) and no longer wanted there."""
        return id in holder.held and all(pin.id != id for pin in wanted)

    async def _keep(self, holder: _Holder, pin: DesiredPin, there: Mapping[str, Any] | None) -> None:
        """Leave a pin that is resident and fresh; warm it otherwise."""
        held = holder.held.setdefault(pin.id, _Held())
        fresh = pin.ttl_s is None or time.monotonic() - held.posted_at < pin.ttl_s / 2
        if held.state in _SETTLED and there is not None and there.get("state") == held.state and fresh:
            return
        was_resident = held.state == "resident" and there is not None and there.get("state") == "resident"
        if not was_resident:
            held.state = "warming"
        self._begin_warming()
        try:
            await self._warm(holder, pin, held, _count(there, "computed_tokens"))
        except _ERRORS as error:
            held.state, held.reason = "error", str(error) or type(error).__name__
        finally:
            self._end_warming()

    async def _warm(self, holder: _Holder, pin: DesiredPin, held: _Held, computed_before: int) -> None:
        """Post one pin and wait until the replica has settled it."""
        replica, epoch = holder.replica, holder.epoch
        answer = await self._call(
            replica,
            "POST",
            "/engine/pins",
            {
                "id": pin.id,
                "token_ids": list(pin.token_ids),
                "seed": pin.seed.hex(),
                "ttl_s": pin.ttl_s,
                "tenant": pin.tenant,
            },
        )
        held.posted_at = time.monotonic()
        while replica.epoch == epoch and answer.get("state") == "warming" and pin.id in self._desired:
            await asyncio.sleep(self._poll_s)
            answer = (await self._fetch(replica)).get(
                pin.id, {"state": "error", "reason": "the pin vanished"}
            )
        if replica.epoch != epoch:
            return
        state = answer.get("state")
        held.computed_tokens = _count(answer, "computed_tokens")
        self.warmup_tokens += max(0, held.computed_tokens - computed_before)
        held.state = state if state in ("warming", "resident", "over_budget") else "error"
        held.reason = str(answer.get("reason") or ("" if held.state != "error" else f"state {state!r}"))

    async def _fetch(self, replica: Replica) -> dict[str, dict[str, Any]]:
        """Pins of the replica by id."""
        answer = await self._call(replica, "GET", "/engine/pins")
        pins = answer.get("pins")
        return {str(pin["id"]): pin for pin in pins or () if isinstance(pin, dict) and "id" in pin}

    async def _call(self, replica: Replica, method: str, path: str, body: object = None) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {replica.api_key}"} if replica.api_key else None
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        url = replica.base_url + path
        async with self._session.request(
            method, url, json=body, headers=headers, timeout=timeout
        ) as response:
            raw = await response.read()
            if response.status >= 400 and not (method == "DELETE" and response.status == 404):
                raise ValueError(_refusal(f"{method} {path} answered {response.status}", raw))
            parsed = await response.json(content_type=None) if raw.strip() else {}
            return parsed if isinstance(parsed, dict) else {}

    def _begin_warming(self) -> None:
        if not self._warming:
            self._warming_since = time.monotonic()
        self._warming += 1

    def _end_warming(self) -> None:
        self._warming -= 1
        if not self._warming:
            self._warmed_s += time.monotonic() - self._warming_since


def _refusal(answered: str, raw: bytes) -> str:
    """Why the engine refused, for people: its own message, or the start of whatever it said."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        message = json.loads(raw)["error"]["message"]
        if isinstance(message, str) and message:
            return message
    return f"{answered}: {raw[:200].decode('utf-8', 'replace')}"


def _count(status: Mapping[str, Any] | None, key: str) -> int:
    """A count out of a pin's status; 0 where it is absent."""
    value = status.get(key) if status else None
    return value if isinstance(value, int) else 0
