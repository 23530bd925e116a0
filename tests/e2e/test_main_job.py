"""The main job: an unmodified client changes its base URL, and volatile system prompts hit a warm cache."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
import uuid
from typing import Any

import openai

from gateway.bench.workload import stable_system_text, volatile_header_lines
from tests.e2e.conftest import MODEL, Stack


def client(stack: Stack, key: str = "key-acme") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.base_url}/v1", api_key=key, max_retries=0, timeout=60)


def admin(stack: Stack, path: str) -> Any:
    with urllib.request.urlopen(stack.admin_url + path, timeout=10) as response:
        return json.load(response)


def system(minute: int, index: int, user: str = "Kim Berg") -> str:
    header = volatile_header_lines(f"2026-03-02T09:{minute:02d}:07Z", str(uuid.uuid4()), user)
    return header + stable_system_text(index)


def ask(stack: Stack, minute: int, index: int, question: str, key: str = "key-acme") -> Any:
    messages: Any = [
        {"role": "system", "content": system(minute, index)},
        {"role": "user", "content": question},
    ]
    return client(stack, key).chat.completions.create(
        model=MODEL, messages=messages, max_tokens=4, temperature=0
    )


def test_openai_client_chats_and_streams_the_same_text(stack: Stack) -> None:
    api = client(stack)
    messages: Any = [{"role": "user", "content": "What is the capital of France?"}]
    whole = api.chat.completions.create(model=MODEL, messages=messages, max_tokens=16, temperature=0)
    stream = api.chat.completions.create(
        model=MODEL,
        messages=messages,
        max_tokens=16,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert "Paris" in text and text == whole.choices[0].message.content
    assert whole.usage is not None and whole.usage.prompt_tokens_details is not None
    assert whole.usage.prompt_tokens_details.cached_tokens is not None
    usages = [chunk.usage for chunk in chunks if chunk.usage]
    assert len(usages) == 1 and usages[0].completion_tokens == whole.usage.completion_tokens
    assert [m.id for m in api.models.list()] == [MODEL]


def test_the_policy_caps_an_answer_whose_request_names_no_limit(stack: Stack) -> None:
    messages: Any = [{"role": "user", "content": "Count from one to five hundred, in words."}]
    reply = client(stack).chat.completions.create(
        model=MODEL, messages=messages, temperature=0, extra_body={"ignore_eos": True}
    )
    assert reply.usage is not None and reply.usage.completion_tokens == 24
    assert reply.choices[0].finish_reason == "length"


def test_a_second_request_with_another_clock_id_and_user_is_served_from_cache(stack: Stack) -> None:
    first = ask(stack, 1, 0, "Where is my order?")
    second = ask(stack, 2, 0, "Who can correct an address?")
    assert first.usage.prompt_tokens_details.cached_tokens < 0.1 * first.usage.prompt_tokens
    assert second.usage.prompt_tokens_details.cached_tokens > 0.85 * second.usage.prompt_tokens


def test_observe_forwards_untouched_and_shows_what_enforce_would_recover(stack: Stack) -> None:
    before = admin(stack, "/admin/state")["totals"]["recoverable_tokens"]
    replies = [ask(stack, minute, 3, "Where is my order?", "key-nova") for minute in (1, 2, 3)]
    assert all(r.usage.prompt_tokens_details.cached_tokens < 0.1 * r.usage.prompt_tokens for r in replies)
    for _ in range(50):
        recoverable = admin(stack, "/admin/state")["totals"]["recoverable_tokens"] - before
        if recoverable > 1000:
            break
        subprocess.run(["sleep", "0.1"], check=True)
    assert recoverable > 1.5 * 0.85 * replies[0].usage.prompt_tokens


def test_a_conversation_only_grows_at_its_end(stack: Stack) -> None:
    api = client(stack)
    history: list[Any] = []
    uncached = []
    for turn, question in enumerate(("Where is my order?", "And the other one?", "Who can help me?")):
        messages: Any = [
            {"role": "system", "content": system(10 + turn, 5)},
            *history,
            {"role": "user", "content": question},
        ]
        reply = api.chat.completions.create(model=MODEL, messages=messages, max_tokens=12, temperature=0)
        content = reply.choices[0].message.content
        history += [{"role": "user", "content": question}, {"role": "assistant", "content": content}]
        assert reply.usage is not None and reply.usage.prompt_tokens_details is not None
        uncached.append(reply.usage.prompt_tokens - (reply.usage.prompt_tokens_details.cached_tokens or 0))
    assert uncached[0] > 900
    assert max(uncached[1:]) < 110, "only the new message and its context block are computed"


def test_tenants_never_share_cached_blocks(stack: Stack) -> None:
    text = "Nothing volatile here. " + stable_system_text(6)
    messages: Any = [{"role": "system", "content": text}, {"role": "user", "content": "Hello"}]
    answers = [
        client(stack, key).chat.completions.create(
            model=MODEL, messages=messages, max_tokens=2, temperature=0
        )
        for key in ("key-acme", "key-nova", "key-acme")
    ]
    details = [answer.usage and answer.usage.prompt_tokens_details for answer in answers]
    cached = [(each and each.cached_tokens) or 0 for each in details]
    assert cached[0] == 0 and cached[1] == 0 and cached[2] > 900


def test_policy_enforce_edits_the_file_and_takes_effect(stack: Stack) -> None:
    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "gateway", "policy", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def mode() -> str:
        return next(r["mode"] for r in admin(stack, "/admin/state")["routes"] if r["name"] == "watched")

    flags = ("--policy", str(stack.policy), "--admin", stack.admin_url)
    try:
        said = run("enforce", "watched", *flags)
        assert mode() == "enforce" and "to go back: warmfront policy observe watched" in said
        text = stack.policy.read_text(encoding="utf-8")
        assert "# Comments in this file must survive" in text and "canon: {mode: enforce}" in text
    finally:
        run("observe", "watched", *flags)
    assert mode() == "observe" and "canon: {mode: observe}" in stack.policy.read_text(encoding="utf-8")
