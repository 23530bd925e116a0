"""Protected text: fences, inline code, quotes, JSON, indented code and examples; and texts that end open."""

import pytest

from canonicalizer.regions import ends_open, in_fence, is_protected


@pytest.mark.parametrize(
    "text",
    [
        "```\nNow: @\n```",
        "~~~~ py\n~~~\nNow: @\n",
        "Write `Now: @` here",
        'Say "Now: @" here',
        "Say “Now: @” here",
        "Say «Now: @» here",
        "call('@')",
        "Intro.\n\n    Now: @\n    more",
        "    Now: @",
        "\tNow: @",
        '{"a": 1,\n Now: @}',
        "For example, Now: @",
        "Example. Now: @",
        "- e.g. Now: @",
        "User: Now: @ Assistant: ok",
        "User: @\nAssistant: ok",
        "Assistant: @",
        "<examples>\nNow: @\n</examples>",
        "## Examples\nNow: @",
    ],
)
def test_protected(text: str) -> None:
    start = text.index("@")
    assert is_protected(text, start, start + 1)


@pytest.mark.parametrize(
    "text",
    [
        "Now: @",
        "```\ncode\n```\nNow: @",
        'Say "x" and "y". Now: @',
        "<env>\n    Now: @\n</env>",
        "<example>a</example>\nNow: @",
        "## Examples\na\n## Facts\nNow: @",
        '{"a": 1}\nNow: @',
        "User: @\nLocale: de",
        "It's `a` and it's `b`. Now: @",
    ],
)
def test_open_text(text: str) -> None:
    start = text.index("@")
    assert not is_protected(text, start, start + 1)


@pytest.mark.parametrize(
    "text",
    ["```\ncode", 'He said "wait', "“wait", "«wait", "„wait", "a `b", '"""\ndoc', "> quoted", "a\n> b"],
)
def test_texts_that_end_open(text: str) -> None:
    assert ends_open(text)


@pytest.mark.parametrize(
    "text", ["hi", "```\na\n```", 'a "b" c', 'a 5" pipe', "it's", "„so“", "> a\n\nb", ""]
)
def test_texts_that_do_not(text: str) -> None:
    assert not ends_open(text)


def test_a_longer_fence_holds_a_shorter_one() -> None:
    text = "````\n```\n@\n````\n#"
    assert in_fence(text, text.index("@"))
    assert not in_fence(text, text.index("#"))
