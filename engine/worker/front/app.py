"""The aiohttp application: routes, request ids, errors in one shape.

Owns the middleware that every request passes. Always holds: each answer carries `x-request-id` (the
client's own where it sent a sane one); whatever goes wrong is answered in OpenAI's error shape without
internals.
"""

from __future__ import annotations

import logging
import re
import uuid

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from engine.worker.front.admin_api import AdminApi
from engine.worker.front.errors import ApiError
from engine.worker.front.openai_api import REQUEST_ID, OpenAiApi, json_response
from engine.worker.front.service import Service

log = logging.getLogger("engine.front")
_SANE_ID = re.compile(r"[\x21-\x7e]{1,128}")
_COUNTED = ("/chat/completions", "/completions", "/tokenize", "/detokenize")


def build_app(service: Service) -> web.Application:
    """The application; run it with `handler_cancellation=True`, so that a leaving client ends its handler."""
    app = web.Application(
        client_max_size=service.settings.max_body_bytes, middlewares=[_errors_in_one_shape(service)]
    )
    app.add_routes([*OpenAiApi(service).routes(), *AdminApi(service).routes()])
    return app


def _errors_in_one_shape(service: Service) -> Middleware:
    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("x-request-id", "")
        request_id = given if _SANE_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"
        REQUEST_ID.set(request_id)
        try:
            response = await handler(request)
        except ApiError as error:
            response = _refused(error, request_id)
        except web.HTTPException as error:
            response = _refused(_from_http(error, request), request_id)
            if "Allow" in error.headers:
                response.headers["Allow"] = error.headers["Allow"]
        except ConnectionResetError:
            raise
        except Exception:
            log.exception("request %s failed", request_id)
            response = _refused(ApiError(500, "Internal error.", code="internal_error"), request_id)
        if not response.prepared:
            response.headers["x-request-id"] = request_id
        endpoint = request.path.removeprefix("/v1")
        service.metrics.request_done(endpoint if endpoint in _COUNTED else "other", response.status)
        return response

    return middleware


def _refused(error: ApiError, request_id: str) -> web.Response:
    response = json_response(error.body(request_id), status=error.status)
    if error.status in (429, 503):
        response.headers["Retry-After"] = "1"
    return response


def _from_http(error: web.HTTPException, request: web.Request) -> ApiError:
    if error.status == 404:
        return ApiError(404, f"Unknown URL: {request.method} {request.path[:200]}", code="unknown_url")
    if error.status == 405:
        return ApiError(405, f"{request.method} is not allowed here.", code="method_not_allowed")
    return ApiError(error.status, error.reason, code="http_error")
