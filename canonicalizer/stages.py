"""Stages that normalise instead of moving; each is off unless a ruleset names it.

* `crlf`: CRLF to LF in system text.
* `trailing`: blank characters after the last line of a system text.
* `nfc`: composed Unicode forms in system text.
* `tool_order`: tools sorted by name; their schemas stay as they are.

User text, assistant text, tool results, code fences and `response_format` are never normalised.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from canonicalizer.edits import Edit, order_edit
from canonicalizer.prompt import Prompt, Text
from canonicalizer.regions import in_fence
from canonicalizer.rules import Hit

_CRLF = re.compile(r"\r\n")
_COMBINED = re.compile(r"[^\W_][\u0300-\u036f\u3099\u309a]+|[\u1100-\u1112][\u1161-\u1175][\u11a8-\u11c2]?")


def stage_edits(
    stages: Sequence[str], body: Mapping[str, Any], prompt: Prompt, hits: Sequence[Hit]
) -> list[Edit]:
    """Edits of the named stages; spans that a rule moves are left to the rule."""
    edits: list[Edit] = []
    for index, text in enumerate(prompt.system):
        taken = [(hit.start, hit.end) for hit in hits if hit.text == index]
        for stage in stages:
            for edit in text_stage(stage, text):
                if all(edit.end <= start or end <= edit.start for start, end in taken):
                    edits.append(edit)
                    taken.append((edit.start, edit.end))
    if "tool_order" in stages:
        order = sorted_tools(body)
        if order is not None:
            edits.append(order_edit("tool_order", ("tools",), order))
    return edits


def text_stage(stage: str, text: Text) -> list[Edit]:
    """Edits of one text stage for one system text."""
    value = text.value
    if stage == "trailing":
        end = len(value.rstrip(" \t\r\n"))
        if 0 < end < len(value) and not in_fence(value, end):
            return [Edit("trailing", text.path, end, len(value), value[end:], "")]
    if stage == "crlf" and "\r\n" in value:
        return [Edit("crlf", text.path, at.start(), at.end(), "\r\n", "\n") for at in _CRLF.finditer(value)]
    if stage == "nfc" and not unicodedata.is_normalized("NFC", value):
        edits = []
        for at in _COMBINED.finditer(value):
            composed = unicodedata.normalize("NFC", at.group())
            if composed != at.group() and not in_fence(value, at.start()):
                edits.append(Edit("nfc", text.path, at.start(), at.end(), at.group(), composed))
        return edits
    return []


def sorted_tools(body: Mapping[str, Any]) -> list[int] | None:
    """The order that sorts the tools by name, or None where they are in order or a name is missing or
    repeated."""
    tools = body.get("tools")
    if not isinstance(tools, list) or len(tools) < 2:
        return None
    names = [tool_name(tool) for tool in tools]
    if "" in names or len(set(names)) < len(names):
        return None
    order = sorted(range(len(names)), key=names.__getitem__)
    return None if order == list(range(len(names))) else order


def tool_name(tool: Any) -> str:
    """A tool's name in the chat or the Anthropic shape; empty where there is none."""
    if not isinstance(tool, Mapping):
        return ""
    inner = tool.get("function", tool)
    name = inner.get("name") if isinstance(inner, Mapping) else None
    return name if isinstance(name, str) else ""
