"""Miss attribution: the message, the character, the kind of field, and the rule that would fix it."""

from typing import Any

import pytest

from canonicalizer import first_divergence
from canonicalizer.divergence import common_prefix


def chat(system: str, *rest: str) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [
        {"role": "system", "content": system},
        *({"role": roles[n % 2], "content": text} for n, text in enumerate(rest)),
    ]


def test_equal_and_longer_prompts_do_not_diverge() -> None:
    assert first_divergence(chat("a", "b"), chat("a", "b")) is None
    assert first_divergence(chat("a", "b"), chat("a", "b", "c", "d")) is None


def test_a_clock_and_the_rule_that_fixes_it() -> None:
    found = first_divergence(
        chat("Be brief.\nCurrent time: 08:01", "b"), chat("Be brief.\nCurrent time: 08:02", "b")
    )
    assert found is not None
    assert (found.message, found.path, found.offset) == (0, ("messages", 0, "content"), 28)
    assert (found.kind, found.label) == ("clock", "Current time")
    assert found.rule is not None and found.rule.shape == "clock"


@pytest.mark.parametrize(
    ("old", "new", "kind", "stage"),
    [
        ("Session: 0c3f7c11", "Session: 0c3f7c12", "session", None),
        ("<env>\nDate: 2027-04-05\n</env>", "<env>\nDate: 2027-04-06\n</env>", "environment", None),
        ("a\n", "a\n\n", "trailing whitespace", "trailing"),
        ("a\r\nb", "a\nb", "line endings", "crlf"),
        ("cafe\u0301!", "caf\u00e9!", "unicode form", "nfc"),
        ("a\nb", "b\na", "document order", None),
        ("<memory>x</memory>", "<memory>y</memory>", "memory", None),
        ("<docs>x</docs>", "<docs>y</docs>", "documents", None),
        ("<env>x</env>", "<env>y</env>", "environment", None),
        ("<b>c</b> x", "<b>c</b> y", "content", None),
        ("</b> x", "</b> y", "content", None),
    ],
)
def test_kinds(old: str, new: str, kind: str, stage: str | None) -> None:
    found = first_divergence(chat(old), chat(new))
    assert found is not None
    assert (found.kind, found.stage) == (kind, stage)


def test_history_and_user_text_have_no_rule() -> None:
    found = first_divergence(chat("a", "Today is 2027-04-05."), chat("a", "Today is 2027-04-06."))
    assert found is not None
    assert (found.message, found.kind, found.rule) == (1, "date", None)
    dropped = first_divergence(chat("a", "b", "c", "d"), chat("a", "b"))
    assert dropped is not None and (dropped.message, dropped.kind) == (2, "content")
    roles = first_divergence([{"role": "system", "content": "a"}], [{"role": "user", "content": "a"}])
    assert roles is not None and roles.kind == "content"


def test_tools_and_blocks() -> None:
    one, two = {"name": "a"}, {"name": "b"}
    base = {"system": [{"type": "text", "text": "x"}], "messages": []}
    shuffled = first_divergence({**base, "tools": [one, two]}, {**base, "tools": [two, one]})
    assert shuffled is not None and (shuffled.kind, shuffled.stage) == ("tool order", "tool_order")
    changed = first_divergence({**base, "tools": [one]}, {**base, "tools": [two]})
    assert changed is not None and (changed.kind, changed.message) == ("tools", -1)
    added = first_divergence(base, {**base, "tools": [two]})
    assert added is not None and added.kind == "tools"
    other = first_divergence(base, {**base, "system": [{"type": "text", "text": "y"}]})
    assert other is not None and (other.message, other.path) == (-1, ("system", 0, "text"))


def test_common_prefix() -> None:
    for n in (0, 1, 7, 500):
        assert common_prefix("x" * n + "a" * 9, "x" * n + "b") == n
    assert common_prefix("abc", "abc") == 3
