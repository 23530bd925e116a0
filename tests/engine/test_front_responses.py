"""The bytes that clients see: chunks, bodies, usage, and where each appears."""

from __future__ import annotations

from typing import Any, Literal

import orjson

from engine.worker.front.generate import Usage
from engine.worker.front.output import Entry, Piece
from engine.worker.front.responses import DONE, Shape
from engine.worker.front.text_files import load_text_model

MODEL = load_text_model("")
USAGE = Usage(10, 3, 8, 2, 0.1, 0.2, 0.3)


def shape(kind: Literal["chat", "completions"] = "chat", **changes: Any) -> Shape:
    settings: dict[str, Any] = {
        "response_id": "id-1",
        "created": 7,
        "model": 'a "model"',
        "fingerprint": "fp",
        "table": MODEL,
        "wants_logprobs": False,
        "include_usage": False,
        "continuous_usage": False,
        "private": False,
        "echoed": ["", ""],
    }
    return Shape(kind, **{**settings, **changes})


def chunks(data: bytes) -> list[dict[str, Any]]:
    events = data.split(b"\n\n")
    assert events.pop() == b""
    return [orjson.loads(event.removeprefix(b"data: ")) for event in events]


def test_the_role_travels_with_the_first_content() -> None:
    form = shape()
    (first,) = chunks(form.events(0, Piece('a"b', (), None), None, None))
    assert first == {
        "id": "id-1",
        "object": "chat.completion.chunk",
        "created": 7,
        "model": 'a "model"',
        "system_fingerprint": "fp",
        "choices": [
            {
                "index": 0,
                "delta": {"role": "assistant", "content": 'a"b'},
                "logprobs": None,
                "finish_reason": None,
            }
        ],
    }
    (second,) = chunks(form.events(0, Piece("c", (), None), None, None))
    assert second["choices"][0]["delta"] == {"content": "c"}
    (other,) = chunks(form.events(1, Piece("d", (), None), None, None))
    assert other["choices"][0]["delta"]["role"] == "assistant"


def test_the_finish_has_its_own_chunk() -> None:
    form = shape()
    content, finish = chunks(form.events(1, Piece("a", (), "length"), None, None))
    assert content["choices"][0]["finish_reason"] is None
    assert finish["choices"] == [{"index": 1, "delta": {}, "logprobs": None, "finish_reason": "length"}]
    (alone,) = chunks(form.events(1, Piece("", (), "stop"), None, None))
    assert alone["choices"][0]["finish_reason"] == "stop"


def test_a_choice_without_text_still_has_its_role() -> None:
    role, finish = chunks(shape().events(0, Piece("", (), "stop"), None, None))
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert finish["choices"][0]["finish_reason"] == "stop"


def test_usage_is_in_chunks_only_when_asked_for() -> None:
    plain = shape()
    assert "usage" not in chunks(plain.events(0, Piece("a", (), None), None, USAGE))[0]
    assert plain.closing(USAGE) == DONE
    asked = shape(include_usage=True)
    assert chunks(asked.events(0, Piece("a", (), None), None, USAGE))[0]["usage"] is None
    closing = asked.closing(USAGE)
    assert closing.endswith(DONE)
    (last,) = chunks(closing.removesuffix(DONE))
    assert last["choices"] == []
    assert last["usage"] == USAGE.as_dict()
    assert "warmfront" not in last


def test_continuous_usage_is_in_every_chunk() -> None:
    form = shape(include_usage=True, continuous_usage=True)
    (chunk,) = chunks(form.events(0, Piece("a", (), None), None, USAGE))
    assert chunk["usage"]["completion_tokens"] == 3


def test_the_private_part_comes_with_the_usage() -> None:
    form = shape(private=True, include_usage=True)
    (last,) = chunks(form.closing(USAGE).removesuffix(DONE))
    expected = {"timings": {"queue_s": 0.1, "prefill_s": 0.2, "first_sample_s": 0.3}, "prefill_tokens": 2}
    assert last["warmfront"] == expected
    assert orjson.loads(form.body([[Piece("a", (), "stop")]], [None], USAGE))["warmfront"] == expected


def test_the_whole_chat_answer() -> None:
    body = orjson.loads(shape().body([[Piece("a", (), None), Piece("b", (), "stop")]], [None], USAGE))
    assert body["object"] == "chat.completion"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "ab", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert body["usage"]["total_tokens"] == 13


def test_chat_log_probabilities() -> None:
    token = MODEL.special_ids and 200
    form = shape(wants_logprobs=True)
    entry = Entry(token, -0.5, (), 0)
    (chunk,) = chunks(form.events(0, Piece("x", (entry,), None), None, None))
    (shown,) = chunk["choices"][0]["logprobs"]["content"]
    assert (shown["bytes"], shown["top_logprobs"]) == (list(MODEL.token_bytes(token)), [])


def test_echo_comes_first_and_shifts_offsets() -> None:
    form = shape("completions", wants_logprobs=True, echoed=["ab"])
    prompt = [Entry(200, None, (), 0), Entry(201, -1.0, (), 1)]
    (first,) = chunks(form.events(0, Piece("c", (Entry(202, -0.5, (), 0),), None), prompt, None))
    choice = first["choices"][0]
    assert choice["text"] == "abc"
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -0.5]
    (second,) = chunks(form.events(0, Piece("d", (Entry(203, -0.5, (), 1),), None), prompt, None))
    assert second["choices"][0]["text"] == "d"
    assert second["choices"][0]["logprobs"]["text_offset"] == [3]


def test_echo_in_the_whole_answer() -> None:
    form = shape("completions", echoed=["ab", "ab"])
    body = orjson.loads(form.body([[Piece("", (), "length")], [Piece("c", (), "stop")]], [None, None], USAGE))
    assert [choice["text"] for choice in body["choices"]] == ["ab", "abc"]
    assert body["object"] == "text_completion"
