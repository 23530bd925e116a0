"""Framing of server-sent events on bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.upstream.sse import (
    EventSplitter,
    EventTooLarge,
    encode_event,
    event_data,
    is_done,
    parse_object,
)

STREAM = (
    b'data: {"a":1}\n\n'
    b": ping\n\n"
    b"event: x\r\ndata: one\r\ndata: two\r\n\r\n"
    b"data: \xe2\x98\x82\xe6\xbc\xa2\r\n\n"
    b"data: a\rb\x0c\xc2\x85\xe2\x80\xa8c\n\n"
    b"data: [DONE]\n\n"
)
EVENTS = [
    b'data: {"a":1}\n\n',
    b": ping\n\n",
    b"event: x\r\ndata: one\r\ndata: two\r\n\r\n",
    b"data: \xe2\x98\x82\xe6\xbc\xa2\r\n\n",
    b"data: a\rb\x0c\xc2\x85\xe2\x80\xa8c\n\n",
    b"data: [DONE]\n\n",
]


def split(pieces: list[bytes]) -> list[bytes]:
    splitter = EventSplitter()
    return [event for piece in pieces for event in splitter.feed(piece)]


def test_whole_stream() -> None:
    assert split([STREAM]) == EVENTS


def test_one_byte_at_a_time() -> None:
    assert split([STREAM[i : i + 1] for i in range(len(STREAM))]) == EVENTS


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_any_cut_gives_the_same_events(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    assert split([STREAM[a:b] for a, b in zip(edges, edges[1:], strict=False)]) == EVENTS


@given(st.binary(max_size=200).map(lambda b: b.replace(b"x", b"\n").replace(b"y", b"\r\n")))
def test_joining_gives_what_was_fed(data: bytes) -> None:
    splitter = EventSplitter()
    events = splitter.feed(data[: len(data) // 2]) + splitter.feed(data[len(data) // 2 :])
    assert b"".join(events) + splitter.tail == data


def test_an_unfinished_event_is_bounded() -> None:
    splitter = EventSplitter(limit=100)
    splitter.feed(b"data: " + b"x" * 90)
    with pytest.raises(EventTooLarge):
        splitter.feed(b"x" * 10)


@pytest.mark.parametrize(
    ("event", "data"),
    [
        (b"data: x\n\n", b"x"),
        (b"data:x\n\n", b"x"),
        (b"data:  x\n\n", b" x"),
        (b"data: one\ndata: two\n\n", b"one\ntwo"),
        (b"event: e\r\ndata: one\r\n\r\n", b"one"),
        (b"data\n\n", b""),
        (b": ping\n\n", None),
        (b"retry: 3\n\n", None),
    ],
)
def test_event_data(event: bytes, data: bytes | None) -> None:
    assert event_data(event) == data


def test_small_readers() -> None:
    assert is_done(b"[DONE]") and is_done(b" [DONE] ") and not is_done(b"[DONE]x")
    assert parse_object(b'{"a":1}') == {"a": 1}
    assert parse_object(b"[1]") is None
    assert parse_object(b"{") is None
    assert encode_event({"a": 1}) == b'data: {"a":1}\n\n'
