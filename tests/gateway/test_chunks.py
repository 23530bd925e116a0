"""What an event means and what of it is handed on."""

from __future__ import annotations

import pytest
from stub_upstream import DONE, delta, usage_event

from gateway.api.chunks import StreamReader, error_status


def reader(*, show_usage: bool = False, choices: int = 1) -> StreamReader:
    return StreamReader(show_usage=show_usage, choices=choices)


def test_plain_events_pass_as_they_are() -> None:
    events = [b": ping\n\n", delta("a"), delta("b"), delta(finish="stop"), DONE]
    r = reader()
    assert [r.take(event) for event in events] == events
    assert r.done and r.end == "done" and r.finishes == 1


def test_comments_are_no_data() -> None:
    r = reader()
    assert r.take(b": ping\n\n") == b": ping\n\n"
    assert not r.data and not r.content and r.end == "cut"


def test_a_role_only_chunk_is_no_first_token() -> None:
    r = reader()
    role = (
        b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
    )
    assert r.take(role) == role
    assert r.data and not r.content
    r.take(delta("a"))
    assert r.content


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}\n\n',
        b'data: {"choices":[{"delta":{"reasoning_content":"x"}}]}\n\n',
        b'data: {"choices":[{"text":"x"}]}\n\n',
        b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n',
        b"data: not json\n\n",
    ],
)
def test_first_tokens(event: bytes) -> None:
    r = reader()
    r.take(event)
    assert r.content


@pytest.mark.parametrize("show", [True, False])
def test_the_usage_chunk(show: bool) -> None:  # public report A07
    r = reader(show_usage=show)
    r.take(delta("a"))
    event = usage_event(26, 3, 7)
    assert r.take(event) == (event if show else b"")
    assert r.usage is not None
    assert (r.usage.prompt_tokens, r.usage.completion_tokens, r.usage.cached_tokens) == (26, 3, 7)


def test_usage_inside_a_content_chunk_is_taken_out() -> None:
    r = reader()
    r.take(delta("a"))
    out = r.take(delta("b", usage={"prompt_tokens": 1, "completion_tokens": 2}))
    assert b"usage" not in out and b'"content":"b"' in out
    assert r.usage is not None and r.usage.prompt_tokens == 1


@pytest.mark.parametrize("spaces", [b"", b" "])
def test_a_null_usage_is_shown_only_to_who_asked_for_usage(spaces: bytes) -> None:  # public report A05
    event = b'data: {"choices":[{"index":0,"delta":{"content":"b"}}],%b"usage":%bnull}\n\n' % (spaces, spaces)
    for first in (delta("a"), delta("a", usage=None)):
        asked, silent = reader(show_usage=True), reader()
        asked.take(first)
        silent.take(first)
        assert asked.take(event) is event
        assert silent.take(event) == b'data: {"choices":[{"index":0,"delta":{"content":"b"}}]}\n\n'
        assert asked.usage is None and silent.usage is None


def test_the_bundled_engines_extension_is_taken_out() -> None:
    extension = {"timings": {"queue_s": 0.1, "prefill_s": 0.2, "first_sample_s": 0.3}, "prefill_tokens": 4}
    r = reader(show_usage=True)
    r.take(delta("a"))
    out = r.take(usage_event(26, 3, warmfront=extension))
    assert b"warmfront" not in out and b'"prompt_tokens":26' in out
    assert r.usage is not None and r.usage.prefill_s == 0.2


def test_words_in_the_text_are_not_taken_for_fields() -> None:
    r = reader()
    r.take(delta("a"))
    for text in ('"usage"', ',"usage":null', '"error"', "[DONE]", '"finish_reason":"stop"', '"warmfront"'):
        event = delta(text)
        assert r.take(event) == event
    assert r.usage is None and r.error is None and not r.done and r.finishes == 0


def test_nothing_follows_done_or_an_error() -> None:
    r = reader()
    r.take(delta("a"))
    assert r.take(DONE) == DONE
    assert r.take(DONE) == b"" and r.take(delta("x")) == b""
    r = reader()
    r.take(delta("a"))
    error = b'data: {"error":{"message":"x"}}\n\n'
    assert r.take(error) == error
    assert r.take(DONE) == b"" and r.error == {"message": "x"}


def test_an_error_without_a_wrapper_is_an_error() -> None:  # public report B13, the form of older engines
    r = reader()
    r.take(b'data: {"object":"error","message":"too long","type":"BadRequestError","code":400}\n\n')
    assert r.error is not None and r.error["message"] == "too long" and error_status(r.error) == 400
    assert r.take(DONE) == b""


def test_choices_that_finish_in_one_event_count_each() -> None:
    r = reader(choices=2)
    r.take(delta("a"))
    both = b'{"index":0,"delta":{},"finish_reason":"stop"},{"index":1,"delta":{},"finish_reason":"length"}'
    r.take(b'data: {"choices":[' + both + b"]}\n\n")
    assert r.end == "finished"


def test_every_choice_must_finish() -> None:
    r = reader(choices=2)
    r.take(delta("a"))
    r.take(delta(finish="stop"))
    assert r.end == "cut"
    r.take(delta(finish="length"))
    assert r.end == "finished"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        ({"code": 400}, 400),
        ({"code": "429"}, 429),
        ({"code": 7}, 502),
        ({"type": "invalid_request_error"}, 400),
        ({"code": "overloaded"}, 502),
        ({}, 502),
    ],
)
def test_error_status(error: dict[str, object], status: int) -> None:
    assert error_status(error) == status
