"""A model's text side: chat messages to token ids and ids to text.

Owns tokenizer, chat template and special-token table of one model, loaded from bytes that the caller read.
What must hold: tokenizing a prompt segment by segment gives exactly the ids of tokenizing it whole. That is
checked at load; where it does not hold for a tokenizer, `segmented` is False and prompts are tokenized whole.
A client's text never becomes a control token. Ids travel as bytes, int32 little endian, as `chain` hashes
them.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from sys import byteorder
from typing import Any

from tokenizers import Tokenizer
from xxhash import xxh3_128_hexdigest

from canonicalizer.detokenizer import Detokenizer
from canonicalizer.messages import TemplateError
from canonicalizer.segment_cache import SegmentCache
from canonicalizer.special import Segment, SpecialTokens, cutting_is_sound
from canonicalizer.template import FROZEN_DATE, ChatTemplate
from canonicalizer.token_text import TokenBytes, probe_texts, uses_byte_level

__all__ = [
    "CACHE_BYTES",
    "MAX_CHARS_PER_TOKEN",
    "Detokenizer",
    "Segment",
    "TemplateError",
    "TextModel",
    "bytes_to_ids",
    "ids_to_bytes",
    "surely_longer",
]

CACHE_BYTES = 64 << 20
MAX_CHARS_PER_TOKEN = 16
"""Average characters of a token over a whole prompt that is taken as possible: prose has four, indented
code eight. A text that is longer for its room is refused before anyone pays for its tokens."""

_UNLOCKED_CHARS = 1024
_USER_TEXTS = ("a", "7")  # two user messages that share no first token
_TOKEN_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def surely_longer(chars: int, tokens: int) -> bool:
    """True when a text of `chars` characters is taken to have more than `tokens` tokens."""
    return chars > tokens * MAX_CHARS_PER_TOKEN


def ids_to_bytes(ids: Sequence[int]) -> bytes:
    """Token ids as int32, little endian."""
    if byteorder == "little":
        return array("i", ids).tobytes()
    return struct.pack(f"<{len(ids)}i", *ids)


def bytes_to_ids(tokens: bytes) -> list[int]:
    """The inverse of `ids_to_bytes`."""
    return list(struct.unpack(f"<{len(tokens) // 4}i", tokens))


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token ... of tokenizer_config.json as texts (an entry may be a text or an object)."""
    named = {}
    for role in _TOKEN_ROLES:
        value = config.get(role)
        text = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(text, str):
            named[role] = text
    return named


