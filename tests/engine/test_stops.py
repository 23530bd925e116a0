"""Stop strings: found across pieces, never sent in part, the same however the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.worker.front.stops import StopMatcher


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None, list[str]]:
    matcher = StopMatcher(stops)
    released = [matcher.push(piece) for piece in pieces]
    if matcher.matched is None:
        released.append(matcher.flush())
    return "".join(released), matcher.matched, released


def test_a_stop_across_three_pieces_is_never_sent_in_part() -> None:
    text, matched, released = run(["13 14 15"], ["12", " 13", " 1", "4", " 15 16"])
    assert (text, matched) == ("12 ", "13 14 15")
    assert released[1] == " "


def test_a_held_prefix_that_does_not_complete_is_released_in_order() -> None:
    text, matched, released = run(["abc"], ["xa", "b", "d", "ab"])
    assert (text, matched) == ("xabdab", None)
    assert released == ["x", "", "abd", "", "ab"]


def test_multi_byte_characters_can_be_part_of_a_stop() -> None:
    assert run(["漢字🦔"], ["a漢", "字", "🦔b"])[0] == "a"


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["b", "abc"], "xabc", "xa"),
        (["bc", "abc"], "xabc", "x"),
        (["aab"], "aaab", "a"),
        (["aa"], "aaaa", ""),
        (["zz"], "", ""),
    ],
)
def test_the_match_that_ends_first_wins(stops: list[str], text: str, expected: str) -> None:
    assert run(stops, [text])[0] == expected
    assert run(stops, list(text))[0] == expected


def test_nothing_is_released_after_a_match() -> None:
    matcher = StopMatcher(["end"])
    assert matcher.push("the end") == "the "
    assert matcher.push("more") == ""
    assert matcher.flush() == ""


@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.integers(0, 30), max_size=6),
)
def test_cutting_the_text_differently_changes_nothing(text: str, stops: list[str], cuts: list[int]) -> None:
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut <= len(text))})
    pieces = [text[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
    released, matched, _ = run(stops, pieces)
    whole, whole_match, _ = run(stops, [text])
    assert (released, matched) == (whole, whole_match)
    assert not any(stop in released for stop in stops)
    if matched is None:
        assert released == text
    else:
        assert text.startswith(released + matched)
