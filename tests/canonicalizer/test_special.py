"""Masking and cutting at special tokens."""

from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from canonicalizer.special import MARK, Segment, SpecialTokens, cutting_is_sound

IDS = {"<|end|>": 0, "<|end|>x": 1, "<|start|>": 2, "": 3}
SPECIAL = SpecialTokens(IDS)
texts = st.lists(
    st.sampled_from([*IDS, MARK, MARK + "\U00020001", "<|en", "d|>", "\U00020000", "a", "\n", "é"])
).map("".join)
values = st.recursive(
    texts | st.none() | st.integers(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner),
)


def unmasked(value: Any) -> Any:
    if isinstance(value, str):
        return SPECIAL.unmask(value)
    if isinstance(value, list):
        return [unmasked(item) for item in value]
    if isinstance(value, dict):
        return {unmasked(key): unmasked(item) for key, item in value.items()}
    return value


@given(values)
def test_masking_hides_every_special_token_and_can_be_undone(value: Any) -> None:
    masked = SPECIAL.mask(value)
    assert unmasked(masked) == value
    assert "<|start|>" not in repr(masked) and "<|end|>" not in repr(masked)


def test_masking_copies_nothing_that_needs_no_change() -> None:
    value = {"a": ["x", {"b": "y < z"}], "c": ("t", None), "d": 1.5}
    assert SPECIAL.mask(value) is value
    assert SPECIAL.mask(MappingProxyType({"k": "<|end|>"})) != {"k": "<|end|>"}
    assert SPECIAL.mask(("a", "<|end|>"))[0] == "a"
    assert SPECIAL.mask(True) is True


@given(texts)
def test_cutting_loses_nothing_and_marks_only_special_tokens(text: str) -> None:
    pieces = SPECIAL.cut(text)
    assert "".join(piece.text for piece in pieces) == text
    assert all(piece.text in SPECIAL.ids for piece in pieces if piece.special)
    assert all(piece.text and "<|start|>" not in piece.text for piece in pieces if not piece.special)


@given(texts, texts)
def test_only_the_templates_own_special_tokens_are_special(typed: str, also: str) -> None:
    rendered = f"<|start|>{SPECIAL.mask_text(typed)}<|end|>{SPECIAL.mask_text(also)}"
    pieces = SPECIAL.cut_masked(rendered)
    expected = [("<|start|>", True), (typed, False), ("<|end|>", True), (also, False)]
    if not also.startswith("x"):
        assert pieces == [Segment(*item) for item in expected if item[0]]
    whole = SPECIAL.cut_at_typed(rendered)
    assert "".join(piece.text for piece in whole) == f"<|start|>{typed}<|end|>{also}"
    assert all(piece.text in {*IDS, MARK} for piece in whole if not piece.special)


def test_the_longest_token_wins() -> None:
    assert SPECIAL.cut("<|end|>x<|end|>") == [Segment("<|end|>x", True), Segment("<|end|>", True)]


def test_no_special_tokens_at_all() -> None:
    none = SpecialTokens({})
    assert none.cut("a<|end|>") == [Segment("a<|end|>", False)]
    assert none.cut("") == [] and none.cut_at_typed("") == []
    assert none.unmask(none.mask_text(f"a{MARK}b")) == f"a{MARK}b"


@pytest.mark.parametrize(
    ("token", "normalizes", "sound"),
    [
        ({"special": True}, True, True),
        ({"special": True, "lstrip": True}, False, False),
        ({"special": True, "rstrip": True}, False, False),
        ({"special": True, "single_word": True}, False, False),
        ({"special": True, "normalized": True}, True, False),
        ({"special": True, "normalized": True}, False, True),
        ({"special": False, "rstrip": True}, True, True),
    ],
)
def test_settings_that_forbid_cutting(token: dict[str, bool], normalizes: bool, sound: bool) -> None:
    assert cutting_is_sound([{"special": True}, token], normalizes) is sound
