"""Workloads are pure functions of their arguments and name the line they can't use."""

from __future__ import annotations

import json

import pytest

from gateway.bench.workload import (
    WorkloadError,
    chat_tenants,
    from_jsonl,
    shared_prefix,
    stable_system_text,
    volatile_header_lines,
)


def test_chat_tenants_are_the_demo_list() -> None:
    conversations = chat_tenants()
    assert len(conversations) == 16 and sum(len(item.turns) for item in conversations) == 48
    assert [item.tenant for item in conversations[:8]] == [f"tenant-{n}" for n in range(8)]
    assert conversations == chat_tenants()
    assert conversations != chat_tenants(seed=8)


def test_every_request_has_its_own_clock_and_uuid_first() -> None:
    systems = [turn.system or "" for item in chat_tenants() for turn in item.turns]
    heads = [text.splitlines()[:3] for text in systems]
    assert all(a.startswith("Current time: 2026-") and b.startswith("Request id: ") for a, b, _ in heads)
    assert len({head[1] for head in heads}) == 48
    assert len({text.split("\n", 3)[3] for text in systems}) == 8


def test_one_conversation_has_one_user() -> None:
    for item in chat_tenants():
        assert len({(turn.system or "").splitlines()[2] for turn in item.turns}) == 1


def test_keys_reach_the_conversations_of_their_tenant() -> None:
    conversations = chat_tenants(keys={"tenant-1": "k1"})
    assert {item.api_key for item in conversations if item.tenant == "tenant-1"} == {"k1"}
    assert {item.api_key for item in conversations if item.tenant == "tenant-2"} == {None}


def test_system_texts_differ_from_the_first_line_on() -> None:
    firsts = {stable_system_text(index).splitlines()[0] for index in range(8)}
    assert len(firsts) == 8
    assert volatile_header_lines("t", "i", "u") == "Current time: t\nRequest id: i\nUser: u\n"


def test_shared_prefix_groups_share_their_system_text() -> None:
    conversations = shared_prefix(groups=3, each=4, prefix_words=50, max_tokens=5)
    systems = [item.turns[0].system for item in conversations]
    assert len(systems) == 12 and len(set(systems)) == 3
    assert all(item.turns[0].max_tokens == 5 for item in conversations)


def test_from_jsonl_takes_bodies_bare_or_wrapped_and_drops_stream() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "stream": False}
    conversations = from_jsonl([json.dumps(body), "", json.dumps({"body": body})], "log")
    assert [item.id for item in conversations] == ["line-1", "line-3"]
    assert all("stream" not in item.fields and item.turns[0].max_tokens == 3 for item in conversations)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["{"], "log:1: not JSON"),
        (["{}"], "log:1: expected an object with a `messages` list"),
        (['{"messages": []}', "[1]"], "log:2: expected"),
        ([" "], "log: no requests in it"),
    ],
)
def test_from_jsonl_names_the_bad_line(lines: list[str], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        from_jsonl(lines, "log")
