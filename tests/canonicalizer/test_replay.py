"""Replay: a conversation only grows at its end, states fresh values, and never mixes two people."""

from typing import Any

import pytest

from canonicalizer import Canonical, Context, ReplayMemory, Ruleset, canonicalize, fence_key

CONTEXT = Context("t", fence_key(b"secret", "t"), b"secret")
RULES = Ruleset.from_dict(
    {
        "replay": True,
        "rules": [
            {"label": "Current time", "shape": "clock", "precision": "minute"},
            {"label": "Request id", "shape": "uuid"},
            {"label": "User", "shape": "name"},
            {"label": "Branch", "shape": "git"},
        ],
    }
)
OPEN = f'\n\n<context key="{CONTEXT.fence_key}">\n'


def uuid(number: int) -> str:
    return f"{number:08x}-0000-4000-8000-000000000000"


def system(clock: str, number: int = 1, user: str = "Ana", branch: str = "main") -> dict[str, Any]:
    head = f"Current time: {clock}\nRequest id: {uuid(number)}\nUser: {user}\nBranch: {branch}\nBe brief."
    return {"role": "system", "content": head}


def ask(memory: ReplayMemory, head: dict[str, Any], *turns: dict[str, Any]) -> Canonical:
    result = canonicalize({"messages": [head, *turns]}, RULES, memory, CONTEXT)
    memory.store(result.remember, 0)
    return result


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def contents(result: Canonical) -> list[str]:
    return [message["content"] for message in result.messages]


def test_history_is_append_only_and_blocks_are_few() -> None:
    memory = ReplayMemory()
    turns: list[dict[str, Any]] = []
    previous: list[str] = []
    blocks = 0
    for number in range(12):
        turns.append(user(f"question {number}"))
        result = ask(memory, system(f"2027-04-05T08:{number // 3:02}:{number:02}Z", number), *turns)
        now = contents(result)
        assert now[: len(previous)] == previous
        blocks += now[-1].count("<context")
        turns.append(assistant(f"answer {number}"))
        previous = [*now, f"answer {number}"]
    assert blocks == 4
    assert previous[1].count("Request id") == 1
    assert sum(text.count("Request id") for text in previous[2:]) == 0
    memory.check()


def test_the_first_block_states_everything_and_later_ones_only_what_changed() -> None:
    memory = ReplayMemory()
    first = ask(memory, system("08:01:02", 1), user("a"))
    expected = f"Current time: 08:01:02\nRequest id: {uuid(1)}\nUser: Ana\nBranch: main\n</context>"
    assert contents(first)[1] == "a" + OPEN + expected
    same_minute = ask(memory, system("08:01:59", 2), user("a"), assistant("b"), user("c"))
    assert contents(same_minute)[1:] == [contents(first)[1], "b", "c"]
    later = ask(memory, system("08:02:00", 3, branch="dev"), user("a"), assistant("b"), user("c"))
    assert contents(later)[3] == "c" + OPEN + "Current time: 08:02:00\nBranch: dev\n</context>"


def test_regenerating_the_last_turn() -> None:
    memory = ReplayMemory()
    first = ask(memory, system("08:01:02"), user("a"))
    assert contents(ask(memory, system("08:01:40"), user("a"))) == contents(first)
    later = ask(memory, system("08:02:40"), user("a"))
    assert "08:02:40" in contents(later)[1] and "08:01" not in contents(later)[1]
    other_id = ask(memory, system("08:02:41", 9), user("a"))
    assert uuid(9) in contents(other_id)[1]
    onward = ask(memory, system("08:02:50", 9), user("a"), assistant("b"), user("c"))
    assert contents(onward)[1] == contents(other_id)[1]


def test_two_people_who_open_alike_never_share_a_block() -> None:
    memory = ReplayMemory()
    ask(memory, system("08:01:02", user="Ana"), user("hello"))
    ask(memory, system("08:01:05", user="Bo"), user("hello"))
    for name, other in (("Ana", "Bo"), ("Bo", "Ana")):
        result = ask(memory, system("08:01:30", user=name), user("hello"), assistant("hi"), user("next"))
        text = "".join(contents(result))
        assert f"User: {name}" in text
        assert f"User: {other}" not in text


def test_candidates_that_differ_in_state_replay_nothing() -> None:
    memory = ReplayMemory()
    ask(memory, system("08:01:02", branch="main"), user("hello"))
    ask(memory, system("08:01:02", branch="dev"), user("hello"))
    result = ask(memory, system("08:01:30", branch="dev"), user("hello"), assistant("hi"), user("next"))
    assert contents(result)[1] == "hello"
    assert "Branch: dev" in contents(result)[3]


