"""Every field of a request body: accepted, defaulted or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from engine.worker.front.errors import ApiError
from engine.worker.front.table import fields_of, rows
from engine.worker.front.validate import (
    chat_request,
    completion_request,
    parse_json,
)

ROWS = 1000
USER = {"role": "user", "content": "hi"}


def chat(**fields: Any) -> Any:
    return chat_request({"model": "m", "messages": [USER], **fields}, ROWS, private=True)


def completion(**fields: Any) -> Any:
    return completion_request({"model": "m", "prompt": "hi", **fields}, ROWS, private=True)


def refused(param: str, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param.split("[")[0].split(".")[0] in caught.value.message
    return caught.value


def refused_completion(param: str, **fields: Any) -> None:
    with pytest.raises(ApiError) as caught:
        completion(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_null_is_the_same_as_absent_for_every_field() -> None:
    names = [field.name for field in rows() if field.name not in ("model", "messages", "prompt")]
    assert chat(**dict.fromkeys(names)) == chat()
    assert completion(**dict.fromkeys(names)) == completion()


def test_presence_counts_and_not_truthiness() -> None:
    options = chat(temperature=0, top_p=0, seed=0, presence_penalty=0).options
    assert (options.temperature, options.seed, options.presence_penalty) == (0.0, 0, 0.0)


def test_top_p_zero_is_greedy() -> None:
    assert chat(top_p=0).options.temperature == 0.0
    assert chat(top_p=0).options.top_p == 1.0


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("n", 0),
        ("n", "2"),
        ("n", True),
        ("temperature", 2.1),
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("top_p", 1.5),
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_completion_tokens", -1),
        ("seed", 2**63),
        ("stop", ["a", "b", "c", "d", "e"]),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", 3),
        ("stop", "x" * 2001),
        ("stream", 1),
        ("stream_options", {"include_usage": True}),
        ("logprobs", 3),
        ("top_logprobs", 5),
        ("top_logprobs", 21),
        ("logit_bias", {"99999999": 5, "17": -100}),
        ("logit_bias", {"-1": 5}),
        ("logit_bias", {"x": 5}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"0" * 20 + "99999999": 5}),
        ("logit_bias", {"1" * 5000: 5}),
        ("logit_bias", [1]),
        ("stop_token_ids", [151645000]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", 5),
        ("min_tokens", -1),
        ("best_of_nothing", None),
        ("audio", {"voice": "x"}),
        ("functions", []),
        ("guided_json", {}),
        ("allowed_token_ids", [5]),
        ("bad_words", ["x"]),
        ("logits_processors", ["x"]),
        ("modalities", ["audio"]),
        ("model", 5),
        ("messages", []),
        ("messages", "hi"),
        ("messages", None),
        ("tools", {}),
        ("tool_choice", "required"),
        ("tool_choice", "sometimes"),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "xml"}),
        ("response_format", "json"),
    ],
)
def test_a_bad_value_is_refused_by_name(param: str, value: Any) -> None:
    if param == "best_of_nothing":
        chat(best_of_nothing=1)
        return
    refused(param, **{param: value})


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("messages[0]", "hi"),
        ("messages[0].role", {"content": "x"}),
        ("messages[0].role", {"role": "robot", "content": "x"}),
        ("messages[0].content", {"role": "user", "content": 5}),
        ("messages[0].content[0]", {"role": "user", "content": ["x"]}),
        (
            "messages[0].content[0].type",
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
        ),
        ("messages[0].content[0].text", {"role": "user", "content": [{"type": "text"}]}),
        ("messages[0].tool_calls", {"role": "assistant", "tool_calls": 1}),
        ("messages[0].tool_calls[0].function.name", {"role": "assistant", "tool_calls": [{}]}),
        (
            "messages[0].tool_calls[0].function.arguments",
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]},
        ),
    ],
)
def test_a_bad_message_is_refused_with_its_path(path: str, message: Any) -> None:
    refused(path, messages=[message])


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": None},
        {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "4.2 "}]},
        {"role": "developer", "content": "x"},
    ],
)
def test_every_shape_of_message_that_openai_allows_is_accepted(message: dict[str, Any]) -> None:
    assert chat(messages=[USER, message]).messages[1] == message


def test_max_completion_tokens_wins_over_max_tokens() -> None:
    assert chat(max_completion_tokens=5, max_tokens=50).options.max_tokens == 5
    assert chat(max_tokens=50).options.max_tokens == 50
    assert chat().options.max_tokens is None


def test_completions_default_to_16_tokens_and_allow_none_at_all() -> None:
    assert completion(max_tokens=None).options.max_tokens == 16
    assert completion(max_tokens=0).options.max_tokens == 0


def test_stop_is_a_string_or_a_list() -> None:
    assert chat(stop="a").options.stop == ("a",)
    assert chat(stop=["a", "b"]).options.stop == ("a", "b")
    assert chat(stop=[]).options.stop == ()


def test_chat_logprobs_without_top_logprobs_asks_for_no_alternatives() -> None:
    assert chat(logprobs=True).options.logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).options.logprobs == 3
    assert chat(logprobs=False).options.logprobs is None


def test_stream_options() -> None:
    options = chat(stream=True, stream_options={"include_usage": True}).options
    assert (options.include_usage, options.continuous_usage) == (True, False)
    assert not chat(stream=True, stream_options={}).options.include_usage
    refused("stream_options.include_usage", stream=True, stream_options={"include_usage": "yes"})
    refused("stream_options", stream=True, stream_options=[])


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1, 2], [3, 4]], ((1, 2), (3, 4))),
        ([999], ((999,),)),
    ],
)
def test_the_four_shapes_of_a_prompt(prompt: Any, expected: Any) -> None:
    assert completion(prompt=prompt).prompts == expected


@pytest.mark.parametrize(
    "prompt", [None, [], [-1], [1000], [999999999], [[]], ["a", 1], [1, "a"], [[1], "a"], 5, [1.5]]
)
def test_a_bad_prompt_is_refused(prompt: Any) -> None:
    refused_completion("prompt", prompt=prompt)


def test_fields_of_completions_that_are_refused() -> None:
    refused_completion("best_of", best_of=2)
    refused_completion("suffix", suffix="x")
    refused_completion("logprobs", logprobs=21)
    assert completion(best_of=1, suffix="").echo is False


def test_tools_are_accepted_and_checked() -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    assert chat(tools=[tool], tool_choice="auto").tools == [tool]
    assert chat(tools=[]).tools is None
    refused("tools[0].function.name", tools=[{"type": "function"}])
    refused("tools[0].function.parameters", tools=[{"function": {"name": "f", "parameters": 3}}])
    for choice in ("required", {"type": "function", "function": {"name": "add"}}):
        assert refused("tool_choice", tools=[tool], tool_choice=choice).code == "unsupported_parameter"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"type": "nonsense"}}},
        {"type": "object", "required": "a"},
        {"properties": []},
        {"anyOf": {}},
        {"items": 5},
        {"enum": 1},
        [],
    ],
)
def test_a_broken_schema_is_told_from_an_unsupported_one(schema: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert refused("response_format", response_format=form).code == "invalid_value"


def test_a_good_schema_is_refused_as_unsupported() -> None:
    schema = {
        "type": ["object", "null"],
        "properties": {
            "a": {"type": "array", "items": {"type": "string"}},
            "b": {"anyOf": [True, {"enum": [1]}]},
        },
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert refused("response_format", response_format=form).code == "unsupported_parameter"
    refused("response_format", response_format={"type": "json_schema", "json_schema": {}})
    assert chat(response_format={"type": "text"})


def test_a_huge_schema_is_refused_in_bounded_time() -> None:
    schema = {"properties": {f"p{i}": {"type": "string"} for i in range(30_000)}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert "parts" in refused("response_format", response_format=form).message


def test_the_extension_is_read_on_a_private_listener_only() -> None:
    value = {"token_ids": [1, 2], "seed": "00" * 16, "priority": 0, "deadline_ms": 5, "request_id": "r"}
    extension = chat(warmfront=value).options.extension
    assert extension is not None
    assert (extension.token_ids, extension.seed, extension.priority) == ((1, 2), bytes(16), 0)
    assert chat(warmfront=value, messages=None).messages == []
    with pytest.raises(ApiError) as caught:
        chat_request({"model": "m", "messages": [USER], "warmfront": value}, ROWS, private=False)
    assert caught.value.param == "warmfront"


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("warmfront", 5),
        ("warmfront.token_ids", {"token_ids": [1000]}),
        ("warmfront.token_ids", {"token_ids": []}),
        ("warmfront.token_ids", {"token_ids": ["a"]}),
        ("warmfront.seed", {"seed": "00"}),
        ("warmfront.seed", {"seed": "zz" * 16}),
        ("warmfront.priority", {"priority": -1}),
    ],
)
def test_a_bad_extension_is_refused_with_its_path(param: str, value: Any) -> None:
    refused(param, warmfront=value)


@pytest.mark.parametrize(
    "raw",
    [
        b"{",
        b"[]",
        b"null",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": "\\ud800"}',
        b'{"a": "\xff"}',
        b'{"a":' * 129 + b"1" + b"}" * 129,
        b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
)
def test_bad_json_is_a_400(raw: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_json(raw)
    assert caught.value.status == 400


def test_good_json_passes() -> None:
    wide = b'{"a": [' + b"[]," * 500 + b"[]]}"
    assert len(parse_json(wide)["a"]) == 501
    assert parse_json(b'{"a": "\\u0000"}') == {"a": "\0"}


def test_the_table_names_each_field_once_per_endpoint() -> None:
    for endpoint in ("chat", "completions"):
        names = [row.name for row in rows() if row.endpoint in (endpoint, "both")]
        assert len(names) == len(set(names))
        assert set(fields_of(endpoint)) == set(names)
