"""Where text must not be edited: code, quotes, JSON, and few-shot examples.

All answers err on the side of "protected". They are asked only for the few spans that a rule is about to
move, so a prompt without a hit costs nothing here.
"""

from __future__ import annotations

import re

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


def is_protected(text: str, start: int, end: int) -> bool:
    """True when characters `[start, end)` of a system text stand where no rule may edit."""
    line_start = text.rfind("\n", 0, start) + 1
    line_end = text.find("\n", end)
    line_end = len(text) if line_end < 0 else line_end
    before = text[line_start:start]
    return (
        in_fence(text, start)
        or _is_quoted(before, text[end:line_end])
        or _is_indented_code(text, line_start)
        or _in_json(text, start)
        or _in_example(text, line_start, line_end, start)
    )


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


def in_fence(text: str, at: int) -> bool:
    """True when character `at` lies inside a code fence."""
    if text.find("```", 0, at) < 0 and text.find("~~~", 0, at) < 0:
        return False
    opened = ""
    for fence in _FENCE.finditer(text, 0, at):
        mark = fence[1]
        if not opened:
            opened = mark
        elif mark[0] == opened[0] and len(mark) >= len(opened):
            opened = ""
    return bool(opened)


def _is_quoted(before: str, after: str) -> bool:
    if before.count("`") % 2 or before.count('"') % 2:
        return True
    if before.count("“") > before.count("”") or before.count("«") > before.count("»"):
        return True
    return before[-1:] in ("'", "‘", "(") and after[:1] in ("'", "’") or before[-1:] == "'"


def _is_indented_code(text: str, line_start: int) -> bool:
    """Markdown's indented code: lines of four blanks or a tab that follow an empty line."""
    at = line_start
    while text[at : at + 4] == "    " or text[at : at + 1] == "\t":
        if at == 0:
            return True
        previous = text.rfind("\n", 0, at - 1) + 1
        if not text[previous : at - 1].strip():
            return True
        at = previous
    return False


def _in_json(text: str, start: int) -> bool:
    """An unclosed brace since the last empty line."""
    paragraph = text.rfind("\n\n", 0, start) + 1
    return text.count("{", paragraph, start) > text.count("}", paragraph, start)


def _in_example(text: str, line_start: int, line_end: int, start: int) -> bool:
    sentence = max(text.rfind(". ", line_start, start), text.rfind("\n", 0, start))
    lead = text[line_start:line_end].lstrip("-*# 0123456789.)")
    if _EXAMPLE_LEAD.search(text, max(sentence, line_start), start) or _EXAMPLE_LEAD.match(lead):
        return True
    line = text[line_start:line_end]
    if _REPLY.search(line) or (_ASK.search(line) and _REPLY_INLINE.search(line)):
        return True
    following = text[line_end + 1 : line_end + 200].lstrip("\n").partition("\n")[0]
    if _ASK.search(line) and _REPLY.match(following):
        return True
    depth = 0
    for tag in _EXAMPLE_TAG.finditer(text, 0, start):
        depth += -1 if tag[1] else 1
    if depth > 0:
        return True
    headings = _HEADING.findall(text, 0, line_start)
    return bool(headings) and _EXAMPLE_LEAD.search(headings[-1][1]) is not None
