"""Candidates: labelled values of a known shape, each one that its own rule would find again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from canonicalizer.candidates import MAX_CANDIDATES, candidates, label_before


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The current date is Monday, April 5, 2027. Go.", [("The current date is", "clock")]),
        (
            "This is turn number 3. Today is Mon Apr 5 2027.",
            [("This is turn number", "counter"), ("Today is", "clock")],
        ),
        ("# Current Time\n2027-04-05 08:01\n", [("Current Time", "clock")]),
        ("<now>2027-04-05</now>", [("now", "clock")]),
        ("trace_id=4bf92f3577b34da6 span_id=00f067aa0ba902b7", [("trace_id", "hex"), ("span_id", "hex")]),
        ("<!-- cache-buster: 0.123456 -->", [("cache-buster", "nonce")]),
        ("You are talking to Ana Sá.\n", [("You are talking to", "name")]),
        (
            "The user is in an estimated location of Porto, Portugal.",
            [("The user is in an estimated location of", "location")],
        ),
        (
            "- Current branch: main\n- Working directory: /srv/a",
            [("Current branch", "git"), ("Working directory", "path")],
        ),
        ("x-a-billing-header: v=2.1; cch=5a923;", [("v", "billing"), ("cch", "billing")]),
        ("The current year is 2027.", [("The current year is", "clock")]),
        ("现在时间：2027年4月5日 08:01", [("现在时间", "clock")]),
        ("John 3:16, aspect ratio 16:9 and the 2:01 record.", []),
        ("UUID('6ba7b810-9dad-11d1-80b4-00c04fd430c8')", []),
        ("Cherry-pick commit da39a3ee5e6b4b0d3255bfef95601890afd80709 onto main.", []),
        ("The armistice was signed on 1918-11-11.", []),
        ("Shift A starts 08:00, shift B starts 16:00. Today is 2025-03-04.", [("Today is", "clock")]),
        ("In May the user will mark invoices. Will and Mark approve them. Mail may@example.com.", []),
        ("", []),
    ],
)
def test_candidates(text: str, expected: list[tuple[str, str]]) -> None:
    assert [(item.label, item.shape) for item in candidates(text)] == expected


@given(st.text(st.sampled_from('Now: 08:1-/\n`"[]{}<>=;,. isUser')))
def test_candidates_never_overlap_and_lie_in_the_text(text: str) -> None:
    end = 0
    for item in candidates(text):
        assert end <= item.start < item.end <= len(text)
        assert text[item.start : item.end] == item.value
        end = item.end


def test_bounded() -> None:
    text = "\n".join(f"Current time zone{'x' * (n % 7)}{n} now: 08:{n % 60:02}" for n in range(300))
    assert len(candidates(text)) <= MAX_CANDIDATES


def test_label_before() -> None:
    assert label_before("Hello. It is now 08:01", 17) == "It is now"
    assert label_before("08:01", 0) is None
    assert label_before('"now": 08:01', 7) is None
    assert label_before("\n\n08:01", 2) is None
