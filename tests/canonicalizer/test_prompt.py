"""Reading a body: system text, turns, and what is left alone because it is of another type."""

from typing import Any

import pytest

from canonicalizer.prompt import Prompt, Text, is_tool_result


def test_leading_system_and_developer_messages_are_system_text() -> None:
    messages = [
        {"role": "system", "content": "one"},
        {
            "role": "developer",
            "content": [{"type": "text", "text": "two"}, {"type": "image_url"}, {"type": "text"}],
        },
        {"role": "user", "content": "hi"},
        {"role": "system", "content": "history"},
    ]
    prompt = Prompt.read({"messages": messages})
    assert prompt.system == (
        Text(("messages", 0, "content"), "one"),
        Text(("messages", 1, "content", 0, "text"), "two"),
    )
    assert prompt.head == 2
    assert prompt.last_turn() == 2


def test_top_level_system_text() -> None:
    assert Prompt.read({"system": "s", "messages": []}).system == (Text(("system",), "s"),)
    blocks = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    paths = [text.path for text in Prompt.read({"system": blocks, "messages": []}).system]
    assert paths == [("system", 0, "text"), ("system", 1, "text")]


def test_a_turn_ends_in_its_last_text_part() -> None:
    parts = [{"type": "text", "text": "look"}, {"type": "text", "text": "here"}, {"type": "image_url"}]
    prompt = Prompt.read({"messages": [{"role": "user", "content": parts}]})
    assert prompt.turn_text(0) == Text(("messages", 0, "content", 1, "text"), "here")


def test_tool_results_are_no_turn() -> None:
    anthropic = {"role": "user", "content": [{"type": "tool_result", "content": "42"}]}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "tool", "content": "41"},
        anthropic,
    ]
    prompt = Prompt.read({"messages": messages})
    assert prompt.last_turn() == 0
    assert prompt.is_loop(0)
    assert prompt.tool_text(2) == Text(("messages", 2, "content"), "41")
    assert prompt.tool_text(3) is None
    assert prompt.turn_text(3) is None
    assert is_tool_result(anthropic)
    assert not is_tool_result(
        {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "tool_result"}]}
    )
    assert not is_tool_result({"role": "user", "content": 3})
    assert not is_tool_result("x")


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": "text"},
        {"messages": None},
        {"messages": [3, None]},
        {"system": 5, "messages": [{"role": "system", "content": 7}, {"role": "user", "content": {"a": 1}}]},
        {"messages": [{"role": "system", "content": "only"}]},
    ],
)
def test_bodies_without_a_turn(body: dict[str, Any]) -> None:
    prompt = Prompt.read(body)
    assert prompt.last_turn() is None
    assert all(isinstance(text.value, str) for text in prompt.system)
