"""The gateway: puts the parts together and keeps them running.

Owns the life of everything in this process: listener, upstream connections, replicas and their monitors,
pins, background tasks. Always holds: a policy takes effect as a whole or not at all; running requests keep
the policy they began with; after `stop` no task, socket or child process of this gateway is left; without
tenants the listener is on loopback only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import aiohttp
import zmq.asyncio

from canonicalizer import Proposal
from gateway.admission import PoolGate
from gateway.api.server import DataPlane
from gateway.api.services import RetryBudget, Services
from gateway.canon.kill_switch import KillSwitch
from gateway.canon.learning import Learning
from gateway.canon.service import CanonService
from gateway.canon.text import TextModels
from gateway.config import GatewayConfig
from gateway.fleet import Fleet
from gateway.pins import PinKeeper
from gateway.routing.index import PrefixIndex
from gateway.routing.pool import PoolState
from gateway.routing.replica import Replica
from gateway.routing.router import Router
from gateway.telemetry.canary import watch_loop
from gateway.telemetry.ledger import Ledger
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.shadow import Shadow
from gateway.upstream.client import UpstreamClient
from policies import Policy

Progress = Callable[[str, str], None]


class Gateway:
    """One gateway process. Make it anywhere, `start` it on the event loop that is to serve."""

    def __init__(self, config: GatewayConfig, policy: Policy, *, on_progress: Progress | None = None) -> None:
        """`on_progress(replica_id, line)` gets what bundled replicas say while they load."""
        self.config = config
        self.metrics = Metrics()
        self.ledger = Ledger(self.metrics, entries=config.ledger_entries)
        self.index = PrefixIndex(config.index_blocks)
        self.router = Router(self.index)
        self.kill_switch = KillSwitch(config.runtime_dir)
        self.canon = CanonService(
            self.metrics,
            config.secret,
            self.kill_switch,
            bypass_limit=config.bypass_limit,
            memory_ttl_s=config.memory_ttl_s,
        )
        self._policy = policy
        self._on_progress = on_progress
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stack = contextlib.AsyncExitStack()
        self._services: Services | None = None
        self._fleet: Fleet | None = None
        self._plane: DataPlane | None = None

    @property
    def policy(self) -> Policy:
        """The policy in force."""
        return self._policy

    @property
    def services(self) -> Services:
        """What the handlers work with; there from `start` on."""
        if self._services is None:
            raise RuntimeError("the gateway was not started")
        return self._services

    @property
    def fleet(self) -> Fleet:
        """Replicas, monitors and pins; there from `start` on."""
        if self._fleet is None:
            raise RuntimeError("the gateway was not started")
        return self._fleet

    @property
    def pools(self) -> dict[str, PoolState]:
        """Live pools by name."""
        return self.services.pools

    @property
    def pins(self) -> PinKeeper:
        """The keeper of pinned prompts."""
        return self.fleet.pins

    def learned(self, route: str) -> list[Proposal]:
        """Rules that the route's traffic speaks for, the costliest first; none of them is in force."""
        return self.services.learning.proposals(route)

    @property
    def port(self) -> int:
        """The data plane's port (of use where 0 was configured)."""
        assert self._plane is not None
        return self._plane.port

    async def start(self) -> None:
        """Start replicas and listen; returns before replicas are ready. Raises OSError, ValueError."""
        config, policy = self.config, self._policy
        self._check_exposure(policy)
        config.runtime_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            session = await self._stack.enter_async_context(
                aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
            )
            context = zmq.asyncio.Context()
            self._stack.callback(context.destroy, linger=0)
            texts = TextModels(inline_chars=config.inline_chars)
            self._stack.callback(texts.close)
            client = UpstreamClient(
                connect_timeout_s=config.connect_timeout_s, pool_idle_s=config.pool_idle_s
            )
            self._stack.push_async_callback(client.close)
            shadow = Shadow(
                self.ledger,
                self.metrics,
                rate=config.shadow_rate,
                per_s=config.shadow_per_s,
                max_blocks=config.shadow_blocks,
                ttl_s=config.shadow_ttl_s,
            )
            services = self._services = Services(
                config=config,
                policy=policy,
                router=self.router,
                pools={},
                gates={},
                texts={},
                text_models=texts,
                canon=self.canon,
                learning=Learning(),
                shadow=shadow,
                client=client,
                ledger=self.ledger,
                metrics=self.metrics,
                retries=RetryBudget(config.retry_ratio, config.retry_burst),
            )
            self._fleet = Fleet(services, self.index, session, context, on_progress=self._on_progress)
            self._stack.push_async_callback(self._fleet.stop)
            self._set_gates(policy)
            await self._fleet.apply(policy)
            plane = self._plane = DataPlane(services)
            self._stack.push_async_callback(plane.stop, config.drain_timeout_s)
            await plane.start()
        except BaseException:
            await self.stop()
            raise
        self._spawn(watch_loop(self.metrics), "loop canary")
        self._spawn(shadow.run(), "shadow index")
        self._spawn(services.learning.run(), "learning")
        self._spawn(self._housekeeping(), "housekeeping")

    async def stop(self) -> None:
        """Drain, stop the replicas, close everything. Idempotent."""
        await self._stack.aclose()
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def apply_policy(self, policy: Policy) -> None:
        """Put a policy in force; ValueError (and no change) when it cannot be, with the reason."""
        self._check_exposure(policy)
        services = self.services
        before = self._policy
        self._set_gates(policy)
        await self.fleet.apply(policy)
        self._policy = services.policy = policy
        for route in policy.routes:
            old = next((item for item in before.routes if item.name == route.name), None)
            if old is None or old.canon != route.canon:
                self.canon.restore(route.name)
                services.learning.forget(route.name)

    def _check_exposure(self, policy: Policy) -> None:
        if not policy.requires_key and not self.config.loopback:
            raise ValueError(
                f"listening on {self.config.host} needs tenants with keys in the policy; "
                "without tenants the gateway binds loopback (127.0.0.1) only"
            )

    def _set_gates(self, policy: Policy) -> None:
        gates = self.services.gates
        for name in policy.pools:
            gate = gates.get(name)
            if gate is None:
                gates[name] = PoolGate(policy.classes.values(), partial(self._slots, name))
            else:
                gate.replace_classes(policy.classes.values())

    def _slots(self, pool: str) -> int:
        """Requests the pool's ready replicas can run at once."""
        state = self.services.pools.get(pool)
        if state is None:
            return 0
        default = self.config.default_slots
        return sum(_slots_of(replica, default) for replica in state.ready())

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _housekeeping(self) -> None:
        while True:
            await asyncio.sleep(self.config.poll_interval_s)
            self.kill_switch.poll()
            services = self.services
            services.client.sweep()
            for gate in services.gates.values():
                gate.dispatch()
            self.publish_gauges()

    def publish_gauges(self) -> None:
        """Bring the gauges of replicas, queues, pins and modes up to date."""
        metrics, services = self.metrics, self.services
        for gauge in (
            metrics.replica_up,
            metrics.replica_inflight,
            metrics.replica_blocks,
            metrics.pin_state,
        ):
            gauge.clear()
        for pool in services.pools.values():
            for replica in pool.replicas.values():
                labels = (pool.name, replica.id)
                metrics.replica_up.labels(*labels).set(replica.ready)
                metrics.replica_inflight.labels(*labels).set(replica.inflight)
                metrics.replica_blocks.labels(*labels).set(self.index.blocks(replica.id))
        for pool_name, gate in services.gates.items():
            for class_name, waiting in gate.waiting.items():
                metrics.queue_waiting.labels(pool_name, class_name).set(waiting)
        for row in self.pins.states():
            metrics.pin_state.labels(row.pin, row.replica, row.state).set(1)
        for route in self._policy.routes:
            metrics.canon_mode.labels(route.name).set(self.canon.mode_of(route) == "enforce")


def _slots_of(replica: Replica, default: int) -> int:
    slots = replica.info.get("max_seqs")
    return slots if isinstance(slots, int) and slots > 0 else default
