"""Errors in OpenAI's shape."""

from __future__ import annotations

import orjson
import pytest

from gateway import errors
from gateway.errors import ApiError

ALL: list[tuple[ApiError, int, str | None, str | None]] = [
    (errors.invalid("x", "model"), 400, "model", None),
    (errors.malformed_json("at line 1"), 400, None, "invalid_json"),
    (errors.body_too_large(10), 413, None, "request_too_large"),
    (errors.body_timeout(), 408, None, "request_timeout"),
    (errors.unsupported_media("text/plain"), 415, None, "unsupported_media_type"),
    (errors.invalid_api_key(), 401, None, "invalid_api_key"),
    (errors.model_not_found("x"), 404, "model", "model_not_found"),
    (errors.no_route(), 403, None, "no_route"),
    (errors.unknown_path("/x"), 404, None, "unknown_url"),
    (errors.wrong_method("PUT", "POST"), 405, None, "method_not_allowed"),
    (errors.context_length_exceeded(9, 8), 400, "messages", "context_length_exceeded"),
    (errors.context_length_exceeded(9, 8, "prompt"), 400, "prompt", "context_length_exceeded"),
    (errors.queue_full("batch", 3), 503, None, "queue_full"),
    (errors.queue_timeout("batch", 1.5, 3), 503, None, "queue_timeout"),
    (errors.no_replica(), 503, None, "no_replica"),
    (errors.draining(), 503, None, "draining"),
    (errors.upstream_failed("x"), 502, None, "upstream_error"),
    (errors.internal(), 500, None, "internal"),
]


@pytest.mark.parametrize(("error", "status", "param", "code"), ALL)
def test_shape(error: ApiError, status: int, param: str | None, code: str | None) -> None:
    body = orjson.loads(error.body("req-1"))
    assert error.status == status
    assert set(body) == {"error"}
    assert body["error"]["message"]
    assert body["error"]["param"] == param
    assert body["error"]["code"] == code
    assert body["error"]["request_id"] == "req-1"
    expected = "server_error" if status in (500, 502) else "overloaded_error" if status == 503 else None
    assert body["error"]["type"] == (expected or "invalid_request_error")
    if status == 503:
        assert int(error.headers["Retry-After"]) >= 1


def test_long_and_odd_input_is_not_echoed_whole() -> None:
    assert len(errors.model_not_found("m" * 5000).message) < 300
    assert len(errors.unknown_path("/" * 5000).message) < 200
    assert "\u2028" not in errors.unsupported_media("text\u2028").message


def test_event_form() -> None:
    event = errors.internal().event("r")
    assert event.startswith(b'data: {"error":') and event.endswith(b"}\n\n")
