"""Errors a client can meet, in OpenAI's shape.

Owns the one exception type that request handling raises on purpose (`ApiError`) and the constructors of
every answer the gateway gives by itself. Always holds: a body is `{"error": {"message", "type", "param",
"code"}}`, the status is the one OpenAI uses for that fault, and no message carries a key, a prompt, an
upstream address or a traceback.
"""

from __future__ import annotations

from collections.abc import Mapping

import orjson


class ApiError(Exception):
    """A refusal or failure with its HTTP status; raised anywhere on the request path before the first
    byte.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type_: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type_
        self.param = param
        self.code = code
        self.headers: dict[str, str] = dict(headers or {})

    def body(self, request_id: str | None = None) -> bytes:
        """The JSON body; `request_id` is added beside the standard fields when known."""
        return error_body(self.message, self.type, self.param, self.code, request_id)

    def event(self, request_id: str | None = None) -> bytes:
        """The same error as one server-sent event, for a stream that has already begun."""
        return b"data: " + self.body(request_id) + b"\n\n"


def error_body(
    message: str, type_: str, param: str | None, code: str | None, request_id: str | None = None
) -> bytes:
    """OpenAI's error object as JSON bytes."""
    error: dict[str, object] = {"message": message, "type": type_, "param": param, "code": code}
    if request_id is not None:
        error["request_id"] = request_id
    return orjson.dumps({"error": error})


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request itself is wrong; `param` names the field."""
    return ApiError(400, message, param=param, code=code)


def malformed_json(detail: str) -> ApiError:
    """400: the body is not JSON; `detail` says where (line and column), never what it held."""
    return ApiError(400, f"The request body is not valid JSON: {detail}.", code="invalid_json")


def body_too_large(limit: int) -> ApiError:
    """413; the connection is closed, so that the rest of the body need not be read."""
    message = f"The request body is larger than this server accepts ({limit} bytes)."
    return ApiError(413, message, code="request_too_large", headers={"Connection": "close"})


def body_timeout() -> ApiError:
    """408: the client began a body and did not finish it in time."""
    message = "The request body did not arrive in time."
    return ApiError(408, message, code="request_timeout", headers={"Connection": "close"})


def unsupported_media(content_type: str) -> ApiError:
    """415: only JSON bodies are understood."""
    shown = content_type if content_type.isascii() and len(content_type) <= 80 else "this content type"
    return ApiError(415, f"Send the body as application/json, not {shown}.", code="unsupported_media_type")


def unsupported_encoding() -> ApiError:
    """415: the body is compressed in a way that is not understood."""
    message = "Send the body uncompressed, or with Content-Encoding gzip or deflate."
    return ApiError(415, message, code="unsupported_content_encoding", headers={"Connection": "close"})


def foreign_site() -> ApiError:
    """403 where no key is asked for: what a page of another site may have sent."""
    return ApiError(
        403,
        "Without API keys this server answers only requests for a loopback host, and only pages of one.",
        code="foreign_origin",
    )


def invalid_api_key() -> ApiError:
    """401, the same words for a missing, malformed, unknown and expired key; the key is never echoed."""
    return ApiError(
        401,
        "Incorrect or missing API key. Send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'.",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def model_not_found(model: str) -> ApiError:
    """404 for a model that no route of this tenant serves."""
    shown = model if len(model) <= 200 else model[:200] + "..."
    return ApiError(
        404,
        f"The model '{shown}' does not exist or you do not have access to it.",
        param="model",
        code="model_not_found",
    )


def no_route() -> ApiError:
    """403: a known tenant, but no rule of the policy lets this request through."""
    return ApiError(403, "No route of the policy matches this request.", code="no_route")


def unknown_path(path: str) -> ApiError:
    """404 for a path this server does not serve."""
    shown = path if len(path) <= 120 else path[:120] + "..."
    return ApiError(404, f"Unknown path '{shown}'.", code="unknown_url")


def wrong_method(method: str, allowed: str) -> ApiError:
    """405 with the Allow header."""
    message = f"Use {allowed} here, not {method}."
    return ApiError(405, message, code="method_not_allowed", headers={"Allow": allowed})


def context_length_exceeded(prompt_tokens: int | None, limit: int, param: str = "messages") -> ApiError:
    """400 for a prompt that can never fit; OpenAI's own code, which clients test for. `param` holds the
    prompt; `prompt_tokens` None: so long that nobody counted.
    """
    count = f"more than {limit}" if prompt_tokens is None else str(prompt_tokens)
    return ApiError(
        400,
        f"This model's maximum context length is {limit} tokens, but the prompt has {count} tokens. "
        f"Shorten the {param}.",
        param=param,
        code="context_length_exceeded",
    )


def queue_full(class_name: str, retry_after_s: int) -> ApiError:
    """503: the class's queue holds as many requests as the policy lets wait."""
    return _overloaded(f"Too many '{class_name}' requests are waiting.", "queue_full", retry_after_s)


def queue_timeout(class_name: str, waited_s: float, retry_after_s: int) -> ApiError:
    """503: waited for a slot as long as the policy lets a request of its class wait."""
    message = f"No capacity for this '{class_name}' request within {waited_s:g} s."
    return _overloaded(message, "queue_timeout", retry_after_s)


def no_replica(retry_after_s: int = 2) -> ApiError:
    """503: no replica of the pool is ready."""
    return _overloaded("No replica is ready to serve this model.", "no_replica", retry_after_s)


def draining(retry_after_s: int = 5) -> ApiError:
    """503: the process is shutting down and takes no new work."""
    return _overloaded("The server is shutting down.", "draining", retry_after_s)


def upstream_failed(message: str, *, status: int = 502, code: str = "upstream_error") -> ApiError:
    """502-class: every replica tried failed before anything was streamed, or one broke mid-stream."""
    return ApiError(status, message, type_="server_error", code=code)


def internal() -> ApiError:
    """500 that says nothing of what went wrong inside; the ledger has the request id."""
    return ApiError(500, "The gateway failed to process this request.", type_="server_error", code="internal")


def _overloaded(message: str, code: str, retry_after_s: int) -> ApiError:
    headers = {"Retry-After": str(max(1, retry_after_s))}
    return ApiError(503, message, type_="overloaded_error", code=code, headers=headers)
