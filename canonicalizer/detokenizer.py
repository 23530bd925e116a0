"""Token ids to text, one token at a time.

Owns what a stream may emit so far. What must hold: the pieces of `push` and `flush` joined are the text of
all tokens decoded at once, code point for code point. U+FFFD is never emitted for a character that is merely
unfinished, only for bytes that can't be UTF-8 any more, or at `flush`. Work is on bytes and code points, so
no later token changes what was emitted: combining marks and joiners just follow.
"""

from __future__ import annotations

import codecs
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from canonicalizer.tokens import TextModel

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Detokenizer:
    """Incremental detokenizer of one sequence; special tokens are skipped, spaces are never cleaned up.

    Byte-level vocabularies are decoded from their bytes. For others a token's text is what the tokenizer's
    decoder adds for it after the token before, and byte tokens (`<0xNN>`) are joined as bytes.
    """

    __slots__ = ("_context", "_decoder", "_model", "_started")

    def __init__(self, model: TextModel) -> None:
        self._model = model
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._context: int | None = None  # the text token before, where the vocabulary is not byte-level
        self._started = False

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; empty while a character is unfinished."""
        model = self._model
        if token_id in model.special_ids:
            return ""
        if model.byte_level:
            return self._decoder.decode(model.token_bytes(token_id))
        byte = _BYTE_TOKEN.fullmatch(model.token_text(token_id) or "")
        if byte:
            self._started = True
            self._context = None
            return self._decoder.decode(bytes.fromhex(byte[1]))
        return self.flush() + self._piece(token_id)

    def flush(self) -> str:
        """The rest at the end of the sequence: U+FFFD for a character that was never finished, else empty."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest

    def _piece(self, token_id: int) -> str:
        """The text of a token that stands for whole characters."""
        decode = self._model.decode_pieces
        if not self._started:
            self._started = True
            self._context = token_id
            return decode([token_id])
        before = token_id if self._context is None else self._context
        self._context = token_id
        return decode([before, token_id])[len(decode([before])) :]
