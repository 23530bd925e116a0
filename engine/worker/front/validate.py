"""Request bodies to frozen requests, or a refusal that names the field.

Owns the checks that need more than one field. Always holds: what comes out is complete (defaults applied,
bounds checked), so that nothing after this module tests for null or type; `stream: true` changes nothing
about validation errors. Rules worth knowing: `max_completion_tokens` wins over `max_tokens`; `top_p: 0` is
greedy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from engine.worker.front.errors import ApiError, invalid, unsupported
from engine.worker.front.fields import Field, integer, json_type, parse, text, token_ids, wrong_type
from engine.worker.front.schema import check_response_format
from engine.worker.front.table import fields_of

MAX_DEPTH = 128
MAX_PROMPTS = 256
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_CHAT = fields_of("chat")
_COMPLETIONS = fields_of("completions")


@dataclass(frozen=True, slots=True)
class Extension:
    """The gateway's `warmfront` object: the prompt as token ids, the chain's seed, and scheduling."""

    token_ids: tuple[int, ...] | None
    seed: bytes | None
    priority: int
    deadline_ms: int | None
    request_id: str | None


@dataclass(frozen=True, slots=True)
class Options:
    """What both endpoints share. `logprobs` is None (off) or the number of alternatives."""

    model: str
    n: int
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    min_tokens: int
    ignore_eos: bool
    logprobs: int | None
    stream: bool
    include_usage: bool
    continuous_usage: bool
    extension: Extension | None


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat completion; `messages` are as sent, checked for shape."""

    options: Options
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    add_generation_prompt: bool


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A completion of one or more prompts, each text or token ids."""

    options: Options
    prompts: tuple[str | tuple[int, ...], ...]
    echo: bool
    add_special_tokens: bool


def parse_json(raw: bytes) -> dict[str, Any]:
    """Decode a body: a JSON object at most `MAX_DEPTH` deep. NaN, lone surrogates and such are refused."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ApiError(
            400,
            f"The body is not valid JSON: {error.msg} (line {error.lineno}, column {error.colno}).",
            code="invalid_json",
        ) from error
    if not isinstance(body, dict):
        raise ApiError(400, f"The body must be a JSON object, got {json_type(body)}.", code="invalid_json")
    if raw.count(b"{") + raw.count(b"[") > MAX_DEPTH and _deeper_than(body, MAX_DEPTH):
        raise ApiError(400, f"The body is nested more than {MAX_DEPTH} levels deep.", code="invalid_json")
    return body


