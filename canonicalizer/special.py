"""Special tokens: where prompts are cut, and how text that merely looks like one stays text.

Owns the table of a tokenizer's special tokens. Text from a client is *masked* before rendering: each
special-token string in it becomes two rare characters, so that the rendered prompt holds special tokens
only where the template wrote them; after the cut the text is unmasked. What must hold:
`unmask(mask(text)) == text` for every text, also for one that holds those characters itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

# A placeholder is MARK and one character: chr(_BASE) stands for MARK itself, chr(_BASE + k) for special token
# k - 1. Both are rare but printable, so that a template may print them in any way (tojson, Python's repr).
MARK = "\U00014400"  # Anatolian hieroglyph A001
_BASE = 0x20000  # CJK extension B: 42,000 characters


class Segment(NamedTuple):
    """A piece of a prompt. `special` text is parsed for special tokens; other text never is."""

    text: str
    special: bool


class SpecialTokens:
    """The special tokens of one tokenizer: text -> id, with cutting and masking."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        """`ids` maps each special token's text to its id; empty texts are left out."""
        self.ids: dict[str, int] = {text: index for text, index in ids.items() if text}
        longest_first = sorted(self.ids, key=lambda text: (-len(text), text))
        names = "|".join(re.escape(text) for text in longest_first)
        self._cut = re.compile(f"({names})") if names else None
        self._unsafe = re.compile(f"{names}|{MARK}" if names else MARK)
        self._first = {text[0] for text in longest_first}
        self._code = {text: MARK + chr(_BASE + 1 + at) for at, text in enumerate(longest_first)}
        self._code[MARK] = MARK + chr(_BASE)
        self._text = {code: text for text, code in self._code.items()}

    def mask_text(self, text: str) -> str:
        """`text` with every special-token string replaced by its placeholder; itself when there is none."""
        if MARK not in text:
            # One scan for a first character settles most texts in a twentieth of the pattern's time.
            for first in self._first:
                if first in text:
                    break
            else:
                return text
            if self._cut is None or self._cut.search(text) is None:
                return text
        return self._unsafe.sub(lambda found: self._code[found[0]], text)

    def mask(self, value: Any) -> Any:
        """A JSON value with every string in it masked, keys too; parts that need no change are not copied."""
        if isinstance(value, str):
            return self.mask_text(value)
        if isinstance(value, dict | MappingProxyType):
            masked = {self.mask(key): self.mask(item) for key, item in value.items()}
            same = all(a is b for a, b in zip(masked.values(), value.values(), strict=True))
            return value if same and masked.keys() == value.keys() else masked
        if isinstance(value, list | tuple):
            items = [self.mask(item) for item in value]
            return value if all(a is b for a, b in zip(items, value, strict=True)) else items
        return value

    def unmask(self, text: str) -> str:
        """The original of a masked text."""
        if MARK not in text:
            return text
        return re.sub(f"{MARK}.", lambda found: self._text.get(found[0], found[0]), text, flags=re.DOTALL)

    def cut(self, text: str) -> list[Segment]:
        """`text` cut at its special tokens, leftmost and longest first as tokenizers do; no empty pieces."""
        if self._cut is None:
            return [Segment(text, False)] if text else []
        pieces = self._cut.split(text)
        return [Segment(piece, bool(at % 2)) for at, piece in enumerate(pieces) if piece]

    def cut_masked(self, text: str) -> list[Segment]:
        """A rendered masked prompt cut at the template's special tokens, its text pieces unmasked."""
        if MARK not in text:
            return self.cut(text)
        return [item if item.special else Segment(self.unmask(item.text), False) for item in self.cut(text)]

    def cut_at_typed(self, text: str) -> list[Segment]:
        """A rendered masked prompt cut only where a client typed a special token's text, which stays text."""
        if MARK not in text:
            return [Segment(text, True)] if text else []
        pieces = re.split(f"({MARK}.)", text, flags=re.DOTALL)
        return [Segment(self.unmask(piece), at % 2 == 0) for at, piece in enumerate(pieces) if piece]


def cutting_is_sound(added_tokens: Iterable[Mapping[str, Any]], normalizes: bool) -> bool:
    """Whether the special tokens' own settings allow cutting at them.

    None may take neighbouring spaces, need a word boundary, or be looked for in normalized text.
    """
    return not any(
        token.get("lstrip")
        or token.get("rstrip")
        or token.get("single_word")
        or (token.get("normalized") and normalizes)
        for token in added_tokens
        if token.get("special")
    )
