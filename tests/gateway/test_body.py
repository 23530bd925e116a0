"""The request body as the gateway reads it."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from gateway.api.body import parse_body
from gateway.errors import ApiError

OK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def chat(**changes: Any) -> bytes:
    return orjson.dumps({**OK, **changes})


def test_defaults() -> None:
    parsed = parse_body("chat", chat())
    assert (parsed.model, parsed.stream, parsed.include_usage) == ("m", False, False)
    assert (parsed.max_tokens, parsed.choices) == (None, 1)
    assert parsed.messages == OK["messages"] and parsed.raw == chat()


def test_null_means_absent() -> None:
    nothing = dict.fromkeys(("stream", "stream_options", "n", "max_tokens", "tools", "temperature", "stop"))
    parsed = parse_body("chat", chat(**nothing))
    assert not parsed.stream and parsed.choices == 1


def test_values() -> None:
    parsed = parse_body(
        "chat",
        chat(
            stream=True, stream_options={"include_usage": True}, n=3, max_tokens=50, max_completion_tokens=5
        ),
    )
    assert parsed.stream and parsed.include_usage
    assert (parsed.max_tokens, parsed.choices) == (5, 3)
    assert parse_body("chat", chat(max_tokens=0)).max_tokens == 0
    whole = parse_body("chat", chat(max_tokens=16.0, n=2.0))
    assert (whole.max_tokens, whole.choices) == (16, 2)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"model": None}, "model"),
        ({"model": ""}, "model"),
        ({"model": 3}, "model"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"stream": "yes"}, "stream"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream": True, "stream_options": []}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"n": 0}, "n"),
        ({"n": 0, "stream": True}, "n"),
        ({"n": True}, "n"),
        ({"n": 1.5}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_completion_tokens": "9"}, "max_completion_tokens"),
        ({"tools": {}}, "tools"),
        ({"tools": ["x"]}, "tools"),
        ({"messages": [{"role": "assistant", "tool_calls": {}}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": ["x"]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": 3}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "name": ["x"]}]}, "messages[0].name"),
        ({"cache_salt": 3}, "cache_salt"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
    ],
)
def test_wrong_fields_are_named(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        parse_body("chat", chat(**changes))
    assert refused.value.status == 400
    assert refused.value.param == param


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"null",
        b'{"model": NaN}',
        b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b"\xff\xfe",
        b"[" * 5000,
        b'{"a":' * 5000 + b"1" + b"}" * 5000,
    ],
)
def test_what_is_no_json_object(raw: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        parse_body("chat", raw)
    assert refused.value.status == 400


def test_malformed_json_says_where() -> None:
    with pytest.raises(ApiError) as refused:
        parse_body("chat", b'{"model": "secret",\n "messages": [}')
    assert "line 2" in refused.value.message and "secret" not in refused.value.message


@pytest.mark.parametrize("content", [None, "", [{"type": "text", "text": "a"}], [{"type": "image_url"}]])
def test_contents_that_pass(content: Any) -> None:
    parse_body("chat", chat(messages=[{"role": "assistant", "content": content}]))
    parse_body("chat", chat(messages=[{"role": "assistant", "tool_calls": []}]))


@pytest.mark.parametrize("prompt", ["a", ["a", "b"], [1, 2], [[1], [2]]])
def test_prompts_that_pass(prompt: Any) -> None:
    assert parse_body("completion", orjson.dumps({"model": "m", "prompt": prompt})).messages == []


@pytest.mark.parametrize("prompt", [None, 3, [], ["a", 1], [1, "a"], [None], {"a": 1}])
def test_prompts_that_do_not(prompt: Any) -> None:
    with pytest.raises(ApiError) as refused:
        parse_body("completion", orjson.dumps({"model": "m", "prompt": prompt}))
    assert refused.value.param == "prompt"


def nested(levels: int) -> Any:
    value: Any = "x"
    for i in range(levels):
        value = [value] if i % 2 else {"a": value}
    return value


def deep(field: str, levels: int) -> bytes:
    """A chat body whose `field` holds `levels` levels of lists and objects."""
    if field == "messages":  # the list, a message, the list of parts, a part
        part = {"type": "x", "y": nested(levels - 4)}
        return chat(messages=[{"role": "user", "content": [part]}])
    if field == "tools":
        return chat(tools=[{"x": nested(levels - 2)}])
    return chat(**{field: nested(levels)})


@pytest.mark.parametrize("field", ["messages", "tools", "metadata", "anything"])
def test_what_is_nested_too_deeply_is_named(field: str) -> None:
    parse_body("chat", deep(field, 128))
    with pytest.raises(ApiError) as refused:
        parse_body("chat", deep(field, 129))
    assert (refused.value.status, refused.value.param) == (400, field)


def test_brackets_side_by_side_are_not_nesting() -> None:
    raw = chat(metadata=[[] for _ in range(500)], messages=[{"role": "user", "content": "[{" * 500}])
    assert parse_body("chat", raw).model == "m"


def test_a_cache_salt_is_read() -> None:
    assert parse_body("chat", chat()).cache_salt is None
    assert parse_body("chat", chat(cache_salt=None)).cache_salt is None
    assert parse_body("chat", chat(cache_salt="x" * 256)).cache_salt == "x" * 256