def _deeper_than(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        level = [
            child
            for item in level
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True


def chat_request(body: Mapping[str, Any], vocab_rows: int, *, private: bool) -> ChatRequest:
    """Check a chat completion's body; `vocab_rows` is the embedding's row count."""
    values = parse(body, _CHAT, vocab_rows)
    tools = _check_tools(values["tools"])
    _check_tool_choice(values["tool_choice"], tools)
    check_response_format(values["response_format"])
    logprobs = None
    if values["top_logprobs"] is not None and not values["logprobs"]:
        raise invalid("top_logprobs", "needs 'logprobs' to be true.")
    if values["logprobs"]:
        logprobs = values["top_logprobs"] or 0
    limit = values["max_completion_tokens"]
    if limit is None:
        limit = values["max_tokens"]
    options = _options(values, body, vocab_rows, max_tokens=limit, logprobs=logprobs, private=private)
    rendered = options.extension is not None and options.extension.token_ids is not None
    messages = [] if rendered else check_messages(values["messages"])
    return ChatRequest(options, messages, tools, values["add_generation_prompt"])


def completion_request(body: Mapping[str, Any], vocab_rows: int, *, private: bool) -> CompletionRequest:
    """Check a completion's body."""
    values = parse(body, _COMPLETIONS, vocab_rows)
    check_response_format(values["response_format"])
    limit = 16 if values["max_tokens"] is None else values["max_tokens"]
    options = _options(
        values, body, vocab_rows, max_tokens=limit, logprobs=values["logprobs"], private=private
    )
    given = options.extension is not None and options.extension.token_ids is not None
    prompts = () if given else _prompts(values["prompt"], vocab_rows)
    return CompletionRequest(options, prompts, values["echo"], values["add_special_tokens"])


def _options(
    values: Mapping[str, Any],
    body: Mapping[str, Any],
    rows: int,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    private: bool,
) -> Options:
    if values["model"] is None:
        raise ApiError(
            400, "Missing 'model': you must name a model.", param="model", code="missing_required_parameter"
        )
    streaming = values["stream_options"]
    if streaming is not None and not values["stream"]:
        raise invalid("stream_options", "only allowed when 'stream' is true.")
    include_usage, continuous = streaming or (False, False)
    greedy = values["temperature"] == 0 or values["top_p"] == 0
    return Options(
        model=values["model"],
        n=values["n"],
        max_tokens=max_tokens,
        temperature=0.0 if greedy else values["temperature"],
        top_p=1.0 if greedy else values["top_p"],
        top_k=max(0, values["top_k"]),
        min_p=values["min_p"],
        seed=values["seed"],
        presence_penalty=values["presence_penalty"],
        frequency_penalty=values["frequency_penalty"],
        repetition_penalty=values["repetition_penalty"],
        logit_bias=values["logit_bias"],
        stop=values["stop"],
        stop_token_ids=values["stop_token_ids"],
        min_tokens=values["min_tokens"],
        ignore_eos=values["ignore_eos"],
        logprobs=logprobs,
        stream=values["stream"],
        include_usage=include_usage,
        continuous_usage=continuous,
        extension=_extension(body.get("warmfront"), rows, private=private),
    )


_EXTENSION = {
    field.name: field
    for field in (
        Field("token_ids", token_ids),
        Field("seed", text),
        Field("priority", integer(0, 1000), 2),
        Field("deadline_ms", integer(0, 2**53)),
        Field("request_id", text),
    )
}


def _extension(value: Any, rows: int, *, private: bool) -> Extension | None:
    if value is None:
        return None
    if not private:
        raise unsupported("warmfront", "it is taken on a private listener only.")
    if not isinstance(value, dict):
        raise wrong_type("warmfront", "an object", value)
    fields = parse(value, _EXTENSION, rows, within="warmfront.")
    ids = fields["token_ids"]
    if ids is not None and not ids:
        raise invalid("warmfront.token_ids", "must not be empty.")
    return Extension(
        ids,
        None if fields["seed"] is None else chain_seed_bytes("warmfront.seed", fields["seed"]),
        fields["priority"],
        fields["deadline_ms"],
        fields["request_id"],
    )


def chain_seed_bytes(param: str, value: str) -> bytes:
    """32 hexadecimal digits to the 16 bytes that start a block-hash chain."""
    try:
        seed = bytes.fromhex(value)
    except ValueError:
        seed = b""
    if len(seed) != 16:
        raise invalid(param, "must be 32 hexadecimal digits.")
    return seed


def check_messages(value: Any) -> list[dict[str, Any]]:
    """Check a conversation's shape: known roles, content as string, null, absent or text parts."""
    if value is None:
        raise ApiError(400, "Missing 'messages'.", param="messages", code="missing_required_parameter")
    if not isinstance(value, list):
        raise wrong_type("messages", "a list", value)
    if not value:
        raise invalid("messages", "must hold at least one message.", "empty_array")
    for index, message in enumerate(value):
        path = f"messages[{index}]"
        if not isinstance(message, dict):
            raise wrong_type(path, "an object", message)
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise invalid(f"{path}.role", f"must be one of {', '.join(sorted(ROLES))}.")
        _check_content(f"{path}.content", message.get("content"))
        calls = message.get("tool_calls")
        if calls is not None:
            _check_tool_calls(f"{path}.tool_calls", calls)
    return value


def _check_content(path: str, content: Any) -> None:
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise wrong_type(path, "a string, null or a list of parts", content)
    for index, part in enumerate(content):
        if not isinstance(part, dict):
            raise wrong_type(f"{path}[{index}]", "an object", part)
        kind = part.get("type")
        if kind not in ("text", "refusal"):
            raise invalid(
                f"{path}[{index}].type", "this model reads parts of type 'text' only.", "unsupported_value"
            )
        if not isinstance(part.get(kind), str):
            raise wrong_type(f"{path}[{index}].{kind}", "a string", part.get(kind))


def _check_tool_calls(path: str, calls: Any) -> None:
    if not isinstance(calls, list):
        raise wrong_type(path, "a list", calls)
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise invalid(f"{path}[{index}].function.name", "every call names its function.")
        if not isinstance(function.get("arguments", ""), str | dict):
            raise wrong_type(f"{path}[{index}].function.arguments", "a string", function["arguments"])


def _check_tools(value: Any) -> list[dict[str, Any]] | None:
    if value is None:
        return None
    if not isinstance(value, list):
        raise wrong_type("tools", "a list", value)
    for index, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise invalid(f"tools[{index}].function.name", "every tool is a function with a name.")
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, dict):
            raise wrong_type(f"tools[{index}].function.parameters", "an object", parameters)
    return value or None


def _check_tool_choice(choice: Any, tools: list[dict[str, Any]] | None) -> None:
    if choice is None or (isinstance(choice, str) and choice in ("none", "auto")):
        return
    if choice == "required" or isinstance(choice, dict):
        if tools is None:
            raise invalid("tool_choice", "only allowed when 'tools' are given.")
        raise unsupported("tool_choice", "only 'none' and 'auto' are available on this engine.")
    raise invalid("tool_choice", "must be 'none', 'auto', 'required' or a named function.")


def _prompts(value: Any, rows: int) -> tuple[str | tuple[int, ...], ...]:
    if value is None:
        raise ApiError(400, "Missing 'prompt'.", param="prompt", code="missing_required_parameter")
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise wrong_type("prompt", "a string, a list of strings, token ids or lists of token ids", value)
    if not value:
        raise invalid("prompt", "must not be empty.", "empty_array")
    first = value[0]
    if isinstance(first, int) and not isinstance(first, bool):
        return (token_ids("prompt", value, rows),)
    if len(value) > MAX_PROMPTS:
        raise invalid("prompt", f"at most {MAX_PROMPTS} prompts in one request.")
    prompts: list[str | tuple[int, ...]] = []
    for item in value:
        if isinstance(item, str) and isinstance(first, str):
            prompts.append(item)
        elif isinstance(item, list) and isinstance(first, list):
            if not item:
                raise invalid("prompt", "a list of token ids must not be empty.", "empty_array")
            prompts.append(token_ids("prompt", item, rows))
        else:
            raise wrong_type("prompt", "strings only, or lists of token ids only", item)
    return tuple(prompts)
