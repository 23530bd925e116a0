"""Faults that users of other servers reported about values that must be refused: each is a 400 by name, in
bounded time, and nobody else notices.

Every test is named after its case; the comment cites the public report. Inputs are this project's own.
"""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.e2e.conftest import MODEL, Stack
from tests.e2e.raw_http import (
    CHAT,
    COMPLETIONS,
    WEATHER,
    assert_serving,
    chat,
    completion,
    connect,
    exchange,
    post,
)

# --- ids outside the vocabulary -----------------------------------------------------------------------------


def test_a25_token_id_prompts_are_bounded(stack: Stack) -> None:
    # sgl-project/sglang#8383, vllm-project/vllm#51795, inseq-team/inseq#306
    for prompt in (
        [-1],
        [999_999_999],
        [49152],
        [2**31],
        [2**63],
        [2**70],
        [-(2**31) - 1],
        [[1, 2], [3, -4]],
        [[1, 2], [2**40]],
        [],
        [[]],
        [1.5],
        [True],
        [1, None],
        ["a", 1],
        [[1], "a"],
        {},
        7,
        "",
    ):
        for stream in (False, True):
            refused = post(stack.base_url, COMPLETIONS, completion(prompt=prompt, stream=stream))
            assert refused.status == 400 and refused.error["param"] == "prompt", prompt
    pair = post(stack.base_url, COMPLETIONS, completion(prompt=[[11, 12], [13, 14]], max_tokens=1))
    assert [choice["index"] for choice in pair.json["choices"]] == [0, 1]
    last_row = post(stack.base_url, COMPLETIONS, completion(prompt=[0, 49151], max_tokens=1))
    assert last_row.status == 200, "the bound is the embedding's row count"
    assert_serving(stack)


@pytest.mark.parametrize("body", [chat(), completion()], ids=["chat", "completions"])
def test_a25_a_client_cannot_send_the_gateways_own_ids(stack: Stack, body: dict[str, Any]) -> None:
    path = CHAT if "messages" in body else COMPLETIONS
    plain = post(stack.base_url, path, body)
    forged = post(stack.base_url, path, {**body, "warmfront": {"token_ids": [999_999_999], "priority": -1}})
    assert forged.status == 200 and forged.text() == plain.text()
    assert "warmfront" not in forged.json


@pytest.mark.parametrize("body", [chat(), completion()], ids=["chat", "completions"])
def test_a26_logit_bias_is_bounded(stack: Stack, body: dict[str, Any]) -> None:
    # vllm-project/vllm#16529, sgl-project/sglang#7670
    path = CHAT if "messages" in body else COMPLETIONS
    connection = connect(stack.base_url)
    other = connect(stack.base_url)
    headers = {"Content-Type": "application/json", "Authorization": "Bearer key-nova"}
    running = chat(stream=True, max_tokens=30, ignore_eos=True)
    other.request("POST", CHAT, json.dumps(running), headers)
    stream = other.getresponse()
    assert stream.readline().startswith(b"data: ")
    for bias in (
        {"99999999": 5, "17": -100},
        {"49152": 1},
        {"-1": 1},
        {"1.0": 1},
        {" 5": 1},
        {"x": 1},
        {"": 1},
        {"１": 1},
        {"0" * 20 + "99999999": 5},
        {"1" * 5000: 5},
        {"5": 101},
        {"5": "1"},
        {"5": None},
        [5],
    ):
        refused = exchange(connection, path, {**body, "logit_bias": bias})
        assert refused.status == 400 and refused.error["param"] == "logit_bias", bias
    assert exchange(connection, path, {**body, "logit_bias": {"49151": -100, "0": 1.5}}).status == 200
    rest = stream.read()
    assert rest.count(b"data: [DONE]") == 1 and b'"error"' not in rest, "others go on unharmed"
    connection.close()
    other.close()
    assert_serving(stack)