def _template_sources(config: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates by name: one text is `default`, a list names its own (`default`, `tool_use`)."""
    source = config.get("chat_template")
    if isinstance(source, str):
        return {"default": source}
    if isinstance(source, Sequence):
        return {str(item["name"]): str(item["template"]) for item in source}
    return {}


class TextModel:
    """Tokenizer, chat template and special tokens of one model. Use `from_files`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        templates: Mapping[str, ChatTemplate],
        eos_ids: Iterable[int],
        fingerprint_parts: str,
        bos_token: str | None = None,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self._tokenizer = tokenizer
        self._templates = dict(templates)
        self._cache = SegmentCache(cache_bytes)
        added = tokenizer.get_added_tokens_decoder()
        self.special = SpecialTokens(
            {token.content: index for index, token in added.items() if token.special}
        )
        self.special_ids: frozenset[int] = frozenset(self.special.ids.values())
        self._special_bytes = {text: ids_to_bytes([index]) for text, index in self.special.ids.items()}
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        self.bos_id: int | None = None if bos_token is None else tokenizer.token_to_id(bos_token)
        self.eos_ids: tuple[int, ...] = tuple(eos_ids)
        self.fingerprint_parts = fingerprint_parts
        described = json.loads(tokenizer.to_str())
        self.byte_level: bool = uses_byte_level(described)
        self._bytes = TokenBytes(tokenizer, {index: token.content for index, token in added.items()})
        sound = cutting_is_sound(described["added_tokens"], described["normalizer"] is not None)
        self.segmented: bool = sound and self._cutting_matches_whole()
        self._before, self._after = self._framing()
        tokenizer.encode_special_tokens = True
        self._parsing = tokenizer if self.segmented else Tokenizer.from_str(tokenizer.to_str())

    @classmethod
    def from_files(
        cls,
        tokenizer_json: bytes | str,
        tokenizer_config: Mapping[str, Any],
        generation_config: Mapping[str, Any] | None = None,
        *,
        date: datetime = FROZEN_DATE,
        cache_bytes: int = CACHE_BYTES,
    ) -> TextModel:
        """A text model from the contents of tokenizer.json, tokenizer_config.json and generation_config.json.

        A template kept in chat_template.jinja belongs into `tokenizer_config["chat_template"]`. `date` is
        what templates that ask for today see. Raises `ValueError` for a tokenizer that can't be read,
        `TemplateError` for a template that can't be compiled.
        """
        text = tokenizer_json.decode() if isinstance(tokenizer_json, bytes) else tokenizer_json
        try:
            tokenizer = Tokenizer.from_str(text)
        except Exception as error:  # tokenizers raises bare Exception
            raise ValueError(f"tokenizer.json can't be read: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        named = _named_tokens(tokenizer_config)
        sources = _template_sources(tokenizer_config)
        templates = {name: ChatTemplate(source, named, date=date) for name, source in sources.items()}
        ends = (generation_config or {}).get("eos_token_id")
        if ends is None and "eos_token" in named:
            ends = tokenizer.token_to_id(named["eos_token"])
        eos_ids = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
        parts = json.dumps([text, sources, named], sort_keys=True, ensure_ascii=False)
        print_of = xxh3_128_hexdigest(parts.encode("utf-8", "surrogatepass"))
        return cls(tokenizer, templates, eos_ids, print_of, named.get("bos_token"), cache_bytes)

    @property
    def template(self) -> ChatTemplate:
        """The chat template used without tools; raises `TemplateError` when the model has none."""
        return self._template_for(None)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> list[Segment]:
        """The prompt of OpenAI chat messages, cut at its special tokens; raises `TemplateError`.

        Special-token strings inside `messages`, `tools` and `extra` stay text.
        """
        template = self._template_for(tools)
        mask = self.special.mask
        try:
            prepared, tools, extra = mask(template.prepare(messages)), mask(tools), mask(extra)
        except RecursionError as error:
            raise TemplateError("the messages or tools are nested too deeply") from error
        text = template.render_prepared(
            prepared, tools=tools, add_generation_prompt=add_generation_prompt, extra=extra
        )
        return self.special.cut_masked(text) if self.segmented else self.special.cut_at_typed(text)

    def encode_segments(self, segments: Iterable[Segment]) -> bytes:
        """The ids of `segments`, int32 LE; text seen before comes from the cache."""
        pieces = []
        for text, special in segments:
            known = self._special_bytes.get(text) if special else self._cache.get(text)
            if known is None:
                known = self._encode(text, special)
            pieces.append(known)
        return b"".join(pieces)

    def encode_text(self, text: str, add_special: bool = False) -> bytes:
        """The ids of a plain completion prompt, int32 LE; special tokens in it are parsed.

        `add_special` puts the tokenizer's own start and end tokens around it.
        """
        segments = self.special.cut(text) if self.segmented else [Segment(text, True)]
        ids = self.encode_segments(segments)
        return self._before + ids + self._after if add_special else ids

    def uncached_chars(self, segments: Iterable[Segment]) -> int:
        """Characters of `segments` whose ids are not in the cache: what `encode_segments` has to tokenize."""
        cache, special_texts = self._cache, self._special_bytes
        return sum(
            len(text)
            for text, special in segments
            if (text not in special_texts if special else text not in cache)
        )

    def system_prefix(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> bytes:
        """The ids that every conversation starting with `messages` has in common, whatever its user says.

        They are the common prefix of the prompts for two user texts that share no first token.
        """
        first, second = (
            bytes_to_ids(self.encode_segments(self.render_chat([*messages, user], tools)))
            for user in ({"role": "user", "content": text} for text in _USER_TEXTS)
        )
        common = 0
        while common < min(len(first), len(second)) and first[common] == second[common]:
            common += 1
        return ids_to_bytes(first[:common])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids` without special tokens; bytes that are no UTF-8 become U+FFFD, spaces stay."""
        if not self.byte_level:
            stream = Detokenizer(self)
            return "".join([stream.push(index) for index in ids]) + stream.flush()
        kept = [index for index in ids if index not in self.special_ids]
        return b"".join(map(self._bytes.of, kept)).decode("utf-8", "replace")

    def decode_pieces(self, ids: Sequence[int]) -> str:
        """What the tokenizer's own decoder makes of `ids`, special tokens included."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes of `token_id`, maybe a part of a character; empty for an unknown id."""
        return self._bytes.of(token_id)

    def token_text(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None for an unknown id."""
        text: str | None = self._tokenizer.id_to_token(token_id)
        return text

    @property
    def cache(self) -> SegmentCache:
        """The segment cache, for its size and for tests."""
        return self._cache

    def _template_for(self, tools: object) -> ChatTemplate:
        template = self._templates.get("tool_use") if tools else None
        template = template or self._templates.get("default")
        if template is None:
            raise TemplateError("this model has no chat template: use /v1/completions")
        return template

    def _encode(self, text: str, special: bool) -> bytes:
        tokenizer = self._parsing if special else self._tokenizer
        try:
            ids = _ids_of(tokenizer, text)
        except (UnicodeEncodeError, TypeError):  # lone surrogates
            ids = _ids_of(tokenizer, text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace"))
        if not special:
            self._cache.put(text, ids)
        return ids

    def _cutting_matches_whole(self) -> bool:
        """Whether a few hundred strings have the same ids cut at special tokens as whole."""
        tokenizer = self._tokenizer
        for text in probe_texts(sorted(self.special.ids)):
            tokenizer.encode_special_tokens = False
            whole = tokenizer.encode(text, add_special_tokens=False).ids
            tokenizer.encode_special_tokens = True
            cut: list[int] = []
            for piece in self.special.cut(text):
                if piece.special:
                    cut.append(self.special.ids[piece.text])
                else:
                    cut += tokenizer.encode(piece.text, add_special_tokens=False).ids
            if cut != whole:
                return False
        return True

    def _framing(self) -> tuple[bytes, bytes]:
        """The ids that the tokenizer's post-processor puts before and after a text."""
        plain = self._tokenizer.encode("a", add_special_tokens=False).ids
        framed = self._tokenizer.encode("a", add_special_tokens=True).ids
        for start in range(len(framed) - len(plain) + 1):
            if framed[start : start + len(plain)] == plain:
                return ids_to_bytes(framed[:start]), ids_to_bytes(framed[start + len(plain) :])
        return b"", b""


def _ids_of(tokenizer: Tokenizer, text: str) -> bytes:
    """The ids of one text. `encode` holds Python's lock all the while, a batch gives it up: a long text that
    is tokenized in a thread must not stop the others."""
    if len(text) <= _UNLOCKED_CHARS:
        return ids_to_bytes(tokenizer.encode(text, add_special_tokens=False).ids)
    return ids_to_bytes(tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)
