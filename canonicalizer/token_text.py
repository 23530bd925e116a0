"""What single tokens stand for, in bytes, and the texts that a tokenizer is probed with.

Owns the byte-level BPE alphabet: GPT-2's reversible map of the 256 bytes to printable characters, in which
such vocabularies are spelled. What must hold: the map is one to one, and an id's bytes never change.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte: printable Latin-1 bytes stand for themselves, the others follow from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = itertools.count(0x100)
    return {chr(byte if byte in printable else next(moved)): byte for byte in range(256)}


BYTE_OF_CHARACTER: Mapping[str, int] = MappingProxyType(_byte_alphabet())


class _Vocabulary(Protocol):
    def id_to_token(self, id: int) -> str | None: ...


def uses_byte_level(described: Mapping[str, Any]) -> bool:
    """Whether a tokenizer (its tokenizer.json value) decodes through the byte-level alphabet."""
    decoder = described.get("decoder") or {}
    return any(part.get("type") == "ByteLevel" for part in [decoder, *decoder.get("decoders", [])])


class TokenBytes:
    """The bytes of each token of a byte-level vocabulary, worked out when first asked for."""

    def __init__(self, vocabulary: _Vocabulary, added: Mapping[int, str]) -> None:
        """`added` maps ids of added tokens to their text, which is spelled plainly."""
        self._vocabulary = vocabulary
        self._known = {index: text.encode() for index, text in added.items()}

    def of(self, token_id: int) -> bytes:
        """The token's bytes; empty for an id outside the vocabulary."""
        known = self._known.get(token_id)
        if known is None:
            text = self._vocabulary.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None
            if text is None:
                return b""
            codes = [BYTE_OF_CHARACTER.get(character) for character in text]
            known = text.encode() if None in codes else bytes(code for code in codes if code is not None)
            self._known[token_id] = known
        return known


_PIECES = (
    "",
    " ",
    "\n",
    "\n\n",
    "\t",
    " x",
    "x ",
    "user\nhi",
    "word",
    " word",
    "Word.",
    "12",
    " 12\n",
    "\r\n",
    "a\u0301",
    "你好",
    " مرحبا",
    "👩‍👩‍👧",
    "it's",
    "'s",
    "def f():\n    return 1\n",
    "  \n  ",
    "\u00a0",
    "<",
    "<|",
    "|>",
    "_",
    "▁",
)


def probe_texts(specials: Sequence[str]) -> Iterator[str]:
    """A few hundred texts with special tokens between pieces that could join across them."""
    if not specials:
        return
    for at, (before, after) in enumerate(itertools.product(_PIECES, repeat=2)):
        first, second = specials[at % len(specials)], specials[(at * 7 + 3) % len(specials)]
        middle = _PIECES[(at * 5 + 1) % len(_PIECES)]
        yield f"{before}{first}{after}{second}{middle}"
