"""Errors in OpenAI's shape.

Owns the one exception that a handler raises to refuse a request, and its body. Always holds: the body is
`{"error": {"message", "type", "param", "code"}}`, the message names the field, and it never holds prompt
text.
"""

from __future__ import annotations

from typing import Any

import orjson

_TYPES = {
    400: "invalid_request_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
}


class ApiError(Exception):
    """A refusal with its HTTP status. `param` is the field's name or JSON path, `code` OpenAI's code."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def body(self, request_id: str | None = None) -> dict[str, Any]:
        """The JSON body; `request_id` is repeated in it where known."""
        error: dict[str, Any] = {
            "message": self.message,
            "type": _TYPES.get(self.status, "server_error"),
            "param": self.param,
            "code": self.code,
        }
        if request_id is not None:
            error["request_id"] = request_id
        return {"error": error}

    def event(self, request_id: str | None = None) -> bytes:
        """The same body as one server-sent event, for a stream that has begun."""
        return b"data: " + orjson.dumps(self.body(request_id)) + b"\n\n"


def invalid(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """400 for a field whose value is wrong."""
    return ApiError(400, f"Invalid '{param}': {message}", param=param, code=code)


def unsupported(param: str, detail: str = "this engine does not support it.") -> ApiError:
    """400 for a known field that this engine can't honour."""
    return ApiError(
        400, f"Unsupported parameter '{param}': {detail}", param=param, code="unsupported_parameter"
    )


def too_long(prompt_tokens: int | None, limit: int, param: str) -> ApiError:
    """400 for a prompt that can never fit; both counts in tokens (None: so long that nobody counted)."""
    count = f"more than {limit}" if prompt_tokens is None else str(prompt_tokens)
    return ApiError(
        400,
        f"This model's maximum context length is {limit} tokens, one of them for output; "
        f"your prompt has {count} tokens. Please shorten it.",
        param=param,
        code="context_length_exceeded",
    )


def unavailable(message: str, code: str) -> ApiError:
    """503 while the engine starts or after it has failed."""
    return ApiError(503, message, code=code)
