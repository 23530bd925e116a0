"""What is added to an upstream's body, byte for byte, and what is read from its answer."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.upstream.dialects import (
    DIALECTS,
    Outgoing,
    Usage,
    refuses_priority,
    upstream_body,
    upstream_headers,
)
from gateway.upstream.json_splice import member_span, remove_member, set_member


def outgoing(raw: bytes, **changes: Any) -> Outgoing:
    fields: dict[str, Any] = {
        "raw": raw,
        "body": orjson.loads(raw),
        "stream": False,
        "asked_usage": False,
        "tokens": None,
        "seed": b"\x01" * 16,
        "priority": 1,
        "deadline_ms": None,
        "request_id": "r1",
    }
    return Outgoing(**{**fields, **changes})


RAW = b'{ "model" : "m", "top_p": 0, "temperature":0.0,\n "x": {"model": "inner"}, "messages": [] }'


OWNED = b'{"priority":-9,"cache_salt":"theirs","warmfront":{"seed":"ff"},"kv_transfer_params":{"host":"h"},'
OWNED += b'"api_base":"http://evil","vllm_xargs":{"kv_transfer_params":"x","a":1},"zz":[1.50],"model":"m"}'


def test_nothing_to_change_changes_no_byte() -> None:
    assert upstream_body(DIALECTS["openai"], outgoing(RAW), "m") == RAW


def test_vllm_gets_the_gateways_priority_and_salt() -> None:
    sent = upstream_body(DIALECTS["vllm"], outgoing(RAW), "m")
    assert sent.startswith(RAW[: RAW.rindex(b"}")])
    assert orjson.loads(sent) == {**orjson.loads(RAW), "priority": 1, "cache_salt": "01" * 16}
    sent = upstream_body(DIALECTS["vllm"], outgoing(OWNED), "m")
    assert orjson.loads(sent) == {
        "priority": 1,
        "cache_salt": "01" * 16,
        "vllm_xargs": {"a": 1},
        "zz": [1.5],
        "model": "m",
    }
    assert b'"zz":[1.50]' in sent


def test_vllm_without_priority_scheduling_gets_no_priority() -> None:
    for raw in (RAW, OWNED):
        assert "priority" not in orjson.loads(
            upstream_body(DIALECTS["vllm"], outgoing(raw, ordered=False), "m")
        )
    message = "Got priority 2 but Priority scheduling is not enabled."
    assert refuses_priority(DIALECTS["vllm"], 400, message)
    assert not refuses_priority(DIALECTS["openai"], 400, message)
    assert not refuses_priority(DIALECTS["vllm"], 500, message)
    assert not refuses_priority(DIALECTS["vllm"], 400, "'n' must be positive")


def test_openai_loses_the_extension_and_no_other_field() -> None:
    sent = upstream_body(DIALECTS["openai"], outgoing(OWNED), "m")
    assert sent == OWNED.replace(b'"warmfront":{"seed":"ff"},', b"")


def test_zero_values_pass_as_given() -> None:  # public report A31
    raw = b'{"model":"alias","temperature":0,"top_p":0,"seed":0,"presence_penalty":0,"messages":[]}'
    sent = upstream_body(DIALECTS["openai"], outgoing(raw, stream=True), "m")
    body = orjson.loads(sent)
    assert (body["temperature"], body["top_p"], body["seed"], body["presence_penalty"]) == (0, 0, 0, 0)
    assert sent.startswith(b'{"model":"m","temperature":0,"top_p":0,"seed":0,"presence_penalty":0,')


def test_the_default_output_cap_is_told_to_bundled_replicas_only() -> None:
    for raw in (b'{"messages":[]}', b'{"max_tokens":null,"messages":[]}'):
        sent = upstream_body(DIALECTS["bundled"], outgoing(raw, output_cap=8), "")
        assert orjson.loads(sent)["max_tokens"] == 8
        assert upstream_body(DIALECTS["openai"], outgoing(raw, output_cap=8), "") == raw


def test_an_alias_is_replaced_at_the_top_level_only() -> None:
    sent = upstream_body(DIALECTS["openai"], outgoing(RAW), "served")
    assert sent == RAW.replace(b'"model" : "m"', b'"model" : "served"')


def test_usage_is_asked_for_when_streaming() -> None:
    sent = upstream_body(DIALECTS["openai"], outgoing(b'{"model":"m"}', stream=True), "m")
    assert sent == b'{"model":"m","stream_options":{"include_usage":true}}'


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        (b"null", {"include_usage": True}),
        (b"{}", {"include_usage": True}),
        (b'{"include_usage":false,"other":[1,{"a":"}"}]}', {"include_usage": True, "other": [1, {"a": "}"}]}),
    ],
)
def test_usage_merges_into_the_clients_options(given_: bytes, expected: dict[str, Any]) -> None:
    raw = b'{"stream_options" :' + given_ + b' , "model":"m"}'
    sent = upstream_body(DIALECTS["openai"], outgoing(raw, stream=True), "m")
    assert orjson.loads(sent)["stream_options"] == expected
    assert sent.endswith(b' , "model":"m"}')


def test_usage_the_client_asked_for_needs_no_change() -> None:
    raw = b'{"model":"m","stream_options":{"include_usage":true}}'
    assert upstream_body(DIALECTS["openai"], outgoing(raw, stream=True, asked_usage=True), "m") == raw


def test_the_bundled_engine_gets_token_ids() -> None:
    tokens = b"".join(token.to_bytes(4, "little") for token in (5, 70000, 1))
    sent = upstream_body(DIALECTS["bundled"], outgoing(RAW, tokens=tokens), "m")
    extension = orjson.loads(sent)["warmfront"]
    assert extension == {
        "seed": "01" * 16,
        "priority": 1,
        "deadline_ms": None,
        "request_id": "r1",
        "token_ids": [5, 70000, 1],
    }
    assert sent.startswith(RAW[: RAW.rindex(b"}")])


def test_a_client_cannot_set_the_extension_itself() -> None:
    raw = b'{"warmfront":{"priority":0,"seed":"ff"},"model":"m"}'
    body = orjson.loads(upstream_body(DIALECTS["bundled"], outgoing(raw), "m"))
    assert body["warmfront"]["priority"] == 1
    assert body["warmfront"]["seed"] == "01" * 16
    assert "token_ids" not in body["warmfront"]


def test_headers_carry_the_replicas_key_only() -> None:
    lines = upstream_headers("secret", "r1", "00-" + "a" * 32 + "-" + "b" * 16 + "-01").decode()
    assert "Authorization: Bearer secret\r\n" in lines
    assert "X-Request-Id: r1\r\n" in lines
    assert "Accept-Encoding: identity\r\n" in lines
    assert "Traceparent: 00-aaaa" in lines
    assert "Authorization" not in upstream_headers(None, "r1", None).decode()


def test_usage_with_timings() -> None:
    answer = {
        "usage": {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 8}},
        "warmfront": {
            "timings": {"queue_s": 0.1, "prefill_s": 0, "first_sample_s": 0.2},
            "prefill_tokens": 1,
        },
    }
    assert Usage.read(answer) == Usage(9, 2, 8, 0.1, 0.0, 0.2, 1)


@pytest.mark.parametrize("usage", [None, [], "x"])
def test_no_usage(usage: Any) -> None:
    assert Usage.read({"usage": usage}) is None


def test_odd_usage_counts_as_zero() -> None:
    odd = {"prompt_tokens": "9", "completion_tokens": -1, "prompt_tokens_details": None}
    assert Usage.read({"usage": odd, "warmfront": {"timings": 3}}) == Usage(0, 0, 0)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=6), JSON, max_size=5), st.text(max_size=6), JSON, st.booleans())
def test_set_member_sets_that_member_alone(
    body: dict[str, Any], key: str, value: Any, indented: bool
) -> None:
    raw = orjson.dumps(body, option=orjson.OPT_INDENT_2 if indented else 0)
    changed = set_member(raw, key, orjson.dumps(value), present=key in body)
    assert orjson.loads(changed) == {**body, key: value}
    span = member_span(raw, key)
    assert (span is not None) == (key in body)
    if span is not None:
        assert orjson.loads(raw[span[0] : span[1]]) == body[key]
        assert changed.startswith(raw[: span[0]]) and changed.endswith(raw[span[1] :])


def test_the_last_of_repeated_keys_counts_and_escapes_are_seen() -> None:
    raw = b'{"a":1,"\\u0061":{"x":"\\"}"}}'
    assert set_member(raw, "a", b"3", present=True) == b'{"a":1,"\\u0061":3}'


@given(st.dictionaries(st.text(max_size=6), JSON, max_size=5), st.text(max_size=6), JSON, st.booleans())
def test_remove_member_removes_that_member_alone(
    body: dict[str, Any], key: str, value: Any, indented: bool
) -> None:
    raw = orjson.dumps({**body, key: value}, option=orjson.OPT_INDENT_2 if indented else 0)
    rest = {name: item for name, item in body.items() if name != key}
    assert orjson.loads(remove_member(raw, key)) == rest
    assert remove_member(orjson.dumps(rest), key) == orjson.dumps(rest)


@pytest.mark.parametrize(
    ("raw", "left"),
    [
        (b'{"a":1}', b"{}"),
        (b'{"a":1,"a":2}', b"{}"),
        (b'{ "a" : 1 , "b":{"a":2}, "\\u0061" : [",a"] }', b'{  "b":{"a":2}}'),
        (b'{"b":1.0,"a":1,"c":2}', b'{"b":1.0,"c":2}'),
    ],
)
def test_every_occurrence_is_removed(raw: bytes, left: bytes) -> None:
    assert remove_member(raw, "a") == left
