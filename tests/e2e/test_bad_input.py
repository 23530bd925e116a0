"""Whatever a request says: the error shape, the status, the field's name, and every replica serving on."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.e2e.conftest import MODEL, Stack

HELLO = [{"role": "user", "content": "Hello"}]
CHAT = "/v1/chat/completions"


def post(stack: Stack, path: str, body: Any, key: str | None = "key-acme") -> tuple[int, Any]:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection = http.client.HTTPConnection(urlsplit(stack.base_url).netloc, timeout=60)
    headers = {"Content-Type": "application/json"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    try:
        connection.request("POST", path, raw, headers)
        response = connection.getresponse()
        text = response.read()
    finally:
        connection.close()
    assert response.getheader("Content-Type", "").startswith("application/json"), text[:200]
    return response.status, json.loads(text)


BAD: list[tuple[str, Any, int, str | None, str | None]] = [
    ("malformed JSON", b'{"model": ', 400, None, None),
    ("not an object", b"[1, 2]", 400, None, None),
    ("empty body", b"", 400, None, None),
    ("deep nesting", b"[" * 100_000, 400, None, None),
    ("not UTF-8", b'{"model": "\xff\xfe"}', 400, None, None),
    ("no model", {"messages": HELLO}, 400, "model", None),
    ("model of a wrong type", {"model": 7, "messages": HELLO}, 400, "model", None),
    ("unknown model", {"model": "no-such-model", "messages": HELLO}, 404, "model", "model_not_found"),
    ("no messages", {"model": MODEL}, 400, "messages", None),
    ("empty messages", {"model": MODEL, "messages": []}, 400, "messages", None),
    ("messages of a wrong type", {"model": MODEL, "messages": "Hello"}, 400, "messages", None),
    ("message without a role", {"model": MODEL, "messages": [{"content": "x"}]}, 400, "messages", None),
    ("unknown role", {"model": MODEL, "messages": [{"role": "king", "content": "x"}]}, 400, "messages", None),
    (
        "content of a wrong type",
        {"model": MODEL, "messages": [{"role": "user", "content": 3}]},
        400,
        "messages",
        None,
    ),
    ("negative max_tokens", {"model": MODEL, "messages": HELLO, "max_tokens": -1}, 400, "max_tokens", None),
    (
        "temperature as text",
        {"model": MODEL, "messages": HELLO, "temperature": "hot"},
        400,
        "temperature",
        None,
    ),
    ("top_p out of range", {"model": MODEL, "messages": HELLO, "top_p": 7}, 400, "top_p", None),
    ("n of zero", {"model": MODEL, "messages": HELLO, "n": 0, "stream": True}, 400, "n", None),
    ("five stops", {"model": MODEL, "messages": HELLO, "stop": list("abcde")}, 400, "stop", None),
    (
        "logit_bias off the end",
        {"model": MODEL, "messages": HELLO, "logit_bias": {"99999999": 5}},
        400,
        "logit_bias",
        None,
    ),
    (
        "stream_options without stream",
        {"model": MODEL, "messages": HELLO, "stream_options": {"include_usage": True}},
        400,
        "stream_options",
        None,
    ),
    (
        "prompt beyond the context",
        {"model": MODEL, "messages": [{"role": "user", "content": "word " * 9000}]},
        400,
        "messages",
        "context_length_exceeded",
    ),
]


@pytest.mark.parametrize(("name", "body", "status", "param", "code"), BAD, ids=[case[0] for case in BAD])
def test_bad_chat_request(
    stack: Stack, name: str, body: Any, status: int, param: str | None, code: str | None
) -> None:
    answered, answer = post(stack, CHAT, body)
    error = answer["error"]
    assert answered == status, error
    assert set(error) >= {"message", "type", "param", "code"} and error["message"]
    if param is not None:
        assert (error["param"] or "").split("[")[0].split(".")[0] == param, error
    if code is not None:
        assert error["code"] == code
    assert "Traceback" not in json.dumps(answer)


@pytest.mark.parametrize("key", [None, "wrong", ""])
def test_unknown_key_is_401(stack: Stack, key: str | None) -> None:
    status, answer = post(stack, CHAT, {"model": MODEL, "messages": HELLO}, key)
    assert status == 401 and answer["error"]["code"] == "invalid_api_key"


def test_a_body_over_the_limit_is_413(stack: Stack) -> None:
    body = b'{"model": "m", "messages": [{"role": "user", "content": "' + b"x" * (33 << 20) + b'"}]}'
    try:
        status, answer = post(stack, CHAT, body)
    except (BrokenPipeError, ConnectionResetError):
        pytest.fail("the connection was cut before the answer could be read")
    assert status == 413 and answer["error"]["message"]


@pytest.mark.parametrize("prompt", [[-1], [999_999_999], [[1, 2], [-5]]])
def test_token_ids_out_of_the_vocabulary(stack: Stack, prompt: Any) -> None:
    status, answer = post(stack, "/v1/completions", {"model": MODEL, "prompt": prompt, "max_tokens": 1})
    assert status == 400 and answer["error"]["param"] == "prompt"


def test_every_replica_serves_on(stack: Stack) -> None:
    import urllib.request

    with urllib.request.urlopen(stack.admin_url + "/admin/state", timeout=10) as response:
        replicas = json.load(response)["replicas"]
    assert [replica["state"] for replica in replicas] == ["ready", "ready"]
    status, answer = post(stack, CHAT, {"model": MODEL, "messages": HELLO, "max_tokens": 2})
    assert status == 200 and answer["choices"][0]["finish_reason"] in ("length", "stop")
