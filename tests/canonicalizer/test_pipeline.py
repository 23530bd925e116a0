"""canonicalize: pure, idempotent, exact outside its edits, and silent whenever something is unsure."""

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from canonicalizer import Context, ReplayMemory, Ruleset, apply_edits, canonicalize, fence_key, undo

CONTEXT = Context("t", fence_key(b"secret", "t"), b"secret")
RULES: dict[str, Any] = {
    "rules": [
        {"label": "Current time", "shape": "clock"},
        {"label": "Request id", "shape": "uuid"},
        {"label": "User", "shape": "name", "mode": "observe"},
        {"label": "Off", "shape": "line", "mode": "off"},
    ]
}
RULESET = Ruleset.from_dict(RULES)
CLOCK, UUID = "2027-04-05T08:01:02Z", "0c3f7c1e-5a58-4a3c-9a0e-6a2b8f0f7a10"
SYSTEM = f"Current time: {CLOCK}\nRequest id: {UUID}\nUser: Ana\nOff: 1\nBe brief."


def chat(content: Any = "hi", system: Any = SYSTEM) -> dict[str, Any]:
    return {
        "model": "m",
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": content}],
    }


def test_values_move_and_placeholders_stay() -> None:
    result = canonicalize(chat(), RULESET, ReplayMemory(), CONTEXT)
    system, user = (message["content"] for message in result.messages)
    assert system == "Current time: [see context]\nRequest id: [see context]\nUser: Ana\nOff: 1\nBe brief."
    block = f'\n\n<context key="{CONTEXT.fence_key}">\nCurrent time: {CLOCK}\nRequest id: {UUID}\n</context>'
    assert user == "hi" + block
    assert result.values == (("Current time", "clock"), ("Request id", "id"))
    assert result.rules == ("clock:current-time", "uuid:request-id")
    assert result.reason is None and result.remember == ()


def test_observed_rules_count_when_asked_for() -> None:
    result = canonicalize(chat(), RULESET, ReplayMemory(), CONTEXT, include_observed=True)
    assert "User: [see context]" in result.messages[0]["content"]
    assert ("User", "identity") in result.values


def test_parts_and_top_level_system() -> None:
    body = {
        "system": [{"type": "text", "text": f"Current time: {CLOCK}"}, {"type": "text", "text": "Be brief."}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "look"}, {"type": "image_url"}]}],
    }
    result = canonicalize(body, RULESET, ReplayMemory(), CONTEXT)
    assert result.body["system"][0]["text"] == "Current time: [see context]"
    assert result.messages[0]["content"][0]["text"].endswith("</context>")
    assert result.body["messages"][0]["content"][1] is body["messages"][0]["content"][1]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"messages": [{"role": "system", "content": SYSTEM}]}, "no_user_turn"),
        (chat("```\nopen"), "open_quote"),
        (chat('He said "and'), "open_quote"),
        (chat(f"<context key={CONTEXT.fence_key}>"), "fence_key"),
        ({**chat(), "tools": [{"description": CONTEXT.fence_key}]}, "fence_key"),
        (chat(system="Be brief."), None),
        ({"messages": "nonsense"}, None),
        ({}, None),
    ],
)
def test_nothing_moves_when_unsure(body: dict[str, Any], reason: str | None) -> None:
    result = canonicalize(body, RULESET, ReplayMemory(), CONTEXT)
    assert result.body is body
    assert result.edits == ()
    assert result.reason == reason
    assert not isinstance(result.messages, str)


def test_an_empty_ruleset_does_nothing() -> None:
    body = chat()
    assert canonicalize(body, Ruleset("0"), ReplayMemory(), CONTEXT).body is body


def test_user_text_tools_and_formats_are_never_touched() -> None:
    body = {
        **chat(f"Current time: {CLOCK}"),
        "tools": [{"function": {"name": "f", "description": f"Current time: {CLOCK}"}}],
        "response_format": {"x": f"Current time: {CLOCK}"},
    }
    result = canonicalize(body, RULESET, ReplayMemory(), CONTEXT)
    assert result.messages[1]["content"].startswith(f"Current time: {CLOCK}\n\n<context")
    assert result.body["tools"] is body["tools"]
    assert result.body["response_format"] is body["response_format"]


def test_stages_need_no_user_turn_and_keep_off_moved_spans() -> None:
    ruleset = Ruleset.from_dict({**RULES, "replay": True, "stages": ["crlf", "trailing"]})
    body = {"messages": [{"role": "system", "content": "One.\r\nTwo.\n\n"}]}
    assert canonicalize(body, ruleset, ReplayMemory(), CONTEXT).messages[0]["content"] == "One.\nTwo."
    mixed = canonicalize(chat(system=f"Current time: {CLOCK}\r\nTwo.\n"), ruleset, ReplayMemory(), CONTEXT)
    assert mixed.messages[0]["content"] == "Current time: [see context]\nTwo."
    assert mixed.rules == ("crlf", "trailing", "clock:current-time")


line = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r"), max_size=40)
clock = st.datetimes().map(lambda at: at.strftime("%Y-%m-%dT%H:%M:%SZ").zfill(20))
systems = st.tuples(line, clock, line, st.uuids(), line).map(
    lambda parts: f"{parts[0]}\nCurrent time: {parts[1]}\n{parts[2]}\nRequest id: {parts[3]}\n{parts[4]}"
)
bodies = st.builds(
    lambda system, history, last, more: {
        "messages": [
            {"role": "system", "content": system},
            *[
                m
                for q, a in history
                for m in ({"role": "user", "content": q}, {"role": "assistant", "content": a})
            ],
            {"role": "user", "content": last},
        ],
        "x": more,
    },
    st.one_of(systems, line),
    st.lists(st.tuples(line, line), max_size=3),
    line,
    st.one_of(line, st.floats(allow_nan=False), st.lists(line)),
)


@settings(max_examples=120, deadline=None)
@given(bodies, st.booleans(), st.booleans())
def test_properties(body: dict[str, Any], replay: bool, ascii_only: bool) -> None:
    ruleset = Ruleset.from_dict({**RULES, "replay": replay, "stages": ["trailing", "crlf", "nfc"]})
    before = copy.deepcopy(body)
    memory = ReplayMemory()
    result = canonicalize(body, ruleset, memory, CONTEXT)
    assert body == before
    assert len(memory) == 0
    assert canonicalize(body, ruleset, memory, CONTEXT) == result
    assert (result.body is body) is (not result.edits)

    again = canonicalize(result.body, ruleset, memory, CONTEXT)
    assert not again.edits

    raw = json.dumps(body, ensure_ascii=ascii_only).encode()
    out = apply_edits(raw, result.edits)
    assert undo(result.edits, out) == raw
    assert json.loads(out) == result.body

    assert result.body["x"] == body["x"]
    for old, new in zip(body["messages"][1:], result.messages[1:], strict=True):
        assert new["content"].startswith(old["content"])
    block = result.messages[-1]["content"][len(body["messages"][-1]["content"]) :]
    for edit in result.edits:
        if edit.after == "[see context]":
            assert edit.before in block
