"""The table of request fields: one row per field of chat completions and completions.

Owns which fields are supported, which are accepted without effect and which are refused. A field in no row
is accepted unread, so that newer clients keep working; the compatibility table in the docs is made from
these rows.
"""

from __future__ import annotations

from typing import Literal

from engine.worker.front.fields import (
    INT64,
    MAX_CHOICES,
    Field,
    anything,
    boolean,
    integer,
    logit_bias,
    number,
    only,
    stop_strings,
    stream_options,
    text,
    token_ids,
)

MAX_LOGPROBS = 20
MAX_COUNT = 2**31 - 1

_SUPPORTED = (
    Field("model", text),
    Field("n", integer(1, MAX_CHOICES), 1),
    Field("stream", boolean, False),
    Field("stream_options", stream_options),
    Field("stop", stop_strings, ()),
    Field("temperature", number(0, 2), 1.0),
    Field("top_p", number(0, 1), 1.0),
    Field("seed", integer(-INT64, INT64 - 1)),
    Field("presence_penalty", number(-2, 2), 0.0),
    Field("frequency_penalty", number(-2, 2), 0.0),
    Field("logit_bias", logit_bias, ()),
    Field("max_tokens", integer(1, MAX_COUNT), endpoint="chat"),
    Field("max_completion_tokens", integer(1, MAX_COUNT), endpoint="chat"),
    Field("logprobs", boolean, False, endpoint="chat"),
    Field("top_logprobs", integer(0, MAX_LOGPROBS), endpoint="chat"),
    Field("messages", anything, endpoint="chat"),
    Field("tools", anything, endpoint="chat"),
    Field("tool_choice", anything, endpoint="chat"),
    Field("response_format", anything),
    Field("max_tokens", integer(0, MAX_COUNT), endpoint="completions"),
    Field("logprobs", integer(0, MAX_LOGPROBS), endpoint="completions"),
    Field("prompt", anything, endpoint="completions"),
    Field("echo", boolean, False, endpoint="completions"),
    # Extensions that vLLM and llama.cpp share.
    Field("top_k", integer(-1, MAX_COUNT), 0),
    Field("min_p", number(0, 1), 0.0),
    Field("repetition_penalty", number(0.01, 10), 1.0),
    Field("min_tokens", integer(0, MAX_COUNT), 0),
    Field("stop_token_ids", token_ids, ()),
    Field("ignore_eos", boolean, False),
    Field("add_generation_prompt", boolean, True, endpoint="chat"),
    Field("add_special_tokens", boolean, True, endpoint="completions"),
)

_WITHOUT_EFFECT = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "parallel_tool_calls",
    "prediction",
    "cache_salt",
    "return_progress",
    "spaces_between_special_tokens",
)

_REFUSED = (
    Field("best_of", only(1, detail="use 'n'."), endpoint="completions"),
    Field("suffix", only("", detail="the model can't fill in the middle."), endpoint="completions"),
    Field("modalities", only(["text"], detail="only text can be returned.")),
    Field("audio", only(detail="audio can't be returned.")),
    Field("web_search_options", only(detail="there is no web search.")),
    Field("functions", only(detail="use 'tools'.")),
    Field("function_call", only("none", "auto", detail="use 'tool_choice'.")),
    Field("reasoning_effort", only("none", detail="the model has no reasoning mode.")),
    Field("verbosity", only("medium", detail="the model has no verbosity setting.")),
    Field("chat_template", only(detail="the model's own template is used.")),
    Field("chat_template_kwargs", only({}, detail="the template takes no arguments.")),
    Field("continue_final_message", only(False)),
    Field("documents", only([], detail="put documents into messages.")),
    Field("prompt_logprobs", only(detail="use 'echo' with 'logprobs' on completions.")),
    Field("use_beam_search", only(False)),
    Field("length_penalty", only(1, 1.0)),
    Field("truncate_prompt_tokens", only(detail="prompts are never cut.")),
    Field("skip_special_tokens", only(True)),
    Field("include_stop_str_in_output", only(False)),
    Field("return_token_ids", only(False)),
    Field("return_tokens_as_token_ids", only(False)),
    Field("prompt_embeds", only(), endpoint="completions"),
    Field("allowed_token_ids", only(detail="use 'logit_bias'.")),
    Field("bad_words", only([], detail="use 'logit_bias'.")),
    Field("logits_processors", only([])),
    *(
        Field(name, only(detail="constrained decoding is not available."))
        for name in (
            "guided_json",
            "guided_regex",
            "guided_choice",
            "guided_grammar",
            "structured_outputs",
            "grammar",
            "json_schema",
        )
    ),
)


def rows() -> tuple[Field, ...]:
    """Every row, in the order of the docs."""
    ignored = tuple(Field(name, anything, status="without effect") for name in _WITHOUT_EFFECT)
    refused = tuple(Field(f.name, f.check, f.default, f.endpoint, "refused") for f in _REFUSED)
    return (*_SUPPORTED, *ignored, *refused)


def fields_of(endpoint: Literal["chat", "completions"]) -> dict[str, Field]:
    """The rows that apply to one endpoint, by name."""
    return {field.name: field for field in rows() if field.endpoint in (endpoint, "both")}
