"""Faults that users of other servers reported about request and answer shapes, tried on the running stack.

Every test is named after its case; the comment cites the public report. Inputs are this project's own.
"""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pytest

from tests.e2e.conftest import Stack
from tests.e2e.raw_http import (
    CHAT,
    COMPLETIONS,
    HELLO,
    WEATHER,
    Reply,
    assert_serving,
    chat,
    completion,
    connect,
    exchange,
    post,
    rendered,
)

CALL = {
    "id": "call_7",
    "type": "function",
    "function": {"name": "wind_speed", "arguments": '{"place":"Ushant"}'},
}


# --- messages and their contents ----------------------------------------------------------------------------


def test_a01_an_empty_assistant_turn_is_a_turn(stack: Stack) -> None:  # vllm-project/vllm#21089
    messages = [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "second"},
    ]
    reply = post(stack.base_url, CHAT, chat(messages=messages))
    assert reply.status == 200 and reply.text()
    prompt, count = rendered(stack, messages=messages)
    assert "<|im_start|>assistant\n<|im_end|>" in prompt
    assert reply.json["usage"]["prompt_tokens"] == count


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_a01_no_content_at_all_is_accepted_from_every_role(stack: Stack, role: str) -> None:
    counts = set()
    for content in ({"content": ""}, {"content": None}, {}, {"content": []}):
        messages = [{"role": role, **content}, {"role": "user", "content": "Anybody there?"}]
        reply = post(stack.base_url, CHAT, chat(messages=messages, max_tokens=1))
        assert reply.status == 200, reply.body
        counts.add(reply.json["usage"]["prompt_tokens"])
    assert len(counts) == 1


