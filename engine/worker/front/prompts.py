"""Messages and texts to token ids, off the event loop where it takes long.

Owns the choice between inline and threaded tokenization. Always holds: texts of more than 2 KB that no cache
knows are tokenized in a thread; a text far beyond the context is refused before its tokens are made; a
template's refusal is a 400 that names `messages`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any, TypeVar

from canonicalizer.messages import TemplateError, content_chars
from canonicalizer.tokens import Segment, TextModel, bytes_to_ids, surely_longer
from engine.worker.front.errors import ApiError, invalid, too_long

INLINE_CHARS = 2048
INLINE_BODY_BYTES = 16_384
_DROPPED = 4
"""A template may leave out that share of the text (earlier reasoning): more is refused unrendered."""
T = TypeVar("T")


def ids_of(tokens: bytes) -> tuple[int, ...]:
    """int32 little-endian bytes to a tuple of ids."""
    return tuple(bytes_to_ids(tokens))


class Prompts:
    """Renders and tokenizes with one TextModel; `executor` runs the long ones.

    `capacity` is the model's context in tokens: a text that is far longer is a 400.
    """

    def __init__(self, text_model: TextModel, executor: Executor, capacity: int) -> None:
        self._text = text_model
        self._executor = executor
        self._capacity = capacity

    async def chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        *,
        add_generation_prompt: bool,
        body_bytes: int,
    ) -> tuple[int, ...]:
        """The conversation's token ids; `body_bytes` (the request's size) says if rendering is short."""

        self._check(content_chars(messages) // _DROPPED, "messages")

        def render() -> Sequence[Segment]:
            segments = self._text.render_chat(
                messages, tools=tools, add_generation_prompt=add_generation_prompt
            )
            self._check(sum(len(segment.text) for segment in segments), "messages")
            return segments

        try:
            if body_bytes > INLINE_BODY_BYTES:
                return await self._in_thread(lambda: ids_of(self._text.encode_segments(render())))
            segments = render()
        except TemplateError as error:
            raise invalid("messages", f"the model's chat template refuses them: {error}") from error
        if self._text.uncached_chars(segments) > INLINE_CHARS:
            return await self._in_thread(lambda: ids_of(self._text.encode_segments(segments)))
        return ids_of(self._text.encode_segments(segments))

    async def text(self, text: str, *, add_special: bool) -> tuple[int, ...]:
        """A plain text's token ids."""
        self._check(len(text), "prompt")
        if len(text) > INLINE_CHARS:
            return await self._in_thread(
                lambda: ids_of(self._text.encode_text(text, add_special=add_special))
            )
        return ids_of(self._text.encode_text(text, add_special=add_special))

    def _check(self, chars: int, param: str) -> None:
        if surely_longer(chars, self._capacity):
            raise too_long(None, self._capacity, param)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)


def required(value: T | None, name: str) -> T:
    """The value, or a 400 that says it is missing."""
    if value is None:
        raise ApiError(400, f"Missing '{name}'.", param=name, code="missing_required_parameter")
    return value
