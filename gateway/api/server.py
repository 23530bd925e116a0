"""The data plane's listener: paths, methods, health and model lists.

Owns the path table and the low-level server. Always holds: every answer, also to an unknown path, is JSON
in OpenAI's shape (health checks and streams excepted); a handler is cancelled when its client disconnects;
nothing is logged per request. `/healthz` says that the process runs, `/readyz` that every pool can serve
(and its tokenizer is loaded).
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import orjson
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_exceptions import ContentEncodingError
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import StreamReader
from aiohttp.web_protocol import RequestHandler

from gateway import errors
from gateway.api.accept import check_site, request_id_of
from gateway.api.body import Kind
from gateway.api.exchange import Exchange
from gateway.api.services import Services
from gateway.errors import ApiError
from gateway.identity import identify

_log = logging.getLogger(__name__)

_COMPLETIONS: dict[str, Kind] = {
    "/v1/chat/completions": "chat",
    "/chat/completions": "chat",
    "/v1/completions": "completion",
    "/completions": "completion",
}
_MODEL_LISTS = ("/v1/models", "/models")
_HEALTH = ("/healthz", "/health")


class _Connection(RequestHandler):
    """aiohttp's protocol, with its own errors in OpenAI's shape and nothing of a request in the log."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what could not be parsed as HTTP (400; 415 for an unknown encoding of a body), or an
        exception that got past a handler (500).
        """
        if isinstance(exc, ContentEncodingError):
            error = errors.unsupported_encoding()
        elif status < 500:
            error = ApiError(status, "The request is not valid HTTP.", code="invalid_http")
        else:
            _log.error("a handler failed with %s", type(exc).__name__)
            error = errors.internal()
        response = _error(error, request_id_of({}))
        response.force_close()
        return response


class _Server(web.Server):
    def __call__(self) -> RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


class DataPlane:
    """Serves one gateway's clients."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._server: web.Server | None = None
        self._listener: asyncio.Server | None = None

    @property
    def port(self) -> int:
        """The port that is listened on (of use where 0 was asked for)."""
        assert self._listener is not None
        return int(self._listener.sockets[0].getsockname()[1])

    async def start(self) -> None:
        """Begin to listen; raises OSError when the address cannot be had."""
        config = self._services.config
        self._server = _Server(
            self.handle,
            request_factory=self._make_request,
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=config.client_keepalive_s,
            lingering_time=1.0,
            max_field_size=16 * 1024,
        )
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(self._server, config.host, config.port, backlog=1024)

    async def stop(self, timeout_s: float) -> None:
        """Refuse new requests, let running ones finish for up to `timeout_s`, then close."""
        services = self._services
        services.draining = True
        if self._listener is not None:
            self._listener.close()
        if services.running:
            await asyncio.wait(tuple(services.running), timeout=timeout_s)
        if self._server is not None:
            await self._server.shutdown(0.5)
        if self._listener is not None:
            await self._listener.wait_closed()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request."""
        path = request.rel_url.raw_path
        kind = _COMPLETIONS.get(path)
        if kind is not None and request.method == "POST":
            running = self._services.running
            task = asyncio.current_task()
            assert task is not None
            running.add(task)
            try:
                return await Exchange(self._services, request, kind).run()
            finally:
                running.discard(task)
        try:
            return self._small(request, path)
        except ApiError as error:
            return _error(error, request_id_of(request.headers))

    def _small(self, request: web.BaseRequest, path: str) -> web.Response:
        if path in _COMPLETIONS:
            raise errors.wrong_method(request.method, "POST")
        known = path in _HEALTH or path == "/readyz" or path.startswith(_MODEL_LISTS)
        if known and request.method not in ("GET", "HEAD"):
            raise errors.wrong_method(request.method, "GET")
        if path in _HEALTH:
            return _json({"status": "ok"})
        if path == "/readyz":
            return self._ready()
        if known:
            return self._models(request, path)
        raise errors.unknown_path(path)

    def _ready(self) -> web.Response:
        services = self._services
        pools = {
            name: {
                "ready": len(pool.ready()),
                "replicas": len(pool.replicas),
                "prompts": services.texts[name].form if name in services.texts else "unknown",
            }
            for name, pool in services.pools.items()
        }
        unread = [
            name
            for name, pool in services.pools.items()
            if name not in services.texts and any(r.dialect == "bundled" for r in pool.replicas.values())
        ]
        ready = all(pool["ready"] for pool in pools.values()) and not unread and not services.draining
        status = "ready" if ready else "draining" if services.draining else "starting"
        return _json({"status": status, "pools": pools}, 200 if ready else 503)

    def _models(self, request: web.BaseRequest, path: str) -> web.Response:
        policy = self._services.policy
        if identify(policy, request.headers) is None:
            check_site(request.headers, self._services.config.host)
        names = {pool.model: pool.name for pool in policy.pools.values()}
        names |= {
            alias: names[model] for alias, model in policy.models.items() if alias != "*" and model in names
        }
        listed = path.rstrip("/")
        if listed in _MODEL_LISTS:
            return _json({"object": "list", "data": [_model(name) for name in names]})
        prefix = next(prefix for prefix in _MODEL_LISTS if path.startswith(prefix))
        name = request.rel_url.path[len(prefix) :]
        if not name.startswith("/"):
            raise errors.unknown_path(path)
        if name[1:] not in names:
            raise errors.model_not_found(name[1:])
        return _json(_model(name[1:]))

    def _make_request(
        self,
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: RequestHandler,
        writer: AbstractStreamWriter,
        task: asyncio.Task[None],
    ) -> web.BaseRequest:
        services = self._services
        limit = min(services.config.max_body_bytes, services.policy.limits.body_bytes)
        loop = asyncio.get_running_loop()
        return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=limit)


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "warmfront"}


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(status=status, body=orjson.dumps(value), headers={"Content-Type": "application/json"})


def _error(error: ApiError, request_id: str) -> web.Response:
    headers = {**error.headers, "Content-Type": "application/json", "x-request-id": request_id}
    return web.Response(status=error.status, body=error.body(request_id), headers=headers)
