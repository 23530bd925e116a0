"""The real small model behind the front, asked by the openai client. Collected where the model is at hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from engine.model.store import models_dir

MODEL = "smollm2-135m-instruct"
COUNT: Any = [{"role": "user", "content": "Continue: 2 4 6 8 10 12 14 16"}]


@pytest.fixture(scope="module")
def client(start_replica: Any) -> Iterator[openai.OpenAI]:
    with (
        start_replica("--model", str(models_dir() / MODEL), "--kv-tokens", "4096") as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as made,
    ):
        yield made


def test_stream_and_whole_answer_agree(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": COUNT, "temperature": 0, "max_tokens": 12, "stop": ["20 22"]}
    whole = client.chat.completions.create(**asked)
    text = whole.choices[0].message.content
    pieces = [
        choice.delta.content or ""
        for chunk in client.chat.completions.create(**asked, stream=True)
        for choice in chunk.choices
    ]
    assert "".join(pieces) == text
    assert "20 22" not in (text or "")


def test_a_second_turn_is_cached(client: openai.OpenAI) -> None:
    system = (
        "You answer questions about rivers, lakes and seas, in one short sentence, and never about people."
    )
    messages: Any = [{"role": "system", "content": system}, {"role": "user", "content": "What is a delta?"}]
    first = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=4)
    reply = first.choices[0].message.content
    messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "And a ford?"}]
    second = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=4)
    usage = second.usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert first.usage is not None
    assert (usage.prompt_tokens_details.cached_tokens or 0) >= first.usage.prompt_tokens - 16


def test_a_split_character_is_never_shown_in_part(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "请用一句话介绍长城"}],
        temperature=0,
        max_tokens=6,
        logprobs=True,
        top_logprobs=5,
    )
    choice = answer.choices[0]
    assert choice.logprobs is not None
    entries = choice.logprobs.content or []
    raw = bytes(byte for entry in entries for byte in entry.bytes or [])
    assert raw.decode("utf-8", "replace") == choice.message.content


def test_prompt_log_probabilities(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="The capital of France is Paris", echo=True, logprobs=1, max_tokens=0
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    values = logprobs.token_logprobs or []
    assert values[0] is None
    assert all(value is not None and value < 0 for value in values[1:])
    assert (values[-1] or -99) > -3
