"""The admin plane: dashboard, metrics, and the few things an operator changes while the gateway runs.

Owns its own listener, on loopback. Always holds: it answers only requests whose Host is a loopback name
and whose Origin, if any, is its own (a page on another site can't reach it through a visitor's browser);
a policy that does not load changes nothing and is answered with every problem's file:line; one that can't be
put in force leaves gateway, source and file as they were; prompts and keys are in no answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import orjson
from aiohttp import web

from canonicalizer import Proposal
from gateway.canon.kill_switch import KillSwitch
from gateway.canon.service import CanonService
from gateway.dashboard import state as dashboard
from gateway.pins import PinKeeper
from gateway.policy_source import Draft, PolicySource
from gateway.routing.index import PrefixIndex
from gateway.routing.pool import PoolState
from gateway.routing.replica import Replica
from gateway.telemetry.ledger import Ledger
from gateway.telemetry.metrics import Metrics
from policies import Policy, PolicyError

_log = logging.getLogger(__name__)

_STATIC = Path(__file__).parent / "dashboard" / "static"
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]"})
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_MAX_BODY = 4 * 1024 * 1024
_BODY_TIMEOUT_S = 10.0
_MAX_SOURCE_CHARS = 200


class Administered(Protocol):
    """What the admin plane needs of a gateway."""

    @property
    def policy(self) -> Policy: ...
    @property
    def pools(self) -> dict[str, PoolState]: ...
    @property
    def index(self) -> PrefixIndex: ...
    @property
    def ledger(self) -> Ledger: ...
    @property
    def metrics(self) -> Metrics: ...
    @property
    def canon(self) -> CanonService: ...
    @property
    def pins(self) -> PinKeeper: ...
    @property
    def kill_switch(self) -> KillSwitch: ...

    def publish_gauges(self) -> None: ...
    def learned(self, route: str) -> list[Proposal]: ...
    async def apply_policy(self, policy: Policy) -> None: ...


class AdminPlane:
    """Handlers over one gateway; `app` is served by the caller."""

    def __init__(self, gateway: Administered, source: PolicySource, session: aiohttp.ClientSession) -> None:
        self._gateway = gateway
        self._source = source
        self._session = session
        self._started = time.time()
        self._changing = asyncio.Lock()
        self._files = {
            path.relative_to(_STATIC).as_posix(): (path.read_bytes(), _TYPES.get(path.suffix, "text/plain"))
            for path in _STATIC.rglob("*")
            if path.is_file()
        }
        self.app = web.Application(middlewares=[_guard], client_max_size=_MAX_BODY)
        self.app.add_routes(
            [
                web.get("/", self._to_dashboard),
                web.get("/dashboard", self._dashboard),
                web.get("/dashboard/", self._to_dashboard),
                web.get("/dashboard/static/{name:.+}", self._static),
                web.get("/metrics", self._metrics),
                web.get("/admin/state", self._state),
                web.get("/admin/pins", self._pins),
                web.get("/admin/requests", self._requests),
                web.get("/admin/proposals", self._proposals),
                web.get("/admin/policy", self._policy),
                web.post("/admin/policy", self._replace_policy),
                web.post("/admin/policy/reload", self._reload_policy),
                web.post("/admin/policy/mode", self._set_mode),
                web.post("/admin/cache/clear", self._clear_caches),
                web.post("/admin/canon/off", self._canon_off),
                web.post("/admin/canon/on", self._canon_on),
            ]
        )

    # ---- what is ----

    async def _to_dashboard(self, request: web.Request) -> web.StreamResponse:
        raise web.HTTPFound("/dashboard")

    async def _dashboard(self, request: web.Request) -> web.StreamResponse:
        return self._file("index.html")

    async def _static(self, request: web.Request) -> web.StreamResponse:
        return self._file(request.match_info["name"])

    def _file(self, name: str) -> web.Response:
        found = self._files.get(name)
        if found is None:
            raise web.HTTPNotFound
        body, kind = found
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=_HEADERS)

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        self._gateway.publish_gauges()
        body, content_type = self._gateway.metrics.exposition(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _state(self, request: web.Request) -> web.StreamResponse:
        gateway = self._gateway
        return _json(
            dashboard.state(
                policy=gateway.policy,
                source=self._source.name,
                path=self._source.path if self._source.in_file else None,
                admin_url=f"http://{request.host}",
                pools=gateway.pools,
                index=gateway.index,
                ledger=gateway.ledger,
                metrics=gateway.metrics,
                pins=gateway.pins,
                canon=gateway.canon.state(gateway.policy.routes),
                started=self._started,
            )
        )

    async def _pins(self, request: web.Request) -> web.StreamResponse:
        keeper = self._gateway.pins
        rows = dashboard.pin_rows(keeper, self._gateway.policy.pins)
        pending = sum(row["state"] in ("pending", "warming") for row in rows)
        figures = {"warmup_tokens": keeper.warmup_tokens, "warmup_s": keeper.warmup_s, "pending": pending}
        return _json({"pins": rows, **figures})

    async def _proposals(self, request: web.Request) -> web.StreamResponse:
        gateway = self._gateway
        rows = [
            dashboard.proposal_row(route.name, proposal)
            for route in gateway.policy.routes
            for proposal in gateway.learned(route.name)
        ]
        return _json({"proposals": rows})

    async def _requests(self, request: web.Request) -> web.StreamResponse:
        try:
            limit = min(2000, max(1, int(request.query.get("limit", "100"))))
        except ValueError:
            return _problem(400, "limit: must be a whole number")
        return _json({"requests": [entry.as_dict() for entry in self._gateway.ledger.recent(limit)]})

    async def _policy(self, request: web.Request) -> web.StreamResponse:
        source = self._source
        path = str(source.path) if source.path else None
        return _json({"version": source.policy.version, "source": source.name, "path": path})

    # ---- policy ----

    async def _replace_policy(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request)
        text, name = body.get("text"), body.get("source", "admin request")
        if not isinstance(text, str):
            return _problem(400, "text: must be the policy's YAML as a string")
        if not isinstance(name, str) or not 0 < len(name) <= _MAX_SOURCE_CHARS or not name.isprintable():
            return _problem(400, f"source: must be a name of 1 to {_MAX_SOURCE_CHARS} printable characters")
        return await self._change(lambda: self._source.replaced(text, name))

    async def _reload_policy(self, request: web.Request) -> web.StreamResponse:
        return await self._change(self._source.reloaded)

    async def _set_mode(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request)
        route, mode = body.get("route"), body.get("mode")
        if not isinstance(route, str) or not isinstance(mode, str):
            return _problem(400, "route and mode: must be strings")
        before = {item.name: item.canon.mode for item in self._gateway.policy.routes}.get(route)
        return await self._change(lambda: self._source.with_mode(route, mode), before=before, after=mode)

    async def _change(self, make: Callable[[], Draft], **more: str | None) -> web.StreamResponse:
        async with self._changing:
            try:
                draft = await asyncio.to_thread(make)
                undo = await asyncio.to_thread(self._source.take, draft)
            except PolicyError as error:
                return _problem(400, str(error))
            except (OSError, UnicodeDecodeError) as error:
                return _problem(400, f"{self._source.path or self._source.name}: {_reason(error)}")
            try:
                await self._gateway.apply_policy(draft.policy)
            except Exception as error:
                message = f"{draft.name}: not put in force: {_reason(error)}"
                if not isinstance(error, ValueError):
                    _log.exception("policy %s", draft.policy.version)
                left = await self._undo(undo)
                return _problem(409 if isinstance(error, ValueError) else 500, message + left)
        _log.info("policy %s in force, from %s", draft.policy.version, draft.name)
        digest = hashlib.sha256(draft.text.encode()).hexdigest()
        return _json({"version": draft.policy.version, "source": draft.name, "text_sha256": digest, **more})

    async def _undo(self, undo: Draft) -> str:
        """Go back to what was in force; returns what could not be undone, in words."""
        left = ""
        try:
            await asyncio.to_thread(self._source.take, undo)
        except OSError as error:
            left = f"; {self._source.path} still has the new text: {_reason(error)}"
            await asyncio.to_thread(self._source.take, Draft(undo.policy, undo.text, undo.name))
        try:
            await self._gateway.apply_policy(undo.policy)
        except Exception:
            _log.exception("policy %s", undo.policy.version)
            left += "; the earlier policy could not be put back, restart the gateway"
        return left

    # ---- caches and the kill switch ----

    async def _clear_caches(self, request: web.Request) -> web.StreamResponse:
        replicas = [
            replica
            for pool in self._gateway.pools.values()
            for replica in pool.replicas.values()
            if replica.ready and replica.dialect == "bundled"
        ]
        answers = await asyncio.gather(*(self._clear(replica) for replica in replicas))
        failed = [replica.id for replica, ok in zip(replicas, answers, strict=True) if not ok]
        if failed:
            return _problem(502, f"not cleared: {', '.join(failed)}")
        return _json({"cleared": [replica.id for replica in replicas]})

    async def _clear(self, replica: Replica) -> bool:
        url = f"{replica.base_url}/engine/cache/clear"
        headers = {"Authorization": f"Bearer {replica.api_key}"} if replica.api_key else None
        try:
            timeout = aiohttp.ClientTimeout(total=10)
            async with self._session.post(url, timeout=timeout, headers=headers) as response:
                if response.status != 200:
                    return False
        except (aiohttp.ClientError, TimeoutError):
            return False
        replica.mark_cache_lost()  # at once: its event may come after the next question about its pins
        return True

    async def _canon_off(self, request: web.Request) -> web.StreamResponse:
        route = await self._named_route(request)
        self._gateway.kill_switch.set_off(route)
        await self._settle()
        return _json({"off": route or "all routes"})

    async def _canon_on(self, request: web.Request) -> web.StreamResponse:
        route = await self._named_route(request)
        gateway = self._gateway
        gateway.kill_switch.set_on(route)
        for item in gateway.policy.routes:
            if route in (None, item.name):
                gateway.canon.restore(item.name)
        await self._settle()
        still = [item.name for item in gateway.policy.routes if gateway.kill_switch.engaged(item.name)]
        return _json({"on": route or "all routes", "still_off": still})

    async def _settle(self) -> None:
        """Pins hold the form that is sent, which the switch has changed: place them anew."""
        async with self._changing:
            with contextlib.suppress(ValueError, OSError):
                await self._gateway.apply_policy(self._gateway.policy)

    async def _named_route(self, request: web.Request) -> str | None:
        body = await _body(request)
        route = body.get("route")
        if route is not None and not isinstance(route, str):
            raise web.HTTPBadRequest(text="route: must be a string")
        known = {item.name for item in self._gateway.policy.routes}
        if route is not None and route not in known:
            raise web.HTTPBadRequest(text=f"route: no route {route!r}; there are {', '.join(sorted(known))}")
        return route


async def _body(request: web.Request) -> dict[str, Any]:
    if request.content_type != "application/json":
        raise web.HTTPUnsupportedMediaType(text="send application/json")
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            raw = await request.read()
        value = orjson.loads(raw)
    except TimeoutError:
        raise web.HTTPRequestTimeout(text="the body did not arrive in time") from None
    except web.HTTPRequestEntityTooLarge:
        raise web.HTTPRequestEntityTooLarge(
            _MAX_BODY, 0, text=f"the body is larger than {_MAX_BODY:,} bytes"
        ) from None
    except orjson.JSONDecodeError as error:
        raise web.HTTPBadRequest(text=f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise web.HTTPBadRequest(text="expected a JSON object")
    return value


def _json(value: Any) -> web.Response:
    body = orjson.dumps(value, default=_plain, option=orjson.OPT_NON_STR_KEYS)
    return web.Response(body=body, content_type="application/json", headers=_HEADERS)


def _plain(value: Any) -> Any:
    """What orjson does not know: named tuples, by their fields."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return value._asdict()
    raise TypeError


