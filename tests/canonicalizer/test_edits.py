"""Edits are spliced into the original bytes: only the named spans change, and every splice can be undone."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from canonicalizer.edits import (
    Edit,
    EditError,
    UnusualEscapes,
    apply_edits,
    apply_proved,
    edited_body,
    order_edit,
    undo,
)

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
scalar = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text
value = st.recursive(
    scalar, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4)
)


def strings_in(node: Any, path: tuple[str | int, ...] = ()) -> list[tuple[tuple[str | int, ...], str]]:
    if isinstance(node, str):
        return [(path, node)]
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [found for key, item in items for found in strings_in(item, (*path, key))]


@st.composite
def edited(draw: st.DrawFn) -> tuple[dict[str, Any], list[Edit]]:
    body = draw(st.dictionaries(text, value, min_size=1, max_size=4))
    edits: list[Edit] = []
    for path, content in strings_in(body)[:3]:
        if path[-1] == "tools":
            continue
        marks = sorted(draw(st.lists(st.integers(0, len(content)), min_size=0, max_size=4)))
        for start, end in zip(marks[::2], marks[1::2], strict=False):
            edits.append(Edit("r", path, start, end, content[start:end], draw(text)))
    return body, edits


@settings(max_examples=120, deadline=None)
@given(edited(), st.booleans(), st.sampled_from([None, 1, "\t"]))
def test_undo_restores_the_bytes(
    case: tuple[dict[str, Any], list[Edit]], ascii_only: bool, indent: Any
) -> None:
    body, edits = case
    raw = json.dumps(body, ensure_ascii=ascii_only, indent=indent).encode()
    try:
        out = apply_edits(raw, edits)
    except EditError as error:
        assert "how the body escapes" in str(error) or "escaped unusually" in str(error)
        return
    assert undo(edits, out) == raw
    assert json.loads(out) == edited_body(body, edits)


def test_only_the_edited_string_changes() -> None:
    raw = (
        b'{ "z":1.0e+2,\t"sig":"\\/\\u00e9" ,'
        b'"messages" :[{"content":"a\\nNow: 1\\u0022\\ud83d\\ude00!","role":"x"}], "z":2 }'
    )
    edit = Edit("r", ("messages", 0, "content"), 7, 8, "1", "[see context]")
    out = apply_edits(raw, [edit])
    assert out == raw.replace(b"Now: 1", b"Now: [see context]")
    assert undo([edit], out) == raw
    tail = Edit("r", ("messages", 0, "content"), 11, 11, "", '\n"é"')
    assert apply_edits(raw, [tail]) == raw.replace(b'!"', b'!\\n\\"\\u00e9\\""')


@pytest.mark.parametrize("digits", ["e9", "E9"])
def test_the_digits_of_escapes_stay_as_they_are(digits: str) -> None:
    raw = b'{"t":"Zo\\u00eb \\\\u00ee","u":"","v":"\\ud83d\\ude00"}'.replace(b"eb", digits.encode())
    raw = raw.replace(b"\\ud83d\\ude00", b"\\uD83D\\uDE00") if digits.isupper() else raw
    raw = raw.replace(b"u00ee", b"u00EE") if digits.isupper() else raw
    edits = [Edit("r", ("t",), 0, 3, "Zoé", "x"), Edit("r", ("u",), 0, 0, "", "\\u00ea \x1f é")]
    out = apply_proved(raw, edits)
    assert out == apply_edits(raw, edits)
    assert undo(edits, out) == raw
    assert json.loads(out) == edited_body(json.loads(raw), edits)
    assert (b"\\u001F" in out) == digits.isupper() and b"\\\\u00ea" in out
    assert json.loads(out)["u"] == "\\u00ea \x1f é"


def test_escaped_slashes_stay_escaped() -> None:
    raw = b'{"t":"04\\/05","u":""}'
    edits = [Edit("r", ("t",), 0, 5, "04/05", "x"), Edit("r", ("u",), 0, 0, "", "04/05")]
    assert apply_edits(raw, edits) == b'{"t":"x","u":"04\\/05"}'
    assert undo(edits, apply_edits(raw, edits)) == raw


def test_no_edit_returns_the_same_object() -> None:
    raw = b"not even JSON"
    assert apply_edits(raw, []) is raw
    assert undo([], raw) is raw
    body = {"a": 1}
    assert edited_body(body, []) is body


def test_the_last_of_repeated_keys_counts() -> None:
    raw = b'{"a":{"t":"xx"},"a":{"t":"yy"}}'
    assert apply_edits(raw, [Edit("r", ("a", "t"), 0, 1, "y", "")]) == b'{"a":{"t":"xx"},"a":{"t":"y"}}'
    gone = b'{"a":{"t":"xx"},"a":7}'
    with pytest.raises(EditError, match=r"no value at \$\.a\.t"):
        apply_edits(gone, [Edit("r", ("a", "t"), 0, 1, "x", "")])


def test_utf8_bodies_stay_utf8_and_escaped_ones_stay_escaped() -> None:
    edits = [Edit("r", ("t",), 0, 3, "Zoë", "x"), Edit("r", ("u",), 0, 0, "", "Zoë")]
    assert apply_edits('{"t":"Zoë","u":""}'.encode(), edits) == '{"t":"x","u":"Zoë"}'.encode()
    assert apply_edits(b'{"t":"Zo\\u00eb","u":""}', edits) == b'{"t":"x","u":"Zo\\u00eb"}'


@pytest.mark.parametrize(
    ("raw", "edits", "message"),
    [
        (b'{"t":"ab"}', [Edit("r", ("t",), 1, 3, "bc", "")], "past the value's 2 characters"),
        (b'{"t":"ab"}', [Edit("r", ("t",), 0, 1, "x", "")], "not as the edit expects"),
        (b'{"t":"a\\/b/c"}', [Edit("r", ("t",), 0, 3, "a/b", "")], "escaped unusually"),
        (b'{"t":"a\\/b"}', [Edit("r", ("t",), 0, 3, "a/b", "")], "how the body escapes"),
        (b'{"t":"\\u00E9"}', [Edit("r", ("t",), 0, 1, "\u00e9", "")], "how the body escapes"),
        (b'{"t":"\\u00E9\\u00e9"}', [Edit("r", ("t",), 0, 1, "\u00e9", "")], "escaped unusually"),
        (b'{"t":"\\u004b"}', [Edit("r", ("t",), 0, 1, "K", "")], "escaped unusually"),
        (b'{"t":5}', [Edit("r", ("t",), 0, 1, "x", "")], "not a string"),
        (b'{"t":"ab"}', [Edit("r", ("t", 0), 0, 1, "x", "")], r"no value at \$\.t\[0\]"),
        (b'{"t":"ab"}', [Edit("r", ("t",), 0, 2, "ab", ""), Edit("r", ("t",), 1, 2, "b", "")], "overlap"),
        ('{"t":"é"}'.encode(), [Edit("r", ("t",), 0, 1, "é", "e")], "how the body escapes"),
        (b'{"t":"a"}', [Edit("r", ("t",), 0, 0, "", "\ud800")], None),
        ('{"t":"é"}'.encode(), [Edit("r", ("t",), 0, 0, "", "\ud800")], "surrogate"),
        (b'{"t" "ab"}', [Edit("r", ("u",), 0, 1, "x", "")], "not a JSON text"),
        (b'{"t":"ab', [Edit("r", ("t",), 0, 1, "a", "")], "not a JSON text"),
        (b'{"t":[1', [Edit("r", ("u",), 0, 1, "a", "")], "not a JSON text"),
        (b"{t:1}", [Edit("r", ("t",), 0, 1, "a", "")], "not a JSON text"),
        (b'{"t":', [Edit("r", ("t",), 0, 1, "a", "")], "not a JSON text"),
        (b'{"\xff":1}', [Edit("r", ("t",), 0, 1, "a", "")], "not a JSON text"),
        (b'{"t":"\xff"}', [Edit("r", ("t",), 0, 1, "a", "")], "not a JSON text"),
        (b'{"tools":[1,2]}', [Edit("r", ("tools",), 0, 3, "0 1 2", "2 1 0")], "each of its 2 elements"),
    ],
)
def test_edits_that_do_not_fit(raw: bytes, edits: list[Edit], message: str | None) -> None:
    if message is None:
        assert undo(edits, apply_edits(raw, edits)) == raw
        return
    with pytest.raises(EditError, match=message) as refused:
        apply_edits(raw, edits)
    clients_own = ("escaped unusually", "how the body escapes", "surrogate")
    assert isinstance(refused.value, UnusualEscapes) == (message in clients_own)
    with pytest.raises(type(refused.value)):
        apply_proved(raw, edits)


def test_tools_are_reordered_with_their_bytes() -> None:
    raw = b'{"tools": [ {"b": 1, "a":[ {"x":"]"} ]} ,\n"two", 3.0 ], "k":"v"}'
    edit = order_edit("tool_order", ("tools",), [2, 0, 1])
    out = apply_edits(raw, [edit])
    assert out == b'{"tools": [ 3.0 ,\n{"b": 1, "a":[ {"x":"]"} ]}, "two" ], "k":"v"}'
    assert undo([edit], out) == raw
    body = json.loads(raw)
    assert edited_body(body, [edit]) == json.loads(out)
    assert json.loads(raw) == body
