"""The fleet: the live side of a policy's pools and pins.

Owns supervisors, replica records, monitors and the pin keeper, and brings them in line with a policy.
Always holds: a pool in the policy has a live pool; a replica no policy names is let go (its process
stopped, its index entries gone); a pool's text model is the one of its replicas, and pins are tokenized
with it, through the same canonicalization as requests.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import zmq.asyncio

from canonicalizer import ReplayMemory, canonicalize
from canonicalizer.chain import block_hashes
from canonicalizer.tokens import bytes_to_ids
from gateway.api.services import Services
from gateway.canon.text import PoolText
from gateway.identity import cache_scope
from gateway.pin_placement import DesiredPin
from gateway.pins import PinKeeper
from gateway.routing.index import PrefixIndex
from gateway.routing.monitor import Probing, ReplicaMonitor
from gateway.routing.pool import PoolState
from gateway.routing.replica import Replica
from gateway.supervise import BundledSpec, Supervisor
from policies import Bundled, Pin, Policy, Pool, Upstream

Progress = Callable[[str, str], None]


class _LivePool:
    """One pool: its definition, and what runs for it."""

    __slots__ = ("definition", "monitors", "state", "supervisor")

    def __init__(self, definition: Pool, state: PoolState) -> None:
        self.definition = definition
        self.state = state
        self.supervisor: Supervisor | None = None
        self.monitors: dict[str, ReplicaMonitor] = {}


class Fleet:
    """Replicas and pins of one gateway; `apply` brings them in line with a policy."""

    def __init__(
        self,
        services: Services,
        index: PrefixIndex,
        session: aiohttp.ClientSession,
        context: zmq.asyncio.Context,
        *,
        on_progress: Progress | None = None,
    ) -> None:
        self._services = services
        self._index = index
        self._session = session
        self._context = context
        self._on_progress = on_progress
        self._live: dict[str, _LivePool] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._policy: Policy = services.policy
        self.pins = PinKeeper(services.pools, session, index)

    @property
    def supervisors(self) -> list[Supervisor]:
        """The supervisors of the bundled pools."""
        return [live.supervisor for live in self._live.values() if live.supervisor is not None]

    async def apply(self, policy: Policy) -> None:
        """Start, change and stop pools as `policy` says; returns before new replicas are ready."""
        self._policy = policy
        for name in [name for name in self._live if name not in policy.pools]:
            await self._close(self._live.pop(name))
            del self._services.pools[name]
            self._services.texts.pop(name, None)
        for name, definition in policy.pools.items():
            live = self._live.get(name)
            if live is not None and live.definition.bundled != definition.bundled:
                await self._close(self._live.pop(name))
                live = None
            if live is None:
                live = self._open(definition)
            await self._update(live, definition)
        self.pins.start()
        self._place_pins()

    async def stop(self) -> None:
        """Stop pins, monitors and bundled replicas."""
        await self.pins.stop()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(self._close(live) for live in self._live.values()))
        self._live.clear()

    # --- pools ----------------------------------------------------------------------------------------------

    def _open(self, definition: Pool) -> _LivePool:
        state = PoolState(definition.name, routing=definition.routing)
        live = self._live[definition.name] = _LivePool(definition, state)
        self._services.pools[definition.name] = state
        self._services.texts.pop(definition.name, None)
        if definition.bundled is not None:
            spec = self._spec(definition, definition.bundled)
            live.supervisor = Supervisor(spec, on_progress=self._on_progress)
            for replica in live.supervisor.replicas:
                self._watch(live, replica)
            live.supervisor.start()
        return live

    async def _update(self, live: _LivePool, definition: Pool) -> None:
        live.definition = definition
        live.state.use_policy(definition.routing)
        wanted = {_upstream_id(definition, upstream): upstream for upstream in definition.upstreams}
        bundled = {replica.id for replica in live.supervisor.replicas} if live.supervisor else set()
        for replica_id in [id for id in live.state.replicas if id not in wanted and id not in bundled]:
            await self._let_go(live, replica_id)
        for replica_id, upstream in wanted.items():
            if replica_id not in live.state.replicas:
                self._watch(live, _external(replica_id, definition, upstream))

    def _watch(self, live: _LivePool, replica: Replica) -> None:
        live.state.add(replica)
        replica.listen(self._on_change)
        monitor = ReplicaMonitor(
            replica,
            self._session,
            self._index,
            context=self._context,
            probing=Probing(interval_s=self._services.config.poll_interval_s),
        )
        live.monitors[replica.id] = monitor
        monitor.start()

    async def _let_go(self, live: _LivePool, replica_id: str) -> None:
        replica = live.state.replicas[replica_id]
        live.state.discard(replica_id)
        await live.monitors.pop(replica_id).stop()
        replica.unlisten(self._on_change)
        self._index.clear(replica_id)
        self._services.shadow.clear(replica_id)

    async def _close(self, live: _LivePool) -> None:
        for replica_id in list(live.state.replicas):
            await self._let_go(live, replica_id)
        if live.supervisor is not None:
            await live.supervisor.stop()

    def _spec(self, definition: Pool, bundled: Bundled) -> BundledSpec:
        config = self._services.config
        named = Path(bundled.model).expanduser()
        model_dir = named if named.is_dir() else config.models_dir / bundled.model
        spec = {"command": config.engine_command} if config.engine_command is not None else {}
        return BundledSpec(
            pool=definition.name,
            model_dir=str(model_dir),
            served_name=definition.model,
            replicas=bundled.replicas,
            dtype=bundled.dtype,
            mode=bundled.mode,
            threads=bundled.threads,
            kv_tokens=bundled.kv_tokens,
            max_seqs=bundled.max_seqs,
            arguments=("--pin-budget", str(bundled.pin_budget), *config.engine_arguments),
            **spec,
        )

    # --- text models and pins -------------------------------------------------------------------------------

    def _on_change(self, replica: Replica) -> None:
        if not replica.ready:
            self._services.shadow.clear(replica.id)
        elif replica.dialect == "bundled":
            task = asyncio.create_task(self._learn_text(replica), name=f"text model {replica.pool}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        gate = self._services.gates.get(replica.pool)
        if gate is not None:
            gate.dispatch()

    async def _learn_text(self, replica: Replica) -> None:
        """Load the text model of a replica that became ready, then place the pins that waited for it."""
        info = replica.info
        model_dir = str(info.get("model_dir") or "")
        fingerprint = str(info.get("fingerprint") or f"{replica.pool}:{replica.model}")
        model = await self._services.text_models.load(model_dir) if model_dir else None
        block_size, context = info.get("block_size"), info.get("context_length")
        text = PoolText(
            model,
            fingerprint,
            block_size if isinstance(block_size, int) and block_size > 0 else 16,
            context if isinstance(context, int) and context > 0 else None,
        )
        if self._services.texts.get(replica.pool) != text:
            self._services.texts[replica.pool] = text
            self._place_pins()

    def _place_pins(self) -> None:
        desired = [self._desired(pin) for pin in self._policy.pins]
        self.pins.set_desired([pin for pin in desired if pin is not None])

    def _desired(self, pin: Pin) -> DesiredPin | None:
        """A policy's pin as tokens; None until its pool's text model is loaded."""
        text = self._services.texts.get(pin.pool)
        if text is None or text.model is None:
            return None
        tokens = self.pin_tokens(pin, text)
        tenants = self._policy.tenants
        owner = tenants.get(pin.tenant) if pin.tenant else None
        seed = text.seed("all" if owner is None and tenants else cache_scope(owner))
        return DesiredPin(
            name=pin.name,
            tenant=pin.tenant or "",
            pool=pin.pool,
            token_ids=tuple(bytes_to_ids(tokens)),
            seed=seed,
            hashes=tuple(block_hashes(seed, tokens, text.block_size)),
            ttl_s=pin.ttl_s,
            replicas=pin.replicas,
        )

    def pin_tokens(self, pin: Pin, text: PoolText) -> bytes:
        """The tokens every conversation with this system prompt begins with, in the form that is sent."""
        services = self._services
        assert text.model is not None
        system: list[dict[str, Any]] = [{"role": "system", "content": pin.system}]
        body = {"messages": [*system, {"role": "user", "content": "a"}]}
        route = next((route for route in self._policy.routes if route.name == pin.route), None)
        if route is not None and services.canon.mode_of(route, pin.tenant or "") == "enforce":
            context = services.canon.context(pin.tenant or "")
            canonical = canonicalize(body, route.canon.ruleset, ReplayMemory(), context)
            system = [dict(canonical.messages[0])]
        return text.model.system_prefix(system)


def _upstream_id(pool: Pool, upstream: Upstream) -> str:
    return f"{pool.name}@{upstream.url.split('://', 1)[-1]}"


def _external(replica_id: str, pool: Pool, upstream: Upstream) -> Replica:
    key = os.environ.get(upstream.api_key_env) if upstream.api_key_env else None
    return Replica(
        replica_id,
        pool=pool.name,
        base_url=upstream.url,
        dialect=upstream.dialect,
        model=pool.model,
        api_key=key,
    )
