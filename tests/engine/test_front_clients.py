"""The unmodified openai client against a replica."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
import pytest_asyncio


@pytest.fixture(scope="module")
def server(start_replica: Any) -> Iterator[Any]:
    with start_replica("--fake", "--fake-mean-output", "40") as running:
        yield running


@pytest_asyncio.fixture
async def client(server: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


ASK: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a bird."}]


async def test_chat(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="fake", messages=ASK, temperature=0, max_tokens=200)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    stream = await client.chat.completions.create(
        model="fake",
        messages=ASK,
        temperature=0,
        max_tokens=200,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, usage = "", None
    async for chunk in stream:
        usage = chunk.usage or usage
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
    assert text == answer.choices[0].message.content
    assert usage is not None
    assert usage.completion_tokens == answer.usage.completion_tokens == len(text) + 1


async def test_log_probabilities(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="fake", messages=ASK, logprobs=True, top_logprobs=3, max_tokens=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [len(entry.top_logprobs) for entry in logprobs.content] == [3] * len(logprobs.content)


async def test_completions(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model="fake", prompt=["a", "b"], max_tokens=3, echo=True, logprobs=2
    )
    assert [choice.text[0] for choice in answer.choices] == ["a", "b"]
    stream = await client.completions.create(model="fake", prompt="a", max_tokens=3, stream=True)
    pieces = [choice.text async for chunk in stream for choice in chunk.choices]
    assert 1 <= len("".join(pieces)) <= 3


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["fake"]
    assert (await client.models.retrieve("fake")).id == "fake"


async def test_errors_have_the_clients_own_classes(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="no-such-model", messages=ASK, stream=True)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model="fake", messages=ASK, temperature=9)
    assert bad.value.param == "temperature"
