"""Prompts in the engine's front: refused early where they can never fit."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from canonicalizer.tokens import TextModel
from engine.worker.front.bytemodel import byte_model_files
from engine.worker.front.errors import ApiError
from engine.worker.front.prompts import Prompts

MODEL = TextModel.from_files(*byte_model_files())


@pytest.fixture
def prompts() -> Iterator[Prompts]:
    with ThreadPoolExecutor(1) as executor:
        yield Prompts(MODEL, executor, 1000)


async def chat(prompts: Prompts, content: Any, body_bytes: int = 100) -> tuple[int, ...]:
    messages = [{"role": "user", "content": content}]
    return await prompts.chat(messages, None, add_generation_prompt=True, body_bytes=body_bytes)


async def test_long_and_short_ones_are_tokenized_alike(prompts: Prompts) -> None:
    content = "é" * 2000
    inline, threaded = await chat(prompts, content), await chat(prompts, content, 1 << 20)
    assert inline == threaded and len(inline) > 4000
    assert len(await prompts.text("a" * 5000, add_special=False)) == 5000


@pytest.mark.parametrize("chars", [16_001, 64_100])
@pytest.mark.parametrize("body_bytes", [100, 1 << 20])
async def test_a_prompt_far_beyond_the_context_is_refused_before_it_is_tokenized(
    prompts: Prompts, chars: int, body_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: Any, **kwargs: Any) -> bytes:
        raise AssertionError("tokenized")

    monkeypatch.setattr(MODEL, "encode_segments", never)
    monkeypatch.setattr(MODEL, "encode_text", never)
    for refused, param in (
        (chat(prompts, "x" * chars, body_bytes), "messages"),
        (prompts.text("x" * chars, add_special=True), "prompt"),
    ):
        with pytest.raises(ApiError, match="more than 1000 tokens") as error:
            await refused
        assert (error.value.status, error.value.param) == (400, param)
        assert error.value.code == "context_length_exceeded"
