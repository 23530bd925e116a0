"""No prompt can hold the event loop: the work on hostile system texts is bounded."""

from __future__ import annotations

import time

import pytest

from canonicalizer import Context, ReplayMemory, Ruleset, canonicalize, fence_key
from canonicalizer.rules import MAX_HITS, MAX_SYSTEM_CHARS

RULES = Ruleset.from_dict(
    {
        "replay": True,
        "rules": [
            {"label": "Current time", "shape": "clock", "precision": "minute"},
            {"label": "Request id", "shape": "uuid"},
            {"label": "User", "shape": "name"},
        ],
    }
)
CONTEXT = Context("t", fence_key(b"s" * 32, "t"), b"s" * 32)
HOSTILE = {
    "the label and its value again and again": "Current time: 2026-03-02T09:14:07Z\n",
    "the label alone": "Current time ",
    "a label, then blanks": "Current time:" + " " * 200,
    "label lines": "Current time:\n",
    "many users": "User: Ada Lovelace\n",
    "names without end": "User: " + "Ada " * 50,
    "fences": "```\n",
    "example elements": "<example>",
    "headings": "# x\n",
    "braces": "{",
    "quotes": '"',
    "indented lines": "    a\n",
    "sentences in one line": "x. ",
    "dates cut short": "Current time: 2026-",
}


def run(system: str, user: str = "Hello") -> tuple[float, int]:
    body = {"messages": [{"role": "system", "content": system}, {"role": "user", "content": user}]}
    started = time.thread_time()
    result = canonicalize(body, RULES, ReplayMemory(), CONTEXT)
    return time.thread_time() - started, len(result.edits)


@pytest.mark.parametrize("unit", HOSTILE.values(), ids=HOSTILE)
def test_hostile_texts_cost_little(unit: str) -> None:
    text = unit * (200_000 // len(unit))
    for system, user in ((text + "\nUser: Ada\n", "Hello"), ("User: Ada\n", text)):
        spent, _ = run(system, user)
        assert spent < 2.0, "the quadratic form of this took many seconds"


def test_more_values_than_anyone_means_stay_where_they_are() -> None:
    line = "Current time: 2026-03-02T09:14:07Z\n"
    assert run(line * MAX_HITS)[1] == MAX_HITS + 1
    assert run(line * (MAX_HITS + 1))[1] == 0


def test_a_system_text_beyond_any_context_is_left_alone() -> None:
    assert run("User: Ada\n" + "word " * (MAX_SYSTEM_CHARS // 5))[1] == 0


def test_a_value_far_from_its_label_is_not_its_value() -> None:
    assert run("Current time:" + " " * 5000 + "2026-03-02T09:14:07Z\n")[1] == 0
