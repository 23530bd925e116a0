"""One serving process: the gateway, its admin plane, and what the operator sees while they start.

Owns signals and the order of starting and stopping. Always holds: the banner is printed only when a
request would be served; SIGTERM and SIGINT drain and end with exit code 0; what can't start ends with exit
code 2 and a line that says which flag, field or replica is at fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import sys
from collections.abc import AsyncIterator, Iterable

import aiohttp
from aiohttp import web

from gateway.admin import AdminPlane
from gateway.app import Gateway
from gateway.canon.kill_switch import FILE_NAME
from gateway.config import GatewayConfig
from gateway.hints import canon_on_command, first_request, switch_command
from gateway.listen import PortUnavailable, check_ports
from gateway.policy_source import PolicySource
from gateway.supervise import Supervisor

_HEARTBEAT_S = 10.0
_OTHERS_S = 3.0
"""How long a pool's other replicas are waited for once one is ready."""
_WATCH_S = 0.2
_STARTS = 3
"""A bundled replica that ended this often before any of its pool was ready will not come up by itself."""


class StartFailed(Exception):
    """The process can't serve; the message says why."""


async def serve(config: GatewayConfig, source: PolicySource) -> int:
    """Serve until SIGTERM or SIGINT; return the process's exit code."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    gateway = Gateway(config, source.policy, on_progress=_progress)
    try:
        try:
            check_ports(config.host, config.port, config.admin_port, admin_host=config.admin_host)
            await gateway.start()
        except (OSError, ValueError, PortUnavailable) as error:
            raise StartFailed(str(error)) from error
        async with admin_plane(gateway, source, config) as admin_url:
            await _run(gateway, source, admin_url, ended)
            _say("stopping: running requests finish first")
            await gateway.stop()
    except StartFailed as error:
        _say(f"error: {error}")
        return 2
    finally:
        await gateway.stop()
    return 0


async def _run(gateway: Gateway, source: PolicySource, admin_url: str, ended: asyncio.Event) -> None:
    """Bring the replicas up, print the banner, and wait for the end. Raises StartFailed."""
    _say(f"dashboard   {admin_url}/dashboard")
    waiting = asyncio.create_task(ended.wait())
    starting = asyncio.create_task(_wait_ready(gateway))
    try:
        await asyncio.wait({waiting, starting}, return_when=asyncio.FIRST_COMPLETED)
        if not ended.is_set():
            await starting
            gc.collect()
            gc.freeze()  # what lives as long as the process is not walked by every full collection
            _say(banner(gateway, source, admin_url))
            await waiting
    finally:
        for task in (waiting, starting):
            task.cancel()
        await asyncio.gather(waiting, starting, return_exceptions=True)


@contextlib.asynccontextmanager
async def admin_plane(gateway: Gateway, source: PolicySource, config: GatewayConfig) -> AsyncIterator[str]:
    """Run the admin plane and yield its URL. Raises StartFailed when its port can't be bound."""
    async with aiohttp.ClientSession() as session:
        runner = web.AppRunner(AdminPlane(gateway, source, session).app, access_log=None)
        await runner.setup()
        try:
            try:
                await web.TCPSite(runner, config.admin_host, config.admin_port).start()
            except OSError as error:
                raise StartFailed(f"--admin-port {config.admin_port}: {error.strerror or error}") from error
            yield f"http://{config.admin_host}:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


def banner(gateway: Gateway, source: PolicySource, admin_url: str) -> str:
    """Return what an operator needs next: URLs, a request to try, the kill switch if it is on, and how to
    enforce a route that is observed.
    """
    base = f"http://{_reachable(gateway.config.host)}:{gateway.port}/v1"
    policy = gateway.policy
    file = f"{source.path}" if source.in_file else source.name
    lines = [
        "",
        f"  base URL    {base}",
        f"  dashboard   {admin_url}/dashboard",
        f"  metrics     {admin_url}/metrics",
        f"  policy      {file} (version {policy.version})",
        "",
        "  try it:",
        f"    {first_request(policy, source.text, base)}",
    ]
    return "\n".join([*lines, *_modes(gateway, source, admin_url)]) + "\n"


def _modes(gateway: Gateway, source: PolicySource, admin_url: str) -> list[str]:
    """What is done to prompts, and the command for the next step."""
    switch = gateway.kill_switch
    names = [route.name for route in gateway.policy.routes]
    killed = [name for name in names if switch.engaged(name)]
    lines: list[str] = []
    if killed:
        which = "all routes" if switch.everything else f"route {', '.join(killed)}"
        file = gateway.config.runtime_dir / FILE_NAME
        lines += [
            "",
            f"  canonicalization is switched off for {which} (kill switch, {file}). To switch it on:",
        ]
        for name in (None,) if switch.everything else killed:
            lines.append(f"    {canon_on_command(name, admin_url=admin_url)}")
    live = [route for route in gateway.policy.routes if route.name not in killed]
    enforced = [route.name for route in live if route.canon.mode == "enforce"]
    if enforced:
        lines += ["", f"  enforced: {', '.join(enforced)} (prompts are changed as the rules say)"]
    observed = next((route.name for route in live if route.canon.mode == "observe"), None)
    if observed is not None:
        path = source.path if source.in_file else None
        lines += [
            "",
            f"  route {observed} is in observe: no prompt is changed. To change that:",
            f"    {switch_command(observed, 'enforce', path=path, admin_url=admin_url)}",
        ]
    return lines


async def _wait_ready(gateway: Gateway) -> None:
    """Return when every pool has a ready replica, telling every ten seconds what is waited for.

    Raises StartFailed when a pool's bundled replicas end again and again.
    """
    watched = asyncio.create_task(_watch(gateway.fleet.supervisors))
    try:
        for name, pool in gateway.pools.items():
            while True:
                ready = asyncio.create_task(pool.wait_ready(timeout_s=_HEARTBEAT_S))
                await asyncio.wait({ready, watched}, return_when=asyncio.FIRST_COMPLETED)
                if watched.done():
                    ready.cancel()
                    watched.result()
                if await ready:
                    break
                waiting = ", ".join(f"{r.id} {r.state} {r.reason}".rstrip() for r in pool.replicas.values())
                _say(f"pool {name}: waiting for a replica ({waiting or 'it has none'})")
            await pool.wait_ready(len(pool.replicas), timeout_s=_OTHERS_S)
            _say(f"pool {name}: {len(pool.ready())} of {len(pool.replicas)} replicas ready")
    finally:
        watched.cancel()


async def _watch(supervisors: Iterable[Supervisor]) -> None:
    """Wait for a bundled pool of which no replica stays up; raises StartFailed then."""
    pending = list(supervisors)
    while True:
        pending = [each for each in pending if not any(replica.ready for replica in each.replicas)]
        for supervisor in pending:
            if all(process.restarts >= _STARTS for process in supervisor.processes):
                why = "; ".join(f"{replica.id} {replica.reason}" for replica in supervisor.replicas)
                raise StartFailed(f"pool {supervisor.spec.pool}: no replica starts: {why}")
        await asyncio.sleep(_WATCH_S)


def _reachable(host: str) -> str:
    """The host as a client on this machine writes it in a URL."""
    if host in ("0.0.0.0", ""):
        return "127.0.0.1"
    if host == "::":
        return "[::1]"
    return f"[{host}]" if ":" in host else host


def _progress(replica_id: str, line: str) -> None:
    _say(f"[{replica_id}] {line}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