def test_a02_null_and_absent_content_are_the_same(stack: Stack) -> None:  # langchain4j/langchain4j#1958
    usages = []
    for content in ({"content": None}, {}):
        messages = [
            {"role": "user", "content": "How hard does the wind blow at Ushant this morning?"},
            {"role": "assistant", **content, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_7", "content": "31 knots from the west"},
        ]
        reply = post(stack.base_url, CHAT, chat(messages=messages, tools=[WEATHER]))
        assert reply.status == 200, reply.body
        usages.append(reply.json["usage"])
    first, second = usages
    assert first["prompt_tokens"] == second["prompt_tokens"] > 40
    whole_blocks = (second["prompt_tokens"] - 1) // 16 * 16
    assert second["prompt_tokens_details"]["cached_tokens"] == whole_blocks, "the same block hashes"


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_a04_text_parts_are_joined_with_nothing_between(stack: Stack, role: str) -> None:
    # vllm-project/vllm#25001
    parts = [{"type": "text", "text": text} for text in ("high water 6", ".8", " metres")]
    extra: dict[str, Any] = {"tool_call_id": "call_7"} if role == "tool" else {}
    counts = []
    for content in (parts, "high water 6.8 metres"):
        messages = [{"role": "user", "content": "Tide?"}, {"role": role, "content": content, **extra}]
        reply = post(stack.base_url, CHAT, chat(messages=messages, max_tokens=1))
        assert reply.status == 200, reply.body
        counts.append(reply.json["usage"]["prompt_tokens"])
        assert "high water 6.8 metres" in rendered(stack, messages=messages)[0]
    assert counts[0] == counts[1]


def test_a23_a_later_system_message(stack: Stack) -> None:
    # raullenchai/Rapid-MLX#1543, vllm-project/vllm#44505
    system = "You are the harbour office's assistant. Answer in one short sentence, in plain words. " * 3
    before = [
        {"role": "system", "content": system},
        {"role": "user", "content": "Is the lock open?"},
        {"role": "assistant", "content": "Until ten."},
    ]
    after = [
        {"role": "system", "content": "From here on answer in capitals."},
        {"role": "user", "content": "And tomorrow?"},
    ]
    assert post(stack.base_url, CHAT, chat(messages=before, max_tokens=1)).status == 200
    reply = post(stack.base_url, CHAT, chat(messages=before + after, max_tokens=1))
    assert reply.status == 200, reply.body
    prompt, count = rendered(stack, messages=before + after)
    places = [prompt.index(str(message["content"])) for message in before + after]
    assert places == sorted(places), "all text, in its order"
    usage = reply.json["usage"]
    assert usage["prompt_tokens"] == count
    assert usage["prompt_tokens_details"]["cached_tokens"] > 48, "the first system message is a stable prefix"


@pytest.mark.parametrize(
    "roles",
    [["system"], ["assistant"], ["tool"], ["user", "user"], ["developer", "user"], ["user", "assistant"]],
    ids="-".join,
)
def test_a23_roles_in_unusual_order(stack: Stack, roles: list[str]) -> None:
    messages = [{"role": role, "content": f"Note {number}."} for number, role in enumerate(roles)]
    assert post(stack.base_url, CHAT, chat(messages=messages, max_tokens=1)).status == 200


# --- usage --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [chat(stream=True), completion(stream=True)], ids=["chat", "completions"])
@pytest.mark.parametrize(
    "options",
    [None, {}, {"include_usage": None}, {"include_usage": False}, {"continuous_usage_stats": True}],
    ids=str,
)
def test_a05_usage_comes_only_when_asked_for(stack: Stack, body: dict[str, Any], options: Any) -> None:
    # vllm-project/vllm#36379
    path = CHAT if "messages" in body else COMPLETIONS
    reply = post(stack.base_url, path, {**body, "max_tokens": 1, "stream_options": options})
    assert all("usage" not in event and event["choices"] for event in reply.events)
    assert b"warmfront" not in reply.body


@pytest.mark.parametrize("body", [chat(), completion()], ids=["chat", "completions"])
def test_a05_asked_for_it_comes_once_and_last(stack: Stack, body: dict[str, Any]) -> None:
    path = CHAT if "messages" in body else COMPLETIONS
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    events = post(stack.base_url, path, streamed).events
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 3
    assert events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0
    assert [event for event in events if event.get("usage")] == events[-1:]
    for options in ({}, {"include_usage": True}):
        refused = post(stack.base_url, path, {**body, "stream_options": options})
        assert refused.status == 400 and refused.error["param"] == "stream_options"


# --- stop, echo, limits -------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [chat(max_tokens=1), completion(max_tokens=1)], ids=["chat", "completions"])
def test_a08_stop_in_every_shape(stack: Stack, body: dict[str, Any]) -> None:  # ollama/ollama#5545
    path = CHAT if "messages" in body else COMPLETIONS
    for stop in ("Q:", ["Q:"], ["Q:", "A:", "R:", "B:"], None, []):
        assert post(stack.base_url, path, {**body, "stop": stop}).status == 200, stop
    for stop in (["a", "b", "c", "d", "e"], "", [""], ["a", ""], 5, [None], ["a", 1], {}):
        refused = post(stack.base_url, path, {**body, "stop": stop})
        assert refused.status == 400 and refused.error["param"] == "stop", stop


def test_a10_echo_without_output(stack: Stack) -> None:  # vllm-project/vllm#6521
    prompt = "Result: passed — ☂"
    reply = post(stack.base_url, COMPLETIONS, completion(prompt=prompt, echo=True, logprobs=1, max_tokens=0))
    choice = reply.json["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (prompt, "length")
    assert reply.json["usage"]["completion_tokens"] == 0
    logprobs = choice["logprobs"]
    count = reply.json["usage"]["prompt_tokens"]
    assert [len(logprobs[name]) for name in logprobs] == [count] * 4
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    assert_serving(stack)


@pytest.mark.parametrize("prompt", ["ab cd", ["ab", "cd ef"], [100, 200, 300]], ids=["text", "list", "ids"])
@pytest.mark.parametrize("n", [1, 2])
def test_a11_no_sampled_token_leaks_into_an_echo(stack: Stack, prompt: Any, n: int) -> None:
    # vllm-project/vllm#39556
    body = completion(prompt=prompt, echo=True, max_tokens=0, n=n)
    silent = post(stack.base_url, COMPLETIONS, body)
    assert silent.json["usage"]["completion_tokens"] == 0
    options = {"stream": True, "stream_options": {"include_usage": True}}
    streamed = post(stack.base_url, COMPLETIONS, {**body, **options})
    assert streamed.events[-1]["usage"]["completion_tokens"] == 0
    prompts = prompt if isinstance(prompt, list) and isinstance(prompt[0], str) else [prompt]
    for index in range(len(prompts) * n):
        given = prompts[index // n]
        assert streamed.text(index) == silent.text(index)
        assert silent.text(index) == given if isinstance(given, str) else silent.text(index)
    assert streamed.finishes == silent.finishes == ["length"] * len(prompts) * n


@pytest.mark.parametrize("stream", [False, True])
def test_a11_max_tokens_null_is_16_for_completions(stack: Stack, stream: bool) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    reply = post(stack.base_url, COMPLETIONS, completion(max_tokens=None, ignore_eos=True, **options))
    usage = reply.events[-1]["usage"] if stream else reply.json["usage"]
    assert usage["completion_tokens"] == 16 and reply.finishes == ["length"]


def test_a20_max_completion_tokens_counts(stack: Stack) -> None:  # Luce-Org/lucebox#165
    reply = post(
        stack.base_url, CHAT, chat(max_tokens=None, max_completion_tokens=20, ignore_eos=True, stream=False)
    )
    assert reply.json["usage"]["completion_tokens"] == 20
    both = post(stack.base_url, CHAT, chat(max_completion_tokens=2, max_tokens=9, ignore_eos=True))
    assert both.json["usage"]["completion_tokens"] == 2, "max_completion_tokens wins"
    for field in ("max_tokens", "max_completion_tokens"):
        for value in (0, -1, 1.5, "9", True):
            refused = post(stack.base_url, CHAT, chat(**{field: value}))
            assert refused.status == 400 and refused.error["param"] == field
    assert post(stack.base_url, CHAT, chat(max_tokens=1.0)).json["usage"]["completion_tokens"] == 1


# --- log probabilities --------------------------------------------------------------------------------------


def test_a13_logprobs_without_top_logprobs(stack: Stack) -> None:  # vllm-project/vllm#4795
    for options in ({}, {"top_logprobs": 0}, {"top_logprobs": None}, {"stream": True}):
        reply = post(stack.base_url, CHAT, chat(logprobs=True, **options))
        entries = logprob_entries(reply)
        assert len(entries) == 3
        assert all(set(entry) == {"token", "logprob", "bytes", "top_logprobs"} for entry in entries)
        assert all(entry["logprob"] <= 0 and entry["top_logprobs"] == [] for entry in entries)
        assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == reply.text()
    for options, param in (
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
    ):
        refused = post(stack.base_url, CHAT, chat(**options))
        assert refused.status == 400 and refused.error["param"] == param


@pytest.mark.parametrize("stream", [False, True])
def test_a14_logprobs_show_text_and_never_stand_ins(stack: Stack, stream: bool) -> None:
    # vllm-project/vllm#19177
    messages = [{"role": "user", "content": "请重复：汉字，漢字。"}]
    body = chat(messages=messages, logprobs=True, top_logprobs=4, max_tokens=8, stream=stream)
    reply = post(stack.base_url, CHAT, body)
    entries = logprob_entries(reply)
    assert b"".join(bytes(e["bytes"]) for e in entries).decode(errors="replace") == reply.text()
    assert any(byte > 127 for entry in entries for byte in entry["bytes"]), "the reply has Chinese in it"
    for shown in [*entries, *(top for entry in entries for top in entry["top_logprobs"])]:
        assert_readable(shown)


def logprob_entries(reply: Reply) -> list[dict[str, Any]]:
    chunks = reply.events if reply.content_type.startswith("text/event-stream") else [reply.json]
    parts = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"]]
    return [entry for part in parts if part for entry in part["content"]]


def assert_readable(shown: dict[str, Any]) -> None:
    raw = bytes(shown["bytes"])
    try:
        assert shown["token"] == raw.decode() or not raw, shown
    except UnicodeDecodeError:
        assert re.fullmatch(r"(\\x[0-9a-f]{2})+", shown["token"]), shown


# --- several choices ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [chat(), completion()], ids=["chat", "completions"])
def test_a16_every_choice_has_its_index(
    stack: Stack, body: dict[str, Any]
) -> None:  # ggml-org/llama.cpp#20226
    path = CHAT if "messages" in body else COMPLETIONS
    sampled = {**body, "n": 3, "seed": 11, "temperature": 1.3, "max_tokens": 4, "ignore_eos": True}
    reply = post(stack.base_url, path, {**sampled, "stream": True})
    assert {choice["index"] for event in reply.events for choice in event["choices"]} == {0, 1, 2}
    assert reply.finishes == ["length"] * 3
    assert len({reply.text(index) for index in range(3)}) > 1, "a seed doesn't make choices equal"
    silent = post(stack.base_url, path, {**sampled, "max_tokens": 1})
    assert [choice["index"] for choice in silent.json["choices"]] == [0, 1, 2]


def test_a17_one_finish_per_choice_and_nothing_after_it(stack: Stack) -> None:  # sgl-project/sglang#8417
    body = chat(n=2, stream=True, max_tokens=4, temperature=1)
    events = post(stack.base_url, CHAT, body).events
    for index in range(2):
        chunks = [c for event in events for c in event["choices"] if c["index"] == index]
        assert chunks[0]["delta"]["role"] == "assistant"
        assert all("role" not in chunk["delta"] for chunk in chunks[1:])
        ends = [chunk["finish_reason"] for chunk in chunks]
        assert ends[-1] in ("length", "stop") and ends[:-1] == [None] * (len(ends) - 1)


# --- null, zero and unknown ---------------------------------------------------------------------------------

OPTIONAL = """
    top_p seed stop n logit_bias stream stream_options tools tool_choice response_format user
    metadata store presence_penalty frequency_penalty logprobs top_logprobs max_completion_tokens
    parallel_tool_calls service_tier functions function_call modalities audio prediction
    reasoning_effort top_k min_p min_tokens stop_token_ids ignore_eos repetition_penalty suffix echo
    best_of warmfront
"""


@pytest.mark.parametrize("body", [chat(), completion()], ids=["chat", "completions"])
def test_a19_null_is_the_same_as_absent(stack: Stack, body: dict[str, Any]) -> None:
    # ggml-org/llama.cpp#25515, LostRuins/koboldcpp#1503
    path = CHAT if "messages" in body else COMPLETIONS
    plain = post(stack.base_url, path, body)
    nulls = post(stack.base_url, path, {**dict.fromkeys(OPTIONAL.split()), **body})
    assert nulls.status == 200, nulls.body
    assert (nulls.text(), nulls.finishes) == (plain.text(), plain.finishes)
    assert nulls.json["usage"]["prompt_tokens"] == plain.json["usage"]["prompt_tokens"]
    assert nulls.json["usage"]["completion_tokens"] == plain.json["usage"]["completion_tokens"]
    sampled = {name: value for name, value in body.items() if name != "temperature"}
    reply = post(stack.base_url, path, {**sampled, "temperature": None, "seed": 5})
    assert reply.text() == post(stack.base_url, path, {**sampled, "seed": 5}).text()


def test_a19_max_tokens_null_on_chat_streams_on(stack: Stack) -> None:
    connection = connect(stack.base_url)
    body = chat(max_tokens=None, temperature=None, ignore_eos=True, stream=True)
    headers = {"Content-Type": "application/json", "Authorization": "Bearer key-acme"}
    connection.request("POST", CHAT, json.dumps(body), headers)
    response = connection.getresponse()
    assert response.status == 200 and response.readline().startswith(b"data: ")
    connection.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body", [chat(), completion()], ids=["chat", "completions"])
def test_a22_an_unknown_model_is_a_404(stack: Stack, body: dict[str, Any], stream: bool) -> None:
    # runpod-workers/worker-vllm#57
    path = CHAT if "messages" in body else COMPLETIONS
    reply = post(stack.base_url, path, {**body, "model": "no-such-model", "stream": stream})
    assert reply.status == 404
    error = reply.error
    assert (error["type"], error["param"], error["code"]) == (
        "invalid_request_error",
        "model",
        "model_not_found",
    )


def test_a22_the_sdk_raises_not_found(stack: Stack) -> None:
    api = openai.OpenAI(base_url=f"{stack.base_url}/v1", api_key="key-acme", max_retries=0)
    messages: Any = HELLO
    with pytest.raises(openai.NotFoundError):
        api.chat.completions.create(model="no-such-model", messages=messages)
    with pytest.raises(openai.NotFoundError):
        api.chat.completions.create(model="no-such-model", messages=messages, stream=True)
    with pytest.raises(openai.NotFoundError):
        api.models.retrieve("no-such-model")


def test_a31_greedy_is_greedy_every_time(stack: Stack) -> None:
    zeros = {"temperature": 0, "top_p": 0, "seed": 0, "presence_penalty": 0}
    connection = connect(stack.base_url)
    bodies = [chat(**zeros), chat(temperature=0), chat(temperature=1.5, top_p=0)]
    texts = {exchange(connection, CHAT, bodies[number % 3]).text() for number in range(20)}
    connection.close()
    assert len(texts) == 1
