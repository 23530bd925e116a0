"""Stages: each touches only what it names, and only in system text or the order of tools."""

from typing import Any

import pytest

from canonicalizer.edits import edited_body
from canonicalizer.prompt import Prompt
from canonicalizer.stages import sorted_tools, stage_edits, tool_name


def run(stages: tuple[str, ...], body: dict[str, Any]) -> Any:
    return edited_body(body, stage_edits(stages, body, Prompt.read(body), []))


@pytest.mark.parametrize(
    ("stage", "before", "after"),
    [
        ("crlf", "a\r\nb\r\n", "a\nb\n"),
        ("crlf", "a\nb\rc", "a\nb\rc"),
        ("trailing", "a  \nb \n\n", "a  \nb"),
        ("trailing", "\n\n", "\n\n"),
        ("trailing", "```\ncode\n\n", "```\ncode\n\n"),
        ("nfc", "cafe\u0301 \u1112\u1161\u11ab", "caf\u00e9 \ud55c"),
        ("nfc", "```\ncafe\u0301\n```", "```\ncafe\u0301\n```"),
        ("nfc", "2\u2075 \ufb01 \U0001f469\u200d\U0001f467 \u0dc1\u0dca\u200d\u0dbb", None),
        ("nfc", "x\u0338 plain", None),
    ],
)
def test_text_stages(stage: str, before: str, after: str | None) -> None:
    user = {"role": "user", "content": before}
    body = {"messages": [{"role": "system", "content": before}, user]}
    result = run((stage,), body)
    assert result["messages"][0]["content"] == (before if after is None else after)
    assert result["messages"][1] is user


def test_stages_compose_without_overlap() -> None:
    body = {"messages": [{"role": "system", "content": "a\r\nb\r\n"}]}
    assert run(("crlf", "trailing"), body)["messages"][0]["content"] == "a\nb\r\n".replace("\r\n", "\n")
    assert run(("trailing", "crlf"), body)["messages"][0]["content"] == "a\nb"


def tools(*names: str) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": name, "parameters": {"b": 1, "a": 2}}} for name in names
    ]


def test_tools_are_sorted_by_name_and_keep_their_schemas() -> None:
    body = {"messages": [], "tools": tools("b", "c", "a")}
    result = run(("tool_order",), body)
    assert [tool_name(tool) for tool in result["tools"]] == ["a", "b", "c"]
    assert list(result["tools"][0]["function"]["parameters"]) == ["b", "a"]


@pytest.mark.parametrize(
    "value", [None, "x", [], tools("a"), tools("a", "b"), tools("b", "a", "a"), [{}, {"name": "a"}]]
)
def test_tool_lists_that_stay(value: Any) -> None:
    assert sorted_tools({"tools": value}) is None


def test_names_in_both_shapes() -> None:
    assert tool_name({"name": "n"}) == "n"
    assert tool_name({"function": 3}) == ""
    assert tool_name(7) == ""
