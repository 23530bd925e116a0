"""Prompts as tokens, and prompts as hash chains.

Owns the text models (template and tokenizer) that were loaded, one per model directory, and the choice of
how a pool's prompts are hashed. Always holds: a chain that is sent to an engine was made from the very
tokens that are sent with it; nothing here reads a file or tokenizes more than `inline_chars` of new text on
the event loop; where a prompt cannot be rendered here, the chain falls back to chunks of its text and the
engine renders by itself.

    tokens-in     hash blocks of 16 token ids    the bundled engine, which takes those ids
    text-chunks   hash chunks of 64 bytes        engines that tokenize by themselves (a chunk is 16 tokens)
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from canonicalizer.chain import BLOCK_SIZE, block_hashes, chain_seed
from canonicalizer.messages import TemplateError, content_chars
from canonicalizer.plain import plain_json
from canonicalizer.tokens import TextModel, ids_to_bytes, surely_longer
from gateway import errors

_BYTES_PER_TOKEN = 4
_INLINE_HASH_BYTES = 1 << 18
_DROPPED = 4
"""A template may leave out that share of the text (earlier reasoning): more is refused unrendered."""
_RENDER_FIELDS = ("chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")


@dataclass(frozen=True, slots=True)
class PoolText:
    """How one pool's prompts are hashed. `model` None: by text chunks."""

    model: TextModel | None
    fingerprint: str
    block_size: int
    context_length: int | None

    @property
    def form(self) -> str:
        """The pool's capability, as shown to people."""
        return "tokens-in" if self.model is not None else "text-chunks"

    def seed(self, scope: str) -> bytes:
        """Seed of the chains of one cache scope."""
        return chain_seed(self.fingerprint, scope)


@dataclass(frozen=True, slots=True)
class PromptChain:
    """One prompt, hashed. `tokens` are int32 little-endian ids, None where only text chunks are known."""

    form: str
    tokens: bytes | None
    count: int
    """Prompt length in tokens; an estimate for text chunks."""
    hashes: Sequence[bytes]
    seed: bytes
    block_size: int


class TextModels:
    """Text models by directory, loaded once in a thread."""

    def __init__(self, *, inline_chars: int = 2048) -> None:
        self._inline_chars = inline_chars
        self._models: dict[str, TextModel] = {}
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")

    def get(self, model_dir: str) -> TextModel | None:
        """The model of a directory that was loaded before."""
        return self._models.get(model_dir)

    async def load(self, model_dir: str) -> TextModel | None:
        """Load a directory's tokenizer and template; None when it has none that can be read here."""
        model = self._models.get(model_dir)
        if model is None:
            loop = asyncio.get_running_loop()
            model = await loop.run_in_executor(self._threads, _load, Path(model_dir))
            if model is not None:
                self._models[model_dir] = model
        return model

    async def chat_chain(
        self, text: PoolText, seed: bytes, messages: list[dict[str, Any]], body: Mapping[str, Any]
    ) -> PromptChain:
        """Chain of a chat prompt; `messages` are the ones that will be sent, `body` gives tools.

        Raises ApiError (400) for a prompt that is too long to be worth counting its tokens.
        """
        model = text.model
        if model is not None:
            _check_length(text, content_chars(messages) // _DROPPED, "messages")
        if model is not None and not any(body.get(name) is not None for name in _RENDER_FIELDS):
            try:
                segments = model.render_chat(messages, tools=body.get("tools"))
            except TemplateError:
                segments = None
            if segments is not None:
                _check_length(text, sum(len(segment.text) for segment in segments), "messages")
                if model.uncached_chars(segments) <= self._inline_chars:
                    tokens = model.encode_segments(segments)
                else:
                    loop = asyncio.get_running_loop()
                    tokens = await loop.run_in_executor(self._threads, model.encode_segments, segments)
                return _token_chain(text, seed, tokens)
        return await self._text_chain(seed, prompt_text(messages, body.get("tools")))

    async def completion_chain(
        self, text: PoolText, seed: bytes, prompt: Any, *, add_special: bool = True
    ) -> PromptChain:
        """Chain of a text completion's (first) prompt; its tokens are not sent, the engine makes its own.

        Raises ApiError (400) for a prompt that is too long to be worth counting its tokens.
        """
        first = prompt[0] if isinstance(prompt, list) and not isinstance(prompt[0], int) else prompt
        model = text.model
        if isinstance(first, list) or first is None:
            given = first or ()
            if text.context_length is not None and len(given) > text.context_length:
                raise errors.context_length_exceeded(len(given), text.context_length, "prompt")
            ids = [token for token in given if isinstance(token, int) and 0 <= token < 2**31]
            return _token_chain(text, seed, ids_to_bytes(ids))
        if model is None:
            return await self._text_chain(seed, first.encode("utf-8", "surrogatepass"))
        _check_length(text, len(first), "prompt")
        if len(first) <= self._inline_chars:
            return _token_chain(text, seed, model.encode_text(first, add_special))
        loop = asyncio.get_running_loop()
        tokens = await loop.run_in_executor(self._threads, model.encode_text, first, add_special)
        return _token_chain(text, seed, tokens)

    async def _text_chain(self, seed: bytes, data: bytes) -> PromptChain:
        if len(data) <= _INLINE_HASH_BYTES:
            return _text_chain(seed, data)
        return await asyncio.get_running_loop().run_in_executor(self._threads, _text_chain, seed, data)

    def close(self) -> None:
        """Stop the threads; no chain may be asked for after it."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def prompt_text(messages: Sequence[Mapping[str, Any]], tools: Any) -> bytes:
    """The text that is hashed where no tokenizer is at hand: tools, then each message's role and content.

    Tools come first, as chat templates put them. What is not a string is hashed as its JSON, so images
    count too.
    """
    pieces: list[bytes] = [plain_json(tools)] if tools else []
    for message in messages:
        content = message.get("content")
        pieces.append(str(message.get("role")).encode())
        pieces.append(b"\x02")
        pieces.append(
            content.encode("utf-8", "surrogatepass") if isinstance(content, str) else plain_json(content)
        )
        if calls := message.get("tool_calls"):
            pieces.append(plain_json(calls))
        pieces.append(b"\x03")
    return b"".join(pieces)


def _check_length(text: PoolText, chars: int, param: str) -> None:
    limit = text.context_length
    if limit is not None and surely_longer(chars, limit):
        raise errors.context_length_exceeded(None, limit, param)


def _token_chain(text: PoolText, seed: bytes, tokens: bytes) -> PromptChain:
    hashes = block_hashes(seed, tokens, text.block_size)
    return PromptChain("tokens-in", tokens, len(tokens) // 4, hashes, seed, text.block_size)


def _text_chain(seed: bytes, data: bytes) -> PromptChain:
    chunks = data[: len(data) - len(data) % (BLOCK_SIZE * _BYTES_PER_TOKEN)]
    hashes = block_hashes(seed, chunks, BLOCK_SIZE)
    count = -(-len(data) // _BYTES_PER_TOKEN)
    return PromptChain("text-chunks", None, count, hashes, seed, BLOCK_SIZE)


def _load(directory: Path) -> TextModel | None:
    try:
        tokenizer = (directory / "tokenizer.json").read_bytes()
        config = _object(directory / "tokenizer_config.json")
        template = directory / "chat_template.jinja"
        if template.is_file():
            config["chat_template"] = template.read_text(encoding="utf-8")
        return TextModel.from_files(tokenizer, config, _object(directory / "generation_config.json"))
    except (OSError, ValueError, TemplateError):
        return None


def _object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    value = orjson.loads(path.read_bytes())
    return value if isinstance(value, dict) else {}
