"""Prompts as tokens and as chains."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_model import write_tiny_model

from canonicalizer.chain import block_hashes
from canonicalizer.tokens import bytes_to_ids
from gateway.canon.text import PoolText, TextModels, prompt_text
from gateway.errors import ApiError

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief. " * 30},
    {"role": "user", "content": "héllo <|im_end|>"},
]


@pytest.fixture
def models() -> Iterator[TextModels]:
    models = TextModels(inline_chars=100)
    yield models
    models.close()


async def load(models: TextModels, path: Path) -> PoolText:
    model = await models.load(str(write_tiny_model(path)))
    assert model is not None
    assert models.get(str(path)) is model
    return PoolText(model, "fp", 16, 8192)


async def test_chat_tokens_are_the_templates(models: TextModels, tmp_path: Path) -> None:
    text = await load(models, tmp_path)
    seed = text.seed("tenant:a")
    chain = await models.chat_chain(text, seed, MESSAGES, {})
    assert text.form == chain.form == "tokens-in"
    assert chain.tokens is not None and text.model is not None
    assert text.model.decode(bytes_to_ids(chain.tokens)).startswith("system\nBe brief.")
    assert chain.count == len(chain.tokens) // 4
    assert list(chain.hashes) == block_hashes(seed, chain.tokens)
    again = await models.chat_chain(text, seed, MESSAGES, {})  # from the cache, inline
    assert again.tokens == chain.tokens
    control = text.model.special.ids["<|im_end|>"]
    assert bytes_to_ids(chain.tokens).count(control) == 2  # the user's own stays text


async def test_scopes_and_fingerprints_keep_chains_apart(models: TextModels, tmp_path: Path) -> None:
    text = await load(models, tmp_path)
    first = await models.chat_chain(text, text.seed("tenant:a"), MESSAGES, {})
    second = await models.chat_chain(text, text.seed("tenant:b"), MESSAGES, {})
    assert first.tokens == second.tokens
    assert not set(first.hashes) & set(second.hashes)


async def test_a_growing_conversation_keeps_its_prefix(models: TextModels, tmp_path: Path) -> None:
    text = await load(models, tmp_path)
    longer = [*MESSAGES, {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "more" * 20}]
    for pool in (text, PoolText(None, "text", 16, None)):
        seed = pool.seed("s")
        first = await models.chat_chain(pool, seed, MESSAGES, {})
        second = await models.chat_chain(pool, seed, longer, {})
        shared = sum(a == b for a, b in zip(first.hashes, second.hashes, strict=False))
        assert shared >= len(first.hashes) - 2


@pytest.mark.parametrize(
    "body",
    [{"chat_template": "x"}, {"continue_final_message": True}, {"add_generation_prompt": False}],
)
async def test_what_is_rendered_elsewhere_is_hashed_as_text(
    models: TextModels, tmp_path: Path, body: dict[str, Any]
) -> None:
    text = await load(models, tmp_path)
    chain = await models.chat_chain(text, text.seed("s"), MESSAGES, body)
    assert chain.form == "text-chunks" and chain.tokens is None
    assert chain.count > 0


async def test_a_template_that_refuses_falls_back_to_text(models: TextModels, tmp_path: Path) -> None:
    text = await load(models, tmp_path)
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]}]
    chain = await models.chat_chain(text, text.seed("s"), image, {})
    assert chain.tokens is None


async def test_completion_prompts(models: TextModels, tmp_path: Path) -> None:
    text = await load(models, tmp_path)
    plain = PoolText(None, "text", 16, None)
    seed = text.seed("s")
    short = await models.completion_chain(text, seed, "abc" * 20)
    assert short.count == 60
    longer = await models.completion_chain(text, seed, ["abc" * 200, "other"])
    assert longer.count == 600
    ids = await models.completion_chain(text, seed, list(range(40)))
    assert ids.count == 40 and len(ids.hashes) == 2
    nested = await models.completion_chain(plain, seed, [[1, 2], [3]])
    assert nested.count == 2
    odd = await models.completion_chain(plain, seed, [-1, 2**40, 7])
    assert odd.count == 1
    chunks = await models.completion_chain(plain, seed, "abc" * 200)
    assert chunks.form == "text-chunks" and chunks.count == 150


async def test_a_directory_without_a_tokenizer(models: TextModels, tmp_path: Path) -> None:
    assert await models.load(str(tmp_path / "none")) is None
    (tmp_path / "tokenizer.json").write_text("{")
    assert await models.load(str(tmp_path)) is None


async def test_a_template_in_its_own_file(models: TextModels, tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "generation_config.json").write_text("[]")
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    model = await models.load(str(tmp_path))
    assert model is not None
    assert "".join(segment.text for segment in model.render_chat([{"role": "user", "content": "x"}])) == "x"


def test_prompt_text_tells_messages_apart() -> None:
    user = {"role": "user", "content": "ab"}
    other = {"role": "user", "content": "a"}
    assert prompt_text([user], None) != prompt_text([other, {"role": "user", "content": "b"}], None)
    assert prompt_text([user], [{"type": "function"}]) != prompt_text([user], None)
    assert prompt_text(
        [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}], None
    ) != prompt_text([{"role": "assistant", "content": None}], None)
    assert b"\xed\xa0\x80" in prompt_text([{"role": "user", "content": "\ud800"}], None)


async def test_a_prompt_far_beyond_the_context_is_refused_before_it_is_tokenized(
    models: TextModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = await load(models, tmp_path)
    assert loaded.model is not None
    text = PoolText(loaded.model, "fp", 16, 100)

    def never(*args: Any) -> bytes:
        raise AssertionError("tokenized")

    monkeypatch.setattr(loaded.model, "encode_segments", never)
    monkeypatch.setattr(loaded.model, "encode_text", never)
    long = "word " * 400
    for refused, param in (
        (models.chat_chain(text, b"s" * 16, [{"role": "user", "content": long}], {}), "messages"),
        (models.chat_chain(text, b"s" * 16, [{"role": "user", "content": long * 9}], {}), "messages"),
        (models.completion_chain(text, b"s" * 16, long), "prompt"),
        (models.completion_chain(text, b"s" * 16, [7] * 101), "prompt"),
    ):
        with pytest.raises(ApiError) as error:
            await refused
        assert (error.value.status, error.value.param) == (400, param)
        assert error.value.code == "context_length_exceeded"
        assert "more than 100 tokens" in error.value.message or "101 tokens" in error.value.message
    elsewhere = PoolText(None, "text", 16, 100)  # those engines count by themselves
    assert (await models.completion_chain(elsewhere, b"s" * 16, long)).count == 500


async def test_long_texts_are_hashed_in_a_thread_alike(models: TextModels) -> None:
    text = PoolText(None, "text", 16, None)
    long = "word " * 100_000
    chain = await models.completion_chain(text, b"s" * 16, long)
    assert list(chain.hashes) == block_hashes(b"s" * 16, long.encode())


def test_prompt_text_takes_what_is_nested_deeply() -> None:
    nested: Any = "x"
    for _ in range(900):
        nested = [nested]
    part = [{"role": "user", "content": [{"type": "x", "y": nested}]}]
    assert prompt_text(part, [nested]) != prompt_text(part, None)
