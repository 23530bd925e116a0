"""Where text must not be edited: code, quotes, JSON, and few-shot examples.

All answers err on the side of "protected". They are asked only for the few spans that a rule is about to
move, so a prompt without a hit costs nothing here.
"""

from __future__ import annotations

import re
from bisect import bisect_right

_MAX_LINE = 8_192
_MAX_PARAGRAPH = 65_536
_MAX_LINES_UP = 256
"""How far around a span is looked; a span whose surroundings are larger counts as protected."""

_FENCE = re.compile(r"^[ ]{0,3}(`{3,}|~{3,})", re.M)
_EXAMPLE_LEAD = re.compile(
    r"\b(examples?|e\.g\.|such as|for instance|sample|beispiel|z\. ?b\.|p\. ?ej\.|par exemple)(?!\w)", re.I
)
_EXAMPLE_TAG = re.compile(
    r"<(/?)(?:[\w-]*example[\w-]*|sample[\w-]*|few[-_]?shot\w*|demonstration\w*)\b[^>\n]*>", re.I
)
_HEADING = re.compile(r"^(#{1,6})[ \t]+(.*)$", re.M)
_REPLY = re.compile(r"^[ \t>*_-]*(?:assistant|ai|model|bot|a|answer|agent|output)\b[*_]*[ \t]*:", re.I | re.M)
_REPLY_INLINE = re.compile(r"\b(?:assistant|answer|ai|a|bot)[*_]*[ \t]*:", re.I)
_ASK = re.compile(r"\b(?:user|human|q|question|customer|input)[*_]*[ \t]*:", re.I)


class Regions:
    """The protected places of one system text. What must be read from its start is read once, however many
    spans are asked about."""

    __slots__ = ("_fences", "_headings", "_tags", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self._fences: tuple[list[int], list[bool]] | None = None
        self._tags: tuple[list[int], list[int]] | None = None
        self._headings: tuple[list[int], list[str]] | None = None

    def is_protected(self, start: int, end: int) -> bool:
        """True when characters `[start, end)` stand where no rule may edit."""
        text = self.text
        line_start = text.rfind("\n", 0, start) + 1
        line_end = text.find("\n", end)
        line_end = len(text) if line_end < 0 else line_end
        if start - line_start > _MAX_LINE or line_end - end > _MAX_LINE:
            return True
        before = text[line_start:start]
        return (
            self.in_fence(start)
            or _is_quoted(before, text[end:line_end])
            or _is_indented_code(text, line_start)
            or _in_json(text, start)
            or _in_example_line(text, line_start, line_end, start)
            or self._in_example_part(line_start, start)
        )

    def in_fence(self, at: int) -> bool:
        """True when character `at` lies inside a code fence."""
        if self._fences is None:
            self._fences = _fences(self.text)
        ends, opened = self._fences
        place = bisect_right(ends, at)
        return place > 0 and opened[place - 1]

    def _in_example_part(self, line_start: int, start: int) -> bool:
        """Inside an example element, or below a heading that announces examples."""
        if self._tags is None:
            self._tags = _tag_depths(self.text)
        ends, depths = self._tags
        place = bisect_right(ends, start)
        if place and depths[place - 1] > 0:
            return True
        if self._headings is None:
            found = list(_HEADING.finditer(self.text)) if "#" in self.text else []
            self._headings = ([heading.end() for heading in found], [heading[2] for heading in found])
        heads, titles = self._headings
        place = bisect_right(heads, line_start)
        return place > 0 and _EXAMPLE_LEAD.search(titles[place - 1]) is not None


def is_protected(text: str, start: int, end: int) -> bool:
    """True when characters `[start, end)` of a system text stand where no rule may edit."""
    return Regions(text).is_protected(start, end)


def in_fence(text: str, at: int) -> bool:
    """True when character `at` lies inside a code fence."""
    return Regions(text).in_fence(at)


def _fences(text: str) -> tuple[list[int], list[bool]]:
    """Ends of all fence marks, and whether a fence is open behind each."""
    ends: list[int] = []
    states: list[bool] = []
    if "```" not in text and "~~~" not in text:
        return ends, states
    opened = ""
    for fence in _FENCE.finditer(text):
        mark = fence[1]
        if not opened:
            opened = mark
        elif mark[0] == opened[0] and len(mark) >= len(opened):
            opened = ""
        ends.append(fence.end())
        states.append(bool(opened))
    return ends, states


def _tag_depths(text: str) -> tuple[list[int], list[int]]:
    """Ends of all example tags, and how many elements are open behind each."""
    ends: list[int] = []
    depths: list[int] = []
    depth = 0
    for tag in _EXAMPLE_TAG.finditer(text) if "<" in text else ():
        depth += -1 if tag[1] else 1
        ends.append(tag.end())
        depths.append(depth)
    return ends, depths


def ends_open(text: str) -> bool:
    """True when text appended after `text` would land inside a code fence, inline code or a quotation."""
    if in_fence(text, len(text)):
        return True
    last = text[text.rfind("\n") + 1 :]
    quotes = len(re.findall(r'(?<![\d\\])"', last))
    return (
        quotes % 2 == 1
        or _curly_quote_open(last)
        or last.count("«") > last.count("»")
        or (last.count("`") % 2 == 1 and not _FENCE.match(last))
        or text.count('"""') % 2 == 1
        or last.lstrip().startswith(">")
    )


def _curly_quote_open(line: str) -> bool:
    """„German“ quotes close with the mark that opens “English” ones."""
    if "„" in line:
        return line.count("„") > line.count("“") + line.count("”")
    return line.count("“") > line.count("”")


def _is_quoted(before: str, after: str) -> bool:
    if before.count("`") % 2 or before.count('"') % 2:
        return True
    if before.count("“") > before.count("”") or before.count("«") > before.count("»"):
        return True
    return before[-1:] in ("'", "‘", "(") and after[:1] in ("'", "’") or before[-1:] == "'"


def _is_indented_code(text: str, line_start: int) -> bool:
    """Markdown's indented code: lines of four blanks or a tab that follow an empty line."""
    at = line_start
    for _ in range(_MAX_LINES_UP):
        if text[at : at + 4] != "    " and text[at : at + 1] != "\t":
            return False
        if at == 0:
            return True
        previous = text.rfind("\n", 0, at - 1) + 1
        if not text[previous : at - 1].strip():
            return True
        at = previous
    return True


def _in_json(text: str, start: int) -> bool:
    """An unclosed brace since the last empty line."""
    floor = max(0, start - _MAX_PARAGRAPH)
    paragraph = text.rfind("\n\n", floor, start)
    if paragraph < 0 and floor:
        return True
    return text.count("{", paragraph + 1, start) > text.count("}", paragraph + 1, start)


def _in_example_line(text: str, line_start: int, line_end: int, start: int) -> bool:
    line = text[line_start:line_end]
    if start > line_start:
        sentence = max(text.rfind(". ", line_start, start), line_start)
        if _EXAMPLE_LEAD.search(text, sentence, start):
            return True
    if _EXAMPLE_LEAD.match(line.lstrip("-*# 0123456789.)")) or _REPLY.search(line):
        return True
    if _ASK.search(line) is None:
        return False
    following = text[line_end + 1 : line_end + 200].lstrip("\n").partition("\n")[0]
    return _REPLY_INLINE.search(line) is not None or _REPLY.match(following) is not None