def tool(text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "1", "content": text}


CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}


def test_agent_loops_hold_the_values_the_turn_began_with() -> None:
    memory = ReplayMemory()
    first = ask(memory, system("08:01:02", 1), user("fix it"))
    second = ask(memory, system("08:05:00", 2), user("fix it"), CALL, tool("ok"))
    assert contents(second)[1] == contents(first)[1]
    assert contents(second)[3] == "ok"


def test_changed_state_is_stated_behind_the_last_tool_result_and_replayed() -> None:
    memory = ReplayMemory()
    first = ask(memory, system("08:01:02"), user("fix it"))
    second = ask(memory, system("08:05:00", branch="dev"), user("fix it"), CALL, tool("ok"))
    assert contents(second)[1] == contents(first)[1]
    assert contents(second)[3] == "ok" + OPEN + "Branch: dev\n</context>"
    third = ask(
        memory, system("08:06:00", branch="dev"), user("fix it"), CALL, tool("ok"), CALL, tool("done")
    )
    assert contents(third)[: len(contents(second))] == contents(second)
    assert contents(third)[5] == "done"


def test_changed_state_without_a_plain_tool_result_is_stated_at_the_turn() -> None:
    memory = ReplayMemory()
    ask(memory, system("08:01:02"), user("fix it"))
    result_part = {"role": "user", "content": [{"type": "tool_result", "content": "ok"}]}
    second = ask(memory, system("08:05:00", branch="dev"), user("fix it"), CALL, result_part)
    assert "Branch: dev" in contents(second)[1] and "Branch: main" not in contents(second)[1]
    assert contents(second)[3] == result_part["content"]


def test_a_loop_whose_turn_was_forgotten_states_all_values_at_the_turn() -> None:
    result = ask(ReplayMemory(), system("08:01:02"), user("fix it"), CALL, tool("ok"))
    assert "Current time: 08:01:02" in contents(result)[1]
    assert contents(result)[3] == "ok"


def test_a_loop_in_a_turn_that_needed_no_block() -> None:
    memory = ReplayMemory()
    ask(memory, system("08:01:02"), user("a"))
    history = (user("a"), assistant("b"), user("fix it"))
    assert contents(ask(memory, system("08:01:30"), *history))[3] == "fix it"
    looped = ask(memory, system("08:09:00"), *history, CALL, tool("ok"))
    assert contents(looped)[3] == "fix it"


def test_cache_markers_do_not_change_a_turns_key() -> None:
    memory = ReplayMemory()
    marked = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    first = ask(memory, system("08:01:02"), {"role": "user", "content": [marked]})
    plain = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    second = ask(memory, system("08:01:30"), plain, assistant("b"), user("c"))
    assert second.messages[1]["content"][0]["text"] == first.messages[1]["content"][0]["text"]


@pytest.mark.parametrize("change", ["tenant", "secret", "system", "history"])
def test_keys_depend_on_tenant_secret_system_text_and_history(change: str) -> None:
    memory = ReplayMemory()
    ask(memory, system("08:01:02"), user("a"))
    head = system("08:01:30")
    context, first = CONTEXT, user("a")
    if change == "tenant":
        context = Context("u", CONTEXT.fence_key, CONTEXT.secret)
    elif change == "secret":
        context = Context("t", CONTEXT.fence_key, b"other")
    elif change == "system":
        head["content"] += " Always."
    else:
        first = user("a ")
    result = canonicalize({"messages": [head, first, assistant("b"), user("c")]}, RULES, memory, context)
    assert contents(result)[1] == first["content"]
    assert "Current time" in contents(result)[3]


def test_a_message_nested_deeper_than_json_is_written_is_replayed_too() -> None:
    nested: Any = "x"
    for _ in range(400):
        nested = {"a": [nested]}
    body = {
        "messages": [
            {"role": "system", "content": "User: Ada Lovelace"},
            {"role": "user", "content": "hi", "extra": nested},
        ]
    }
    rules = Ruleset.from_dict({"replay": True, "rules": [{"label": "User", "shape": "name"}]})
    context = Context("t", fence_key(b"s" * 32, "t"), b"s" * 32)
    first = canonicalize(body, rules, ReplayMemory(), context)
    assert len(first.edits) == 2 and first.remember
    assert canonicalize(body, rules, ReplayMemory(), context).remember == first.remember
