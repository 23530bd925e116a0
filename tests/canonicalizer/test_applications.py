"""Labelled applications: what varies and may move is moved, all else comes out byte for byte."""

import json
from pathlib import Path
from typing import Any

import pytest

from canonicalizer import (
    Context,
    Learner,
    ReplayMemory,
    Ruleset,
    apply_edits,
    canonicalize,
    fence_key,
    first_divergence,
    ruleset_from,
    undo,
)

CASES = [
    json.loads(line)
    for line in (Path(__file__).parent / "fixtures" / "applications.jsonl").read_text("utf-8").splitlines()
]
CONTEXT = Context("t", fence_key(b"secret", "t"), b"secret")
FENCE = f'\n\n<context key="{CONTEXT.fence_key}">\n'


def learned(requests: list[dict[str, Any]]) -> Ruleset:
    learner = Learner()
    for request in requests:
        learner.observe("t", request)
    return Ruleset.from_dict(ruleset_from(learner.proposals(values=2)).to_dict())


def stable_part(body: Any) -> str:
    head = [message for message in body["messages"] if message["role"] == "system"]
    return json.dumps([body.get("system"), head, body.get("tools")], ensure_ascii=False)


def block_of(body: Any) -> str:
    content = body["messages"][-1]["content"]
    text = content if isinstance(content, str) else content[-1]["text"]
    assert isinstance(text, str)
    return text.partition(FENCE)[2]


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_application(case: dict[str, Any]) -> None:
    ruleset = learned(case["requests"])
    stable = set()
    for number, request in enumerate(case["requests"]):
        raw = json.dumps(request, ensure_ascii=False).encode()
        result = canonicalize(request, ruleset, ReplayMemory(), CONTEXT)
        out = apply_edits(raw, result.edits)
        assert json.loads(out) == result.body
        assert undo(result.edits, out) == raw
        assert not canonicalize(result.body, ruleset, ReplayMemory(), CONTEXT).edits
        stable.add(stable_part(result.body))
        block = block_of(result.body)
        for label, values in case["moves"].items():
            line = (
                f"{label}:\n{values[number]}\n" if "\n" in values[number] else f"{label}: {values[number]}\n"
            )
            assert line in block
            block = block.replace(line, "", 1)
        assert block.strip() in ("", "</context>")
        for text in case["stays"]:
            assert json.dumps(text, ensure_ascii=False)[1:-1] in stable_part(result.body)
        if not case["moves"] and not case["equal"]:
            assert out == raw
            assert result.body is request
    assert not case["equal"] or len(stable) == 1


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_miss_attribution_names_the_breaker(case: dict[str, Any]) -> None:
    found = None
    for old, new in zip(case["requests"], case["requests"][1:], strict=False):
        found = first_divergence(old, new)
        in_user_text = found and found.message >= 0 and new["messages"][found.message]["role"] == "user"
        if found is not None and not in_user_text:
            break
        found = None
    assert (found.kind if found else None) == case["breaker"]
