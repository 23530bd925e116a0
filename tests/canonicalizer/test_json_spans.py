"""Where values stand in a JSON text."""

from __future__ import annotations

import pytest

from canonicalizer.json_spans import NotJson, element_spans, value_spans


def test_only_asked_paths_are_found() -> None:
    raw = b' { "a" : [ 1, {"b": "x\\"y"} ] , "c":true }'
    spans = value_spans(raw, [("a", 1, "b"), ("c",), ("d",)])
    assert {path: raw[slice(*span)] for path, span in spans.items()} == {
        ("a", 1, "b"): b'"x\\"y"',
        ("c",): b"true",
    }


def test_what_is_not_asked_may_be_nested_as_deep_as_it_likes() -> None:
    raw = b'{"deep":' + b"[" * 50_000 + b"]" * 50_000 + b',"a":"x"}'
    ((start, end),) = value_spans(raw, [("a",)]).values()
    assert raw[start:end] == b'"x"'


def test_elements() -> None:
    raw = b'[ 1 ,"a,b", {"x": [2]} ]'
    assert [raw[slice(*span)] for span in element_spans(raw, 0)] == [b"1", b'"a,b"', b'{"x": [2]}']


@pytest.mark.parametrize("raw", [b'{"a":', b'{"a":[1', b"{1}", b'{"a" 1}', b'{"a":"x'])
def test_what_is_no_json(raw: bytes) -> None:
    with pytest.raises(NotJson):
        value_spans(raw, [("a", 0)])