@pytest.mark.parametrize(
    "fields",
    [
        {"stop_token_ids": [151_645_000], "min_tokens": 5},
        {"stop_token_ids": [49152]},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": [2**64 - 1]},
        {"stop_token_ids": [True]},
        {"stop_token_ids": "x"},
        {"allowed_token_ids": [151_645_000]},
        {"bad_words": ["x"]},
        {"prompt_logprobs": 1},
    ],
    ids=str,
)
def test_a32_every_field_of_ids_is_bounded(stack: Stack, fields: dict[str, Any]) -> None:
    # vllm-project/vllm#54195
    for path, body in ((CHAT, chat(**fields)), (COMPLETIONS, completion(**fields))):
        refused = post(stack.base_url, path, body)
        assert refused.status == 400 and refused.error["param"] == next(iter(fields))


def test_a32_min_tokens_with_a_stop_id_of_the_last_row(stack: Stack) -> None:
    reply = post(stack.base_url, CHAT, chat(stop_token_ids=[49151, 0], min_tokens=5))
    assert reply.status == 200
    assert_serving(stack)


# --- what needs constrained decoding: refused by name until it is there -------------------------------------

DEEP: dict[str, Any] = {"type": "string"}
for _ in range(60):
    DEEP = {"type": "array", "items": DEEP}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"tide": {"type": "wet"}}, "required": "tide"},
        {"type": "object", "properties": {"tide": {"type": "number"}}, "required": ["tide"]},
        {"properties": []},
        {"anyOf": {}},
        {"$ref": "#"},
        "schema",
        DEEP,
        {"anyOf": [{"type": "string"}] * 30_000},
    ],
    ids=["broken", "good", "properties", "anyOf", "loop", "text", "deep", "wide"],
)
def test_a28_a_json_schema_is_refused_in_bounded_time(stack: Stack, schema: Any, stream: bool) -> None:
    # vllm-project/vllm#17248
    described = {"type": "json_schema", "json_schema": {"name": "tide", "schema": schema}}
    started = time.monotonic()
    refused = post(stack.base_url, CHAT, chat(response_format=described, stream=stream))
    assert time.monotonic() - started < 5
    assert refused.status == 400 and refused.error["param"] == "response_format"


def test_a28_the_server_stays_up(stack: Stack) -> None:
    for value in ({"type": "json_object"}, {"type": "xml"}, {"type": "json_schema"}, "json", [], {}):
        refused = post(stack.base_url, CHAT, chat(response_format=value))
        assert refused.status == 400 and refused.error["param"] == "response_format"
    assert post(stack.base_url, CHAT, chat(response_format={"type": "text"})).status == 200
    assert_serving(stack)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "wind_speed"}}, "x"]
)
def test_a29_a_forced_tool_call_is_refused_the_same_in_both_modes(
    stack: Stack, choice: Any, stream: bool
) -> None:  # googleapis/python-genai#2868
    refused = post(stack.base_url, CHAT, chat(tools=[WEATHER], tool_choice=choice, stream=stream))
    assert refused.status == 400 and refused.error["param"] == "tool_choice"


def test_a29_the_server_stays_up(stack: Stack) -> None:
    for choice in ("none", "auto", None):
        reply = post(stack.base_url, CHAT, chat(tools=[WEATHER], tool_choice=choice, max_tokens=1))
        assert reply.status == 200, reply.body
    assert_serving(stack)


# --- kin of several: the limit of the context is told of the field that holds the prompt --------------------


@pytest.mark.parametrize(
    "prompt",
    ["tide " * 9000, [5] * 8192, ["a", "tide " * 9000], [[5], [5] * 8192]],
    ids=["text", "ids", "texts", "lists"],
)
def test_a_prompt_beyond_the_context_names_prompt(stack: Stack, prompt: Any) -> None:
    refused = post(stack.base_url, COMPLETIONS, completion(prompt=prompt))
    assert refused.status == 400
    assert (refused.error["param"], refused.error["code"]) == ("prompt", "context_length_exceeded")
    assert MODEL not in refused.error["message"]