def _problem(status: int, message: str) -> web.Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    body = orjson.dumps({"error": {"message": message, "type": kind, "param": None, "code": None}})
    return web.Response(status=status, body=body, content_type="application/json", headers=_HEADERS)


def _reason(error: BaseException) -> str:
    if isinstance(error, UnicodeDecodeError):
        line = error.object.count(b"\n", 0, error.start) + 1
        return f"line {line}: is not UTF-8 text (byte 0x{error.object[error.start]:02x})"
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__


def _same_site(request: web.Request) -> bool:
    """False for what a page of another site may have sent, also one whose name was rebound to loopback."""
    host = request.host.lower()
    name, _, port = host.rpartition(":")
    name = name if port.isdigit() else host
    origin = request.headers.get("Origin")
    if name not in _LOOPBACK or (origin is not None and origin.lower() != f"http://{host}"):
        return False
    site = request.headers.get("Sec-Fetch-Site", "same-origin")
    return request.method in ("GET", "HEAD") or site in ("same-origin", "none")


@web.middleware
async def _guard(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    if not _same_site(request):
        return _problem(403, "the admin plane answers on loopback only, and only its own pages")
    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        answer = _problem(error.status, error.text or error.reason)
        if error.status == 408:
            answer.force_close()  # the rest of the body may come yet
        if "Allow" in error.headers:
            answer.headers["Allow"] = error.headers["Allow"]
        return answer
    except Exception as error:
        _log.exception("%s %s", request.method, request.path)
        return _problem(500, f"{request.method} {request.path}: {type(error).__name__}: {_reason(error)}")
